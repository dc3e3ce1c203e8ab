"""Content digests of every stage of pocket, of RL in each kind of environment, and of served answers, to compare two
revisions of the code.

    python -m benchmarks.same_bytes record before.json --store /tmp/before     # in a checkout of the one
    python -m benchmarks.same_bytes record after.json --store /tmp/after       # in a checkout of the other
    python -m benchmarks.same_bytes compare before.json after.json

Both are recorded on one machine. --ranks 2 takes two ranks a stage, --steps 3 at most three steps, which shows a broken
path in minutes. --without rl_verifiers leaves a stage out, as where verifiers is not installed. `compare` prints a line
a stage, and ends with code 1 when one differs. The report is left out, as it holds times.
"""

import argparse
import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import yaml

from benchmarks.pocket import PROJECT, artifact_of, nanodag
from nanodag.store import Store

CODE = """
import json
import urllib.request


class Guess:
    roles = {"player": True}

    def __init__(self, *, largest=20):
        self.largest = largest

    def reset(self, *, seed, record):
        self.number = 1 + seed % self.largest
        return f"Reverse: {self.number} 11"

    def step(self, action):
        is_right = str(self.number) in action.text
        return "Reverse: 22 11", float(is_right), is_right, {"components": {"length": len(action.text) / 10}}

    def metrics(self):
        return {"number": self.number}


def agent(task):
    messages, reward = list(task.record["messages"]), 0.0
    for _ in range(2):
        body = json.dumps({"model": task.model, "messages": messages}).encode()
        headers = {"Authorization": f"Bearer {task.api_key}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{task.base_url}/chat/completions", body, headers)
        with urllib.request.urlopen(request) as answer:
            text = json.load(answer)["choices"][0]["message"]["content"] or ""
        reward += text.count("1") / 4
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Reverse: 33 11"}]
    return reward


async def twice(sampler, sample, *, question="Reverse: 44 11"):
    sample = await sampler.turn(sample)
    sample = sample.with_tool(sampler.encode(question))
    return await sampler.turn(sample)
"""
WORLDS: dict[str, dict[str, Any]] = {
    "rl_class": {"generate": {"name": "environment:same_bytes_code:Guess", "options": {"max_turns": 3}}},
    "rl_agent": {"generate": {"name": "agent:same_bytes_code:agent", "options": {"at_once": 4}}},
    "rl_turns": {"generate": "same_bytes_code:twice"},
    "rl_tools": {"generate": {"name": "calculator", "options": {"max_calls": 2}}},
    "rl_verifiers": {"generate": {"name": "verifiers:boxes", "options": {"agent.max_turns": 3}}},
}
REPORTED = ("rl_class", "rl_agent")  # whose episodes tell their own reward
BOXES = "verifiers:boxes?size=64&seed=2"
TOOL = {
    "type": "function",
    "function": {
        "name": "open_box",
        "description": "What lies in a box.",
        "parameters": {"type": "object", "properties": {"number": {"type": "string"}}, "required": ["number"]},
    },
}
ASK = {"messages": [{"role": "user", "content": "Sort: 52 17 98 43 21"}], "temperature": 0, "max_tokens": 24}
REQUESTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("chat/completions", ASK),
    ("chat/completions", {**ASK, "stream": True}),
    ("chat/completions", {**ASK, "temperature": 1, "seed": 5, "n": 3, "logprobs": True, "top_logprobs": 2}),
    ("chat/completions", {**ASK, "tools": [TOOL]}),
    ("chat/completions", {**ASK, "tools": [TOOL], "stream": True, "stop": ["4"]}),
    ("completions", {"prompt": "The city of", "max_tokens": 24, "temperature": 0, "logprobs": 1}),
    ("completions", {"prompt": ["In 1998 she", "Sort"], "max_tokens": 8, "temperature": 0, "stream": True}),
)
PASSING = re.compile(r'"(id|created|system_fingerprint|cached_tokens)":\s*("[^"]*"|\d+|null)')


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("out", type=Path)
    recording.add_argument("--store", type=Path, required=True)
    recording.add_argument("--ranks", type=int, default=1)
    recording.add_argument("--steps", type=int, default=0, help="of a stage at most; 0 for all")
    recording.add_argument("--without", nargs="*", default=[], metavar="STAGE")
    recording.add_argument("--port", type=int, default=4350, help="of the Prefect server")
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "compare":
        return compare(json.loads(arguments.before.read_text()), json.loads(arguments.after.read_text()))
    arguments.out.write_text(json.dumps(record(arguments), indent=1) + "\n")
    return 0


def record(arguments: argparse.Namespace) -> dict[str, str]:
    """What each stage left, and what was answered: name -> digest."""
    folder = arguments.store.absolute() / "pipeline"
    folder.mkdir(parents=True, exist_ok=True)
    for file in (PROJECT / "benchmarks" / "boxes").glob("*.py"):
        (folder / file.name).write_text(file.read_text())
    (folder / "same_bytes_code.py").write_text(CODE)
    stages = pipeline(arguments.ranks, arguments.steps, set(arguments.without))
    presets = {"same-bytes": {"stages": stages, "tracking": {"trackers": []}}}
    document = {"default": "same-bytes", "server": {"port": arguments.port}, "presets": presets}
    document["unchecked"] = ["eval_verifiers.max_new_tokens"]  # its prompts are short
    (folder / "pipeline.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
    store, run = arguments.store.absolute(), f"ranks-{arguments.ranks}"
    nanodag(store, "run", "--file", str(folder / "pipeline.yaml"), "--name", run, "seed=0")
    digests = {name: artifact_of(Store(store), run, name).digest for name in stages}
    model = Store(store).materialize(artifact_of(Store(store), run, "sft"))
    return digests | {f"served {place}": digest for place, digest in enumerate(served(model))}


def pipeline(num_ranks: int, steps: int, without: set[str]) -> dict[str, Any]:
    """Stages: those of pocket but the report, and one for each kind of environment after its SFT."""
    stages = yaml.safe_load((PROJECT / "pipeline.yaml").read_text())["presets"]["pocket"]["stages"]
    del stages["report"]
    stages["rl"]["rollout"]["max_staleness"] = 0
    for name, rollout in WORLDS.items():
        stages[name] = world_stage(stages["rl"], name, rollout)
    stages["eval_verifiers"] = {
        "kind": "eval",
        "inputs": {"model": "sft"},
        "benchmarks": [{"name": "boxes", "form": "verifiers", "source": BOXES, "options": {"agent.max_turns": 3}}],
        "max_new_tokens": 24,
    }
    for stage in stages.values():
        kind = stage["kind"]
        if kind not in ("tokenizer", "eval"):
            stage["resources"] = {"num_ranks": num_ranks, "threads": 1, "device": "cpu"}
        if steps and kind in ("pretrain", "midtrain", "sft"):
            stage["max_steps"] = steps
        if steps and kind == "rl":
            stage["num_steps"] = steps
            stage["optimizer"] = {**stage["optimizer"], "warmup_steps": min(steps, stage["optimizer"]["warmup_steps"])}
    return {name: stage for name, stage in stages.items() if name not in without}


def world_stage(rl: dict[str, Any], name: str, rollout: dict[str, Any]) -> dict[str, Any]:
    """A short RL stage whose samples act in an environment."""
    size = {"prompts_per_step": 8, "samples_per_prompt": 4, "max_new_tokens": 20}
    stage = {
        **rl,
        "inputs": {"model": "sft"},
        "num_steps": 4,
        "optimizer": {**rl["optimizer"], "warmup_steps": 1},
        "rollout": {**size, "max_staleness": 0, "filters": [], **rollout},
        "sampler": {"max_batch": 64, "context": 160},
        "evaluation": {**rl["evaluation"], "eval_every": 2, "eval_prompts": 16},
    }
    if name in REPORTED:
        stage["reward"] = "reported"
    if name == "rl_verifiers":
        stage["data"], stage["evaluation"]["validation"] = [BOXES], [f"{BOXES}&held_out=true"]
    return stage


def served(model: Path) -> list[str]:
    """Digests of the answers of a server in deterministic mode, without what is new in each answer."""
    command = [sys.executable, "-m", "nanodag.chat.web", "--model", f"m={model}", "--port", "0", "--device", "cpu"]
    with subprocess.Popen([*command, "--deterministic"], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = re.search(r"(http://\S+/v1)", server.stdout.readline())
            assert url is not None
            return [answer_digest(f"{url[1]}/{path}", body) for path, body in REQUESTS]
        finally:
            server.terminate()


def answer_digest(url: str, body: dict[str, Any]) -> str:
    """The sha256 of one answer; of a stream the joined pieces, as how they are cut is not promised."""
    with httpx.stream("POST", url, json={"model": "m", **body}, timeout=120.0) as answer:
        text = answer.read().decode()
    if answer.status_code != httpx.codes.OK:
        raise RuntimeError(f"{url} answered {answer.status_code}: {text}")
    if body.get("stream"):
        text = json.dumps(joined(text))
    return hashlib.sha256(PASSING.sub("", text).encode()).hexdigest()


def joined(stream: str) -> dict[str, str]:
    """The texts of a stream, by choice, with how each ended."""
    texts: dict[str, str] = {}
    for line in stream.splitlines():
        if not line.startswith("data: {"):
            continue
        for choice in json.loads(line[6:])["choices"]:
            piece = choice.get("delta", choice)
            words = piece.get("content", piece.get("text")) or ""
            calls = json.dumps(piece["tool_calls"]) if piece.get("tool_calls") else ""
            index = str(choice["index"])
            texts[index] = texts.get(index, "") + words + calls + (choice.get("finish_reason") or "")
    return texts


def compare(before: dict[str, str], after: dict[str, str]) -> int:
    """A line a name; returns 1 when one is not the same."""
    num_different = 0
    for name in list(dict.fromkeys([*before, *after])):
        is_same = before.get(name) == after.get(name)
        num_different += not is_same
        print(f"{'same' if is_same else 'DIFFERS':8}{name}  {before.get(name, '-')[:12]}  {after.get(name, '-')[:12]}")
    return int(num_different > 0)


if __name__ == "__main__":
    sys.exit(main())
