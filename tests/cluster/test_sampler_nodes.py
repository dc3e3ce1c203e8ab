"""Samplers on nodes of their own: which hosts they get, and that they end with who started them."""

import asyncio
import json
import subprocess
import threading
import time
from http.server import HTTPServer
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from nanodag.config.pipeline import ClusterConfig
from nanodag.config.stage_base import Resources
from nanodag.engines.sampler_node import SamplerNode
from nanodag.engines.start import ServerProcess, start_engine
from nanodag.errors import ConfigError, NodeLost
from nanodag.host.ports import free_port
from nanodag.inference.client import SamplerClient
from nanodag.inference.engine_settings import EngineSettings
from nanodag.inference.protocol import Request, SamplingParams
from nanodag.worker import nodes
from tests.fault.processes import wait_until
from tests.http_server import Quiet
from tests.rl.models import save_tiny_model


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Three nodes of which the others are processes of this machine."""
    (tmp_path / "reach").write_text('shift; exec "$@"')
    (tmp_path / "hostfile").write_text("one slots=2\nhere slots=2\ntwo slots=2\nsmall slots=1\n")
    monkeypatch.setattr(nodes, "_own_names", lambda: {"here"})
    monkeypatch.setattr(nodes, "seen_address", lambda host: "127.0.0.1")
    return ClusterConfig(hostfile=str(tmp_path / "hostfile"), ssh_command=f"sh {tmp_path}/reach {{host}}")


def test_samplers_have_the_hosts_after_the_trainers(cluster):
    two, one = Resources(num_ranks=4, nodes=2, device="cpu"), Resources(num_ranks=2, nodes=1, device="cpu")
    assert nodes.sampler_hosts(cluster, two, 1) == ["two"]
    assert nodes.sampler_hosts(cluster, one, 2) == ["one", "two"]


def test_a_sampler_of_another_node_answers_with_its_token_and_ends_when_it_is_hung_up(cluster, tmp_path):
    model = save_tiny_model(tmp_path / "model")
    node = SamplerNode(cluster, "two", tmp_path, number=3)
    request = Request(input_ids=[1, 2], params=SamplingParams(max_new_tokens=3, ignore_eos=True))

    async def asked(url):
        async with SamplerClient(url, token="secret") as client:
            return await client.generate([request])

    settings = EngineSettings(model=model, dtype="float32", context_length=32, token="secret")
    server = start_engine(settings, log_path=tmp_path / "log", elsewhere=node)
    try:
        assert server.url.startswith("http://127.0.0.1:") and server.is_alive
        ((answer,),) = asyncio.run(asked(server.url))
        assert len(answer.output_ids) == 3
        below = psutil.Process(server.pid).children(recursive=True)
        assert below and "ready on port" in server.tail()
    finally:
        server.stop()
    wait_until(lambda: not any(process.is_running() for process in below), 30)
    assert not server.is_alive
    assert (tmp_path / "usage-sampler-3.jsonl").exists()


def test_a_sampler_of_another_node_has_started_when_it_is_reached_from_here(tmp_path):
    port, asked = free_port(), []

    class Health(Quiet):
        def do_GET(self):
            asked.append(self.path)
            self.answer(status=200 if len(asked) > 1 else 503)

    def link():
        time.sleep(0.1)
        with HTTPServer(("127.0.0.1", port), Health) as server:
            while len(asked) < 2:
                server.handle_request()

    def spawn(command, *, log_path, env, token):
        """Say by a file that a sampler is there, which nothing reaches for a while."""
        Path(json.loads(command[-1])["ready_file"]).write_text(json.dumps({"port": port}))
        threading.Thread(target=link, daemon=True).start()
        return ServerProcess(subprocess.Popen(["sleep", "60"]), log_path=log_path, in_group=True)

    away = SimpleNamespace(host="there", spawn=spawn, address="127.0.0.1")
    (tmp_path / "log").touch()
    with start_engine(EngineSettings(model="model"), log_path=tmp_path / "log", elsewhere=away) as server:
        assert asked == ["/health"] * 2 and server.url == f"http://127.0.0.1:{port}"


def test_a_node_of_samplers_that_is_not_there_is_asked_again_and_then_named(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(nodes, "AGAIN_AFTER_S", 0.01)
    monkeypatch.setattr(nodes, "REACH_TIMEOUT_S", 0.2)
    (tmp_path / "reach").write_text(f"echo no way >> {tmp_path}/tries; echo no way; exit 255")
    node = SamplerNode(cluster, "two", tmp_path, number=0)
    with pytest.raises(NodeLost, match=r"(?s)two could not be reached in 0 s.*no way"):
        node.spawn(["true"], log_path=tmp_path / "log", env={}, token="secret")
    assert len((tmp_path / "tries").read_text().splitlines()) > 1
    (tmp_path / "reach").write_text(f"exit {nodes.NOT_SHARED_EXIT_CODE}")
    with pytest.raises(ConfigError, match=r"two has no folder .* All nodes must share"):
        node.spawn(["true"], log_path=tmp_path / "log", env={}, token="secret")
