"""The code blocks of README.md and docs/, run as a reader would: command by command, from a folder that is not the
checkout, without PYTHONPATH.

All pages share a store with two runs of `pocket`, reduced, called RUN and OTHER as the pages call them. Each page has a
folder with a pipeline file. A `python` block whose first line names a file is written to it before all else, the next
ones are added to it, and it is imported; on a page that names no file a block is run. A `sh` command is run once,
however many pages have it; one that serves does so until the next or the page's end. A `yaml` block is added to the
pipeline file, which `nanodag config` reads; one that names a file of its page is run.
"""

import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from nanodag.config.pipeline import Pipeline
from nanodag.host.folders import PROJECT
from nanodag.host.ports import free_port
from tests.doc_pages import FENCED, PAGES, named
from tests.flow.reduced import reduce_stages, reduced_stages
from tests.flow.tiny_mirror import TABLES, write_mirror

MOST_NOT_RUN = 47  # may only get smaller
NOT_RUN = {  # reason -> how commands and blocks begin
    "sets up the checkout, or tests it": (
        "./speedrun.sh", "git clone", "rm -rf store .venv", ".ci/run",
    ),
    "needs a network": (
        ".venv/bin/pip", "pip install", ".venv/bin/wandb", ".venv/bin/trackio", "nanodag run tracking.trackers=[",
        "nanodag serve Qwen", "nanodag sampler install", "nanodag env install", "nanodag notify",
        "export NANODAG_WEBHOOK", "export AWS_ENDPOINT_URL", "nanodag run store.url=s3://", "lm_eval --model",
        "NANODAG_CORE_BUNDLE",
    ),
    "needs another package: SGLang, verifiers, OpenEnv": (
        "nanodag run rl.sampler.engine=sglang", "nanodag sampler serve --model Qwen",
        "# pipeline.yaml, beside boxes.py", "benchmarks:\n  - {name: boxes", 'generate: {name: "openenv:',
    ),
    "needs a GPU, or several machines": (
        "nanodag run --preset gsm8k-rl", "cluster: {hostfile", "server: {host: 10.0.0.5", "store: {url: /shared",
        "stages:\n  rl:\n    sampler: {urls", "export PREFECT", ".venv/bin/prefect", "sbatch", "cd /shared",
        "export NANODAG_SGLANG", "for gpu", "mv servers.new", "ssh node1", "nanodag run --detach",
        "nanodag slurm --on",
    ),
    "needs a stage under way, or a stale one": ("tail -f", "tensorboard --logdir", "nanodag rerun RUN --stale"),
    "takes long, and is run in another form elsewhere": (
        "nanodag run --preset small", "nanodag sweep --grid", "nanodag rerun RUN --from sft --force",
    ),
    "is no part of a pipeline file": ("name: Ada", "url: http://127.0.0.1:8000/v1"),
}  # fmt: skip
SERVES = re.compile(
    r"nanodag (sampler )?serve\b|--web|nanodag rollouts( RUN)?( --port \d+)?$|python -m nanodag.sampler"
)
FILE = re.compile(r"# ([\w/]+\.\w+)")  # a first line: the file that the block is
STAGES = ("tokenizer", "pretrain", "midtrain", "sft", "rl")
STAGE_OF = {"data": "sft", "benchmarks": "eval_sft"}  # whose settings a block has that names no stage; else of rl
FIRST = ["docs/tutorial/first-run.md", "docs/tutorial/own-data.md"]  # they look at the newest run
ORDERED = sorted(PAGES, key=lambda page: (named(page) not in FIRST, named(page)))


def pieces_of(page: Path) -> Iterator[tuple[str, str]]:
    """Language and text of each command and block of a page that is to be run."""
    left_out = tuple(text for texts in NOT_RUN.values() for text in texts)
    blocks = [(block[2], block[3]) for block in FENCED.finditer(page.read_text(encoding="utf-8"))]
    if any(language == "python" and FILE.match(block) for language, block in blocks):
        blocks.sort(key=lambda each: each[0] != "python")  # the commands that use a file may stand above it
    for language, block in blocks:
        if language in ("sh", "python", "yaml"):
            for piece in commands_of(block) if language == "sh" else [block]:
                if not piece.startswith(left_out):
                    yield language, piece


def commands_of(block: str) -> Iterator[str]:
    """The commands of a `sh` block, without comments; one may have several lines."""
    lines = ""
    for line in block.splitlines(keepends=True):
        lines += line
        reads = subprocess.run(["bash", "-nc", lines], stderr=subprocess.DEVNULL, check=False).returncode == 0
        if reads and not line.endswith("\\\n"):
            yield re.sub(r"\s+# .*", "", lines).strip()
            lines = ""
    assert not lines, f"bash cannot read {lines!r}"


def test_what_is_not_run_only_gets_less():
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    beginnings = [beginning for texts in NOT_RUN.values() for beginning in texts]
    assert len(beginnings) <= MOST_NOT_RUN
    assert [beginning for beginning in beginnings if f"\n{beginning}" not in text] == [], "no page has that any more"


@dataclass(frozen=True, kw_only=True)
class Reader:
    """A reader's machine. home: has the store, its server, a mirror, data. port: a free one. said: what a page says ->
    what is meant here. done: the commands that have been run."""

    home: Path
    port: int
    said: dict[str, str] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)

    def start(self, command: str, folder: Path) -> subprocess.Popen:
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "NANODAG_", "PYTHON"))}
        environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
        environment.update({f"NANODAG_{name.upper()}": str(self.home / name) for name in ("store", "cache", "mirror")})
        with (folder / "output").open("w") as output:
            return subprocess.Popen(
                ["bash", "-euo", "pipefail", "-c", self.meant(command)],
                cwd=folder,
                env=environment | {"HOME": str(self.home)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def meant(self, text: str) -> str:
        for words, meaning in self.said.items():
            text = text.replace(words, meaning)
        return text

    def run(self, command: str, folder: Path) -> None:
        print(f"$ {command}")
        code = self.start(command, folder).wait(900)
        assert code == 0, f"{command}\nends with {code}\n{(folder / 'output').read_text(errors='replace')[-3000:]}"

    def serve(self, command: str, folder: Path) -> subprocess.Popen:
        """A command under way that answers at the port."""
        print(f"$ {command}")
        port = "" if re.search(r"--port|8000", command) else f" --port {self.port}"
        process, deadline = self.start(command + port, folder), time.monotonic() + 600
        while process.poll() is None and time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return process
            time.sleep(0.1)
        end(process)
        raise AssertionError(f"{command}\nserves nothing\n{(folder / 'output').read_text(errors='replace')[-3000:]}")


def end(process: subprocess.Popen) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
    process.wait(120)


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    home = tmp_path_factory.mktemp("reader")
    made = Reader(home=home, port=free_port())
    write_mirror(home / "mirror")
    write_data(home)
    write_pipeline(home / "pipeline.yaml")
    made.run("nanodag run --preset pocket --name RUN", home)
    made.run("nanodag run --preset pocket --name OTHER rl.learning_rate=2e-4", home)
    made.run("nanodag export RUN:rl model", home)
    made.run("nanodag rollouts RUN --export data/rollouts.jsonl", home)
    # The reduced model's answers all end by length, with one reward: a page's reader has a model that learned.
    rows = [json.loads(line) for line in (home / "data" / "rollouts.jsonl").read_text().splitlines()]
    learned = [row | {"reward": float(row["sample_index"] == 0), "finish_reason": "stop"} for row in rows]
    for name in ("rollouts.jsonl", "answers.jsonl"):
        (home / "data" / name).write_text("".join(json.dumps(row) + "\n" for row in learned))
    made.said.update(meanings(home, made.port))
    yield made
    made.run("nanodag server stop", home)


def meanings(home: Path, port: int) -> dict[str, str]:
    """What the pages say of a reader's machine -> what it is here, smaller where it takes long."""
    stages = json.loads((home / "store" / "runs" / "RUN.json").read_text())["stages"]
    attempts = {stage: f"{entry['key']}/{entry['made']['attempt']}" for stage, entry in stages.items()}
    smaller = {f"rl.num_steps={steps}": "rl.num_steps=1" for steps in (20, 50, 150)}
    places = {
        ".venv/bin/": "",
        "KEY/0001": attempts["eval_sft"],
        "OTHER/0001": attempts["eval_rl"],
        "/store/.../": f"{home}/store/artifacts/{attempts['rl']}/",
        '"hub:DigitalLearningGmbH/MATH-lighteval:train"': f'"file:{home}/data/math.jsonl"',
        'source="hub:openai/gsm8k/main:test"': f'source="file:{home}/mirror/openai/gsm8k/main/test.parquet"',
        "nightly run --preset small": "nightly run --preset pocket",
        "/opt/agents/bin/python": sys.executable,
        "/home/me/project": f"{home}/how-to-benchmark",
        "file:/data/": f"file:{home}/data/",
        "folder: /data/": f"folder: {home}/data/",
        "url: /data/": f"url: {home}/data/",
        "/models/": f"{home}/models/",
        "rl.warmup_steps=10": "rl.warmup_steps=1",
        "rl.updates_per_step=4": "rl.updates_per_step=2",
        "--step 20": "--step 1",
        "held_out: 0.001": "held_out: 0.1",  # of 40 rows
        # A random model has no right answer, and RL stops where it finds nothing to learn from.
        "nanodag run --preset post-train": "nanodag run --preset post-train rl.num_steps=2 rl.filters=[]",
        "--keep-runs 5 ": "--keep-runs 99 ",
        "--keep-runs 10 ": "--keep-runs 99 ",
    }
    return smaller | places | dict.fromkeys(("8000", "8080", "30000"), str(port))


def write_pipeline(path: Path) -> None:
    """The shipped presets, `pocket` reduced, and as the default what of it a changed value is to build."""
    presets = yaml.safe_load((PROJECT / "pipeline.yaml").read_text())["presets"]
    stages = reduced_stages("pocket", without=("eval_base", "eval_mid"))
    stages["rl"].update(num_steps=1)
    presets["pocket"] = {"stages": stages}
    presets["quick"] = {"extends": "pocket", "stages": dict.fromkeys(("eval_rl", "report"), "drop")}
    server = {"port": free_port(), "start_timeout_s": 600}
    tree = {"default": "quick", "presets": presets, "server": server, "tracking": {"trackers": []}}
    path.write_text(yaml.safe_dump(tree, sort_keys=False).replace("size=20000", "size=8"))


def write_data(home: Path) -> None:
    """What pages say a reader has: files below /data and /models."""
    rng = random.Random(0)
    data = home / "data"
    for folder in ("books", "textbooks", "agent"):
        (data / folder).mkdir(parents=True)
    for number in range(200):
        (data / "books" / f"{number}.txt").write_text(TABLES["wikimedia/wikipedia/20231101.en/train"](rng)["text"])
    shutil.copy(home / "mirror/crumb/openstax-text/default/train.parquet", data / "textbooks")
    (data / "agent" / "agent.py").write_text("")
    capitals = [("France", "Paris", "Lyon"), ("Italy", "Rome", "Milan"), ("Spain", "Madrid", "Vigo")]
    rows = {
        "chats": [TABLES["HuggingFaceTB/smol-smoltalk/default/train"](rng) for _ in range(60)],
        "math": [{"problem": f"What is {n} + 1?", "solution": f"\\boxed{{{n + 1}}}"} for n in range(20)],
        "problems": [{"question": f"Add {n} and 1.", "answer": str(n + 1)} for n in range(20)],
        "test-problems": [{"question": f"Add {n} and 1.", "answer": str(n + 1)} for n in range(20, 24)],
        "capitals": [{"country": one, "choices": choices} for one, *choices in capitals],
    }
    for name, table in rows.items():
        (data / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table))
    for name in ("SmolLM2-135M", "SmolLM2-135M-Instruct", "gemma-2-2b-it", "base", "larger"):
        (home / "models").mkdir(exist_ok=True)
        (home / "models" / name).symlink_to(home / "mirror" / "Qwen" / "Qwen2.5-0.5B-Instruct")
    (home / "models" / "adapter").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (home / "models" / "adapter" / name).write_text("{}")
    for path in (home / "sampler-key", home / "key"):
        path.write_text("at-least-16-characters")
        path.chmod(0o600)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", ORDERED, ids=named)
def test_the_code_of_a_page_runs_as_written(page, reader):
    folder = reader.home / named(page).removeprefix("docs/").removesuffix(".md").replace("/", "-")
    folder.mkdir()
    shutil.copy(reader.home / "pipeline.yaml", folder)
    shutil.copy(Path(__file__).with_name("openai.py"), folder)
    (folder / "question.txt").write_text("What is 12*34?")
    for name, target in (("store", "store"), ("FOLDER", "model"), ("DIR", "model")):
        (folder / name).symlink_to(reader.home / target)
    written: list[Path] = []
    serving = []
    try:
        for language, piece in pieces_of(page):
            if language == "sh" and SERVES.search(piece):
                while serving:
                    end(serving.pop())
                serving.append(reader.serve(piece, folder))
            elif language == "sh":
                if reader.meant(piece) not in reader.done:
                    reader.run(piece, folder)
                reader.done.add(reader.meant(piece))
            elif language == "python":
                run_python(reader, piece, folder, written)
            else:
                run_yaml(reader, piece, folder, written)
    finally:
        for process in serving:
            end(process)


def run_python(reader: Reader, block: str, folder: Path, written: list[Path]) -> None:
    if file := FILE.match(block):
        written.append(folder / file[1])
    if modules := [path for path in written if path.suffix == ".py"]:
        with modules[-1].open("a") as module:
            module.write(f"{block}\n")
        block = f"import {modules[-1].stem}"
    reader.run(f"python - <<'END'\n{block}\nEND", folder)


def run_yaml(reader: Reader, block: str, folder: Path, written: list[Path]) -> None:
    if file := FILE.match(block):
        written.append(folder / file[1])
        written[-1].parent.mkdir(exist_ok=True)
        written[-1].write_text(block)
        return
    part = yaml.safe_load(reader.meant(block))
    mine = folder / "mine.yaml"
    if "default" in part:
        mine.write_text(reader.meant(block))
        reader.run("nanodag config --file mine.yaml", folder)
        if "tokenizer" in part["presets"]["mine"]["stages"]:  # the page goes on to run it
            reduce_stages(part["presets"]["mine"]["stages"])
            mine.write_text(yaml.safe_dump(part | {"tracking": {"trackers": []}}, sort_keys=False))
        return
    extended = PROJECT / "pipeline.yaml" if not mine.exists() else mine
    write_added(part, extended, folder / "added.yaml")
    reader.run("nanodag config --file added.yaml", folder)
    if any(file.stem in block for file in written):
        write_added(part, folder / "pipeline.yaml", folder / "added.yaml")
        reader.run("nanodag run --file added.yaml", folder)


def write_added(part: dict[str, Any], extended: Path, path: Path) -> None:
    """Write a pipeline file and a block that adds to it: to the file, a preset, the stages, or the stage it is of."""
    whole: dict[str, Any] = yaml.safe_load(extended.read_text())
    stages: dict[str, Any] = {}
    for name, value in part.items():
        if name == "stages":
            stages.update(value)
        elif name in Pipeline.model_fields:
            whole[name] = whole.get(name, {}) | value
        elif name == "presets":
            for preset, more in value.items():
                whole["presets"][preset].update(more)
        elif name in STAGES or "kind" in value:
            stages[name] = value
        else:
            stages.setdefault(STAGE_OF.get(name, "rl"), {})[name] = value
    if "data" in stages.get("sft", {}):
        stages["sft"].setdefault("patience", 0)  # it waits for a loss on held-out rows, which a page may not have
    whole["presets"]["added"] = {"extends": whole["default"], "stages": stages}
    path.write_text(yaml.safe_dump(whole | {"default": "added"}, sort_keys=False))
