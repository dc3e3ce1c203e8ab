"""A whole RL stage, tiny: a model of random weights, a tokenizer of bytes, prompts in a file, a reward with spread."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from nanodag.config.derive_sampler import derive_sampler
from nanodag.config.kinds import find_kind
from nanodag.host.machine import machine_of
from nanodag.own_code.find import FOLDER_VARIABLE
from nanodag.rl.rollouts.rollout import read_lines
from nanodag.tokenizer.bpe import save_tokenizer
from nanodag.worker.job import STOPPED_EXIT_CODE, Job, write_job
from nanodag.worker.launch import worker_environment
from tests import forks
from tests.rl.models import save_tiny_model

BYTES = {bytes([value]): value for value in range(256)}
VOCABULARY = 266
KILL, STOP = signal.SIGKILL, signal.SIGTERM
STARTED = "started"  # in the workspace: when its last process was
MACHINE = machine_of("cpu:2:avx2:8GiB")
REWARD = '''
def vowels(prompt, completion):
    """Share of ASCII letters: an untrained model gets a few, and can learn to write more."""
    return sum(c.isascii() and c.isalpha() for c in completion) / max(len(completion), 1)


def score(doc, results):
    """The same, as a benchmark's metric."""
    return {"share": vowels({}, results[0])}
'''

FORM = """
task: vowels
custom_dataset: !function nanodag.evaluation.items.rows
output_type: generate_until
doc_to_text: prompt
doc_to_target: answer
process_results: !function tiny_reward.score
metric_list:
  - {metric: share, aggregation: mean, higher_is_better: true}
"""


def benchmark(folder: Path, name: str, **values: Any) -> dict[str, Any]:
    """A benchmark of the stage's own prompts and reward; `make_job` writes its form."""
    return {"name": name, "form": f"{folder}/vowels.yaml", "source": f"file:{folder}/prompts.jsonl", **values}


def on(num_ranks: int) -> dict[str, Any]:
    """Values of a stage with so many ranks on a CPU."""
    return {"resources": {"num_ranks": num_ranks, "threads": 1, "device": "cpu"}}


def make_job(folder: Path, head_dim: int = 8, **config: Any) -> Job:
    """The job of a stage of two steps of 2 prompts x 4 samples x 8 tokens, its files in `folder`."""
    model = save_tiny_model(folder / "model", vocabulary=VOCABULARY, head_dim=head_dim)
    save_tokenizer(BYTES, model)
    (folder / "tiny_reward.py").write_text(REWARD)
    for name in ("vowels", "vowels_chat"):
        (folder / f"{name}.yaml").write_text(FORM)
    prompts = [{"prompt": f"word {n}", "answer": "x", "prompt_id": f"p{n}"} for n in range(11)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    values = {"kind": "rl", "inputs": {}, "seed": 7, **on(1)}
    values |= {"data": [{"url": f"file:{folder}/prompts.jsonl", "held_out": 0.3}], "reward": "tiny_reward:vowels"}
    values |= {"prompts_per_step": 2, "samples_per_prompt": 4, "max_new_tokens": 8, "num_steps": 2}
    values |= {"sampler": {"context": 64, "max_batch": 16}, "micro_batch_tokens": 64, "precision": "fp32"}
    values |= {"learning_rate": 1e-2, "eval_every": 1, "eval_prompts": 3, "checkpoint_every": 1, **config}
    stage = derive_sampler("rl", find_kind(str(values["kind"])).config.of(**values), MACHINE, None, {})
    workspace = folder / "workspace"
    workspace.mkdir(exist_ok=True)
    files = {"inputs": {"model": model}, "workspace": workspace, "context": {"code": str(folder)}}
    job = Job(name="rl", run="test", config=stage, **files)
    write_job(job)
    return job


def slow_rewards(folder: Path) -> None:
    """A step of so small a model takes 10 ms, too few for a kill to meet it: the same rewards, each 20 ms later."""
    path = folder / "tiny_reward.py"
    path.write_text("import time\n" + path.read_text().replace("    return", "    time.sleep(0.02)\n    return"))


def start(job: Job, *, fresh: bool = False) -> forks.Forked | subprocess.Popen[bytes]:
    """The stage's worker, in a process group of its own, writing to worker.log. fresh: it and what it starts are
    interpreters of their own, as they are outside of tests; else forks."""
    environment = worker_environment(1)
    file, log = job.workspace / "job.json", job.workspace / "worker.log"
    module = find_kind(job.config.kind).module
    (job.workspace / STARTED).touch()
    if not fresh:
        return forks.start_module(module, file, environment=environment, log=log)
    command = [sys.executable, "-m", module, str(file)]
    with log.open("ab") as stream:
        streams = {"stdout": stream, "stderr": stream, "stdin": subprocess.DEVNULL}
        return subprocess.Popen(command, env=environment, start_new_session=True, **streams)


def run(job: Job, *, fresh: bool = False) -> None:
    process = start(job, fresh=fresh)
    code = process.wait(timeout=300)
    assert code == 0 and (job.workspace / "result.json").exists(), (job.workspace / "worker.log").read_text()[-6000:]


def metrics(job: Job, event: str = "step") -> list[dict[str, Any]]:
    written = job.metrics_path.read_text().rpartition("\n")[0]  # a line may be under way
    lines = [json.loads(line) for line in written.splitlines()]
    return [line for line in lines if line["event"] == event]


def digest(folder: Path) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return hashlib.sha256(b"".join(path.name.encode() + path.read_bytes() for path in files)).hexdigest()


def wait_for_step(job, process, step: int) -> None:
    """Return once this process has written the step, or a later one, to metrics.jsonl. Lines of a process before it
    count only where this one had nothing left to do."""
    deadline, began, code = time.monotonic() + 300, (job.workspace / STARTED).stat().st_mtime, None
    while time.monotonic() < deadline and code is None:
        code = process.poll()
        lines = metrics(job) if job.metrics_path.exists() else []
        if any(line["step"] >= step and (line["time"] >= began or code == 0) for line in lines):
            return
        time.sleep(0.01)
    log = (job.workspace / "worker.log").read_text()[-4000:]
    how = "not reached in 300 s" if code is None else f"ended with {code}"
    raise AssertionError(f"step {step}: {how} after steps {[line['step'] for line in lines]}\n{log}")


def without_time(lines: list[dict]) -> list[dict]:
    parts = ("second", "_bytes", "time", "mfu", "peak")
    return [{k: v for k, v in line.items() if not any(part in k for part in parts)} for line in lines]


def same_in_the_end(job, undisturbed) -> None:
    """Product, kept weights, answers to benchmarks, metrics, evaluations and ledger are what they would have been."""
    assert digest(job.output) == digest(undisturbed.output)
    for kept in ("weights", "benchmarks"):
        assert digest(job.records / kept) == digest(undisturbed.records / kept), kept
    for event in ("step", "eval"):
        assert without_time(metrics(job, event)) == without_time(metrics(undisturbed, event))
    assert list(read_lines(job.records / "ledger.jsonl")) == list(read_lines(undisturbed.records / "ledger.jsonl"))


def outcomes_of(job: Job) -> list[dict[str, Any]]:
    """The lines of the ledger, which has each prompt of a pass once at most."""
    lines = list(read_lines(job.records / "ledger.jsonl"))
    assert max(Counter((line["epoch"], line["prompt_id"]) for line in lines).values()) == 1
    return lines


def end_group(process) -> bool:
    """Kill it and all that it started; True where it was still running. A fork that has ended is gone at once."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait() == -signal.SIGKILL


def disturb(job: Job, *windows: tuple[int, int, signal.Signals], fresh: bool = False) -> int:
    """Start the stage for each window, first and last step and signal, and send its process group the signal at a
    moment after one of these steps, 0 for its start. Returns how often the signal ended it."""
    moment, num_ended = random.Random(os.getpid()), 0
    for first, last, signum in windows:
        process, step = start(job, fresh=fresh), moment.randint(first, last)
        if step:
            wait_for_step(job, process, step)
        time.sleep(moment.random() * (0.1 if step else 1.0))
        with suppress(ProcessLookupError):  # its group is not there yet, or not any more
            os.killpg(process.pid, signum)
        num_ended += process.wait(timeout=120) in (STOPPED_EXIT_CODE, -signum)
        end_group(process)
    return num_ended


def left_of(folder: Path, words: str) -> list[psutil.Process]:
    """The processes that stages below a folder have left, after a while: those that have a file there open, as the
    stage's log, and those with these words in their command lines whose modules lie there. What they do stands in no
    command line."""
    deadline = time.monotonic() + 30
    while True:
        found = [process for process in psutil.process_iter() if _is_of(process, folder, words)]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def _is_of(process: psutil.Process, folder: Path, words: str) -> bool:
    with suppress(psutil.Error):  # it has ended, or is another user's
        if any(file.path.startswith(f"{folder}/") for file in process.open_files()):
            return True
        return words in " ".join(process.cmdline()) and str(folder) in process.environ().get(FOLDER_VARIABLE, "")
    return False
