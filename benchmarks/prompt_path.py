"""The modules that a prompt passes on its way to a gradient: `python -m benchmarks.prompt_path`.

A tiny RL stage runs on a CPU with the embedded sampler. In each of its processes Python's profiler hook writes down
every nanodag module of which a function is called, with the time. The count covers one step, the second: drawing
prompts, generation, rewards, the optimizer's step, and giving the weights to the sampler. Set-up and imports come
before it. Metrics, records and the watch over processes count too: the hook cannot tell them from the path.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from nanodag.worker.launch import worker_environment
from tests.rl.stages import make_job

# Runs at the start of every Python process that has its folder on PYTHONPATH.
HOOK = """
import os, sys, threading, time

_folder = os.environ.get("NANODAG_PROMPT_PATH")
if _folder:
    _file = os.open(os.path.join(_folder, f"{os.getpid()}.calls"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    _seen = {}

    def _hook(frame, event, argument):
        if event != "call":
            return
        name = frame.f_globals.get("__name__", "")
        if name == "__main__":
            name = getattr(frame.f_globals.get("__spec__"), "name", "") or ""
        if not name.startswith("nanodag.") or frame.f_code.co_name == "<module>":
            return
        now = time.time()
        if now - _seen.get(name, 0) > 0.002:
            _seen[name] = now
            os.write(_file, f"{now} {name} {frame.f_code.co_name}\\n".encode())

    threading.setprofile(_hook)
    sys.setprofile(_hook)
"""


def entered(folder: Path) -> dict[str, tuple[str, set[str]]]:
    """Module -> one function called in it and the processes that called it, within the second step of a traced stage.

    Runs the stage in `folder`. Raises CalledProcessError when it fails.
    """
    (folder / "hook").mkdir()
    (folder / "hook" / "sitecustomize.py").write_text(HOOK)
    (folder / "calls").mkdir()
    job = make_job(folder, num_steps=3, eval_every=100, checkpoint_every=100)
    environment = worker_environment(1)
    paths = [str(folder / "hook"), str(folder), environment.get("PYTHONPATH", "")]
    environment |= {
        "NANODAG_PROMPT_PATH": str(folder / "calls"),
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
    }
    command = [sys.executable, "-m", "nanodag.rl", str(job.workspace / "job.json")]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    events = [json.loads(line) for line in (job.workspace / "metrics.jsonl").read_text().splitlines()]
    ends = {event["step"]: event["time"] for event in events if event["event"] == "step"}
    found: dict[str, tuple[str, set[str]]] = {}
    for file in (folder / "calls").iterdir():
        for line in file.read_text().splitlines():
            at, module, function = line.split()
            if ends[1] <= float(at) <= ends[2]:
                found.setdefault(module, (function, set()))[1].add(file.stem)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        modules = entered(Path(folder))
    rooms: dict[str, int] = {}
    for module, (function, processes) in sorted(modules.items()):
        room = module.rsplit(".", 1)[0]
        rooms[room] = rooms.get(room, 0) + 1
        print(f"{module:50} {function:30} {len(processes)} processes")
    for room, count in sorted(rooms.items()):
        print(f"{room:30} {count}")
    print(f"{len(modules)} modules")


if __name__ == "__main__":
    main()
