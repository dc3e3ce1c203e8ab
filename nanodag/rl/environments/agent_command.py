"""Agents that are any program, in the sandbox: `{name: agent, options: {command: [python, agent.py], folder: ...}}`.

The program finds the API in OPENAI_BASE_URL and OPENAI_API_KEY, its prompt's record as JSON in the file NANODAG_TASK, a
seed in NANODAG_SEED. It has no network beside the API, sees its folder and its library read-only, and writes below
/tmp/work, which is gone when it ends. What it prints is its answer, unless it posts one or `answer_file` names a file.
"""

import asyncio
import json
import sys
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from nanodag.children.forks import EpisodeFailed
from nanodag.errors import ConfigError
from nanodag.host.threads import MadeOnce, in_thread
from nanodag.registry import entry
from nanodag.rewards import sandbox
from nanodag.rl.environments.agent_session import CallLimits
from nanodag.rl.environments.sample import Sample, TurnSampler
from nanodag.rl.environments.sample_context import Visit, visited

SOCKET = "/inside/api"


@entry("generate", "agent", needs_sandbox=True)
async def command_agent(
    sampler: TurnSampler,
    sample: Sample,
    *,
    command: Sequence[str],
    folder: str = "",
    library: str = "",
    answer_file: str = "",
    seconds: float = 300.0,
    max_calls: int = 32,
    max_tokens: int = 0,
    max_bytes: int = 1 << 30,
    max_processes: int = 32,
    at_once: int = 8,
) -> Sample:
    """A program in the sandbox that asks the policy by OpenAI's API.

    folder: where it runs, such as that of its script. library: of a Python environment, whose `bin` is searched first.
    answer_file: below its work folder. seconds: of a sample. max_bytes: address space of each of its processes.
    at_once: programs that run at a time. The others as nanodag.rl.environments.agent_session has them.
    """
    given_up = threading.Event()

    async def run(visit: Visit) -> None:
        walls = sandbox.walls()
        outside = {
            "socket": "" if walls is None else SOCKET,
            "base_url": visit.base_url,
            "command": list(command),
            "folder": folder,
            "answer_file": answer_file,
            "record": dict(sample.record),
            "environment": {
                "OPENAI_API_KEY": visit.api_key,
                "NANODAG_SEED": str(sample.seed),
                "PATH": ":".join([*([f"{library}/bin"] if library else []), f"{sys.base_prefix}/bin", "/usr/bin:/bin"]),
            },
        }
        further = sandbox.Further(
            read_only=tuple(path for path in (folder, library) if path),
            shown=((str(visit.server.socket_path), SOCKET),),
            max_processes=max_processes,
        )
        finished = await in_thread(
            lambda: sandbox.run_python(
                _proxy(),
                stdin=json.dumps(outside, default=str),
                timeout_s=seconds,
                max_bytes=max_bytes,
                further=further,
                is_given_up=given_up.is_set,
            )
        )
        if finished.timed_out:
            raise EpisodeFailed(f"it took longer than {seconds:g} s", finished.stderr)
        if finished.returncode:
            raise EpisodeFailed(f"it ended with code {finished.returncode}", finished.stderr)
        if visit.session.answer is None and finished.stdout.strip():
            visit.session.answer = finished.stdout.strip()

    limits = CallLimits(max_calls=max_calls, max_tokens=max_tokens)
    try:
        return await visited(sampler, sample, limits, run, place=_places(at_once))
    finally:
        given_up.set()


@MadeOnce
def _places(at_once: int) -> asyncio.Semaphore:
    """Places of all samples. Raises ConfigError where there are none."""
    if at_once < 1:
        raise ConfigError(f"agent: at_once {at_once} must be above 0.")
    return asyncio.Semaphore(at_once)


@cache
def _proxy() -> str:
    return Path(__file__).with_name("sandbox_proxy.py").read_text(encoding="utf-8")
