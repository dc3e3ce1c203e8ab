"""Which machines a stage takes, how they are reached, and what is refused before anything starts."""

import json
import subprocess
import sys
from contextlib import closing
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from nanodag.config.derive import derive
from nanodag.config.pipeline import ClusterConfig, Pipeline
from nanodag.config.resolve import resolve
from nanodag.config.stage_base import Resources
from nanodag.errors import ConfigError, NodeLost
from nanodag.host.machine import detect
from nanodag.worker import nodes
from nanodag.worker.nodes import Nodes, chosen, read_hostfile


def test_a_hostfile_is_read_as_deepspeed_reads_it(tmp_path):
    path = tmp_path / "hostfile"
    path.write_text("\n# the first rack\nworker-1 slots=4\n\nworker-2   slots=8\n")
    oracle = "import sys; from deepspeed.launcher.runner import fetch_hostfile as f; print(dict(f(sys.argv[1])))"
    done = subprocess.run([sys.executable, "-c", oracle, str(path)], capture_output=True, text=True, check=True)
    assert str(read_hostfile(path)) == done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("text", "named"),
    [("worker-1 slots=four", "line 1: 'worker-1 slots=four'"), ("a slots=1\na slots=2", "line 2: a is there twice")],
)
def test_a_wrong_line_of_a_hostfile_is_named(tmp_path, text, named):
    (tmp_path / "hostfile").write_text(text)
    with pytest.raises(ConfigError, match=named):
        read_hostfile(tmp_path / "hostfile")


def test_this_machine_comes_first_and_hosts_without_room_are_passed_over(monkeypatch, tmp_path):
    monkeypatch.setattr(nodes, "_own_names", lambda: {"b"})
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("a slots=8\nsmall slots=1\nb slots=8\nc slots=8\n")
    assert chosen(hostfile, nodes=3, ranks_per_node=8) == ["b", "a", "c"]
    with pytest.raises(ConfigError, match="takes 4 nodes with 8 ranks each"):
        chosen(hostfile, nodes=4, ranks_per_node=8)
    monkeypatch.setattr(nodes, "_own_names", lambda: {"elsewhere"})
    with pytest.raises(ConfigError, match="does not name this machine"):
        chosen(hostfile, nodes=2, ranks_per_node=8)


def test_a_host_that_is_loopback_here_is_refused():
    with pytest.raises(ConfigError, match="is this machine itself"):
        nodes.seen_address("127.0.1.1")


BASE = {"kind": "import", "model": "file:/m"}
SFT = {
    **{"kind": "sft", "inputs": {"model": "base"}, "data": ["file:/x.jsonl"], "sequence_length": 8},
    **{"batch_tokens": 128, "optimizer": {"learning_rate": 1e-4, "matrix_lr": 1e-3}},
}


def pipeline(resources, of=SFT, **fields):
    """One whose stage `of` has these resources."""
    stages = {"base": BASE, of["kind"].replace("import", "base"): of | {"resources": resources}}
    return Pipeline.model_validate({"preset": "x", "stages": stages, **fields})


@pytest.mark.parametrize(
    ("resources", "num_ranks"),
    [
        ({"nodes": 2, "gpus_per_node": 8, "device": "cuda"}, 16),
        ({"nodes": 2, "device": "cpu"}, 2),
        ({"gpus_per_node": 4, "device": "cuda"}, 4),
    ],
)
def test_ranks_follow_from_nodes_and_gpus_of_each(resources, num_ranks):
    made, _ = derive(pipeline(resources, cluster={"hostfile": "/h"}), detect())
    assert made.stages["sft"].resources.num_ranks == num_ranks


IN_POOL = {"work_pool": "gpus", "device": "cuda"}


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        (lambda: Resources(nodes=2, num_ranks=3), "num_ranks 3 is not a multiple of nodes 2"),
        (lambda: Resources(nodes=2, num_ranks=4, gpus_per_node=8), "num_ranks 4 is not nodes 2 x gpus_per_node 8"),
        (lambda: Resources(gpus_per_node=8, device="cpu"), "gpus_per_node 8 means nothing on device cpu"),
        (lambda: Resources(work_pool="gpus"), "device auto is this machine's, not that of work_pool gpus"),
        (lambda: pipeline({"nodes": 2}), r"sft\.resources\.nodes 2 needs cluster\.hostfile"),
        (lambda: pipeline({"nodes": 2}, BASE), "a stage of kind import runs on one machine"),
        (lambda: pipeline(IN_POOL, BASE), r"work_pool 'gpus' needs server\.database on Postgres"),
        (lambda: ClusterConfig(ssh_command="ssh worker-1"), r"has no \{host\}"),
    ],
)
def test_resources_that_contradict_each_other_or_lack_what_they_need_are_refused(refused, reason):
    with pytest.raises(ValidationError, match=reason):
        refused()
    assert pipeline(IN_POOL, BASE, server={"database": "postgresql+asyncpg://u@h/db"})


@pytest.fixture
def reached(tmp_path, monkeypatch):
    """Two nodes of which the other one is a process of this machine; the script that reaches it is the test's."""

    def make(script):
        (tmp_path / "reach").write_text(script)
        (tmp_path / "hostfile").write_text("here slots=1\nthere slots=1\n")
        monkeypatch.setattr(nodes, "_own_names", lambda: {"here"})
        monkeypatch.setattr(nodes, "seen_address", lambda host: "127.0.0.1")
        monkeypatch.setattr(nodes, "AGAIN_AFTER_S", 0.1)
        monkeypatch.setattr(nodes, "REACH_TIMEOUT_S", 30.0)
        cluster = {"hostfile": str(tmp_path / "hostfile"), "ssh_command": f"sh {tmp_path}/reach {{host}}"}
        resources = Resources(num_ranks=2, nodes=2, threads=1, device="cpu")
        config = SimpleNamespace(stop_timeout_s=20.0, resources=resources)
        return Nodes(SimpleNamespace(config=config, context={"cluster": cluster}, workspace=tmp_path / "work"))

    (tmp_path / "work").mkdir()
    return make


def test_a_node_that_is_not_there_yet_is_asked_again(reached, tmp_path, monkeypatch):
    script = f'shift; [ -e {tmp_path}/once ] || {{ touch {tmp_path}/once; exit 255; }}; exec "$@"'
    made = reached(script)
    monkeypatch.setattr(Nodes, "command", lambda self, number, module: ["sh", "-c", f"echo {number} $A_B $GLOO_X > n"])
    monkeypatch.chdir(tmp_path)
    with closing(made):
        processes = made.start("nanodag.train", {"GLOO_X": "passed", "A_B": "kept", "PATH": "/usr/bin:/bin"})
        assert all(child.wait(300) for child in processes.values())
        assert [child.code for child in processes.values()] == [0, 0]
    assert (tmp_path / "once").exists() and list(processes) == ["here", "there"]
    assert (tmp_path / "work" / "usage-1.jsonl").exists()


def test_a_command_that_neither_reaches_a_node_nor_ends_is_given_up_at_the_time_limit(reached, monkeypatch):
    made = reached("exec sleep 1000")
    monkeypatch.setattr(nodes, "REACH_TIMEOUT_S", 0.3)
    made.end_timeout_s = 0.1
    with pytest.raises(NodeLost, match=r"there could not be reached in 0 s: .* has not ended"), closing(made):
        made.start("nanodag.train", {})
    assert [other.child.code for other in made._others.values()] == [-9]


@pytest.mark.parametrize("named", ["$HOME/hostfile-$JOB", "~/hostfile-$JOB"])
def test_a_hostfile_below_the_home_folder_is_found_by_variable_and_by_tilde(tmp_path, monkeypatch, named):
    monkeypatch.setenv("HOME", str(tmp_path))
    document = {"default": "x", "cluster": {"hostfile": named}, "presets": {"x": {"stages": {"base": BASE}}}}
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "pipeline.yaml").write_text(json.dumps(document))
    cluster = resolve(tmp_path / "sub" / "pipeline.yaml").pipeline.cluster
    with pytest.raises(ConfigError, match=r"\$JOB names a variable that is not set where the stage runs"):
        nodes.hostfile_of(cluster)
    monkeypatch.setenv("JOB", "77")
    assert nodes.hostfile_of(cluster) == tmp_path / "hostfile-77"


def test_a_node_without_the_workspace_is_a_config_error(reached, tmp_path):
    made = reached('shift; exec "$@"')
    (tmp_path / "work").rmdir()
    with pytest.raises(ConfigError, match=r"there has no folder .*work\. All nodes must share"), closing(made):
        made.start("nanodag.train", {})
