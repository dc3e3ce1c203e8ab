"""Agents: whatever asks the policy by OpenAI's API while it works on a sample. No torch here.

`agent:package.module:function` is a Python function in a process of its own; `agent` with the option `command` any
program, in the sandbox; `verifiers:MODULE` a rollout of the `verifiers` package. docs/how-to/environment.md says what
each is given and returns. Each goes through `visited`, from the key of its session to the sample that came of it.
"""

import asyncio
import json
import shutil
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, closing
from pathlib import Path
from typing import Any

from nanodag.children.forks import EpisodeFailed, EpisodeLost, ForkLimits, shared_server
from nanodag.errors import ConfigError
from nanodag.external_envs.verifiers_process import VerifiersProcess, block_of
from nanodag.host.threads import MadeOnce, in_thread
from nanodag.own_code.find import required_file
from nanodag.registry import entry
from nanodag.rewards import sandbox
from nanodag.rl.environments import agent_fork
from nanodag.rl.environments.agent_session import MODEL, Session
from nanodag.rl.environments.api_server import MAX_ANSWER, the_api_server
from nanodag.rl.environments.sample import Sample, TurnSampler, places
from nanodag.rl.rollouts.rollout import METRICS, TURNS

MAX_FILE_BYTES = 1 << 30  # that a function may write
SOCKET = "/inside/api"  # of the API in the sandbox
PROXY = Path(__file__).with_name("sandbox_proxy.py")


async def visited(
    sampler: TurnSampler,
    sample: Sample,
    run: Callable[[Session, str], Awaitable[None]],
    *,
    place: AbstractAsyncContextManager[Any],
    max_calls: int,
    max_tokens: int,
) -> Sample:
    """The sample that comes of `run`, which gets its session, that takes what the agent says of its reward and answer,
    and the session's key, and is awaited while that is valid.

    place: entered before that; to wait there counts as no time of the agent's. An agent that fails once a call of its
    was refused for a limit was cut off: its sample has the answer and the reward that were said until then, else none
    and 0. Raises EpisodeFailed for other failures, EpisodeLost for one that was killed, SamplerError where the sampler
    is to blame, ValueError where nothing was asked or what was said is of no use.
    """
    server, session = the_api_server(), Session(sampler, sample, max_calls=max_calls, max_tokens=max_tokens)
    async with sampler.placed(place):
        key = server.admit(session)
        try:
            session.agent = asyncio.ensure_future(run(session, key))
            await session.agent
        except asyncio.CancelledError:
            if session.broken is None:  # else `result` tells of it
                raise
        except EpisodeLost:
            raise  # from its beginning it asks for the same again, and is answered the same
        except EpisodeFailed:
            if not session.cut:
                raise
            session.answer = session.answer or ""
            session.reward = session.reward or 0.0
        finally:
            server.dismiss(key)
    return session.result()


def _take(session: Session, returned: Any) -> None:
    """Keep the result of an agent's function: nothing, its reward, with components, or its answer. Raises ValueError
    for anything else."""
    if isinstance(returned, str):
        session.answer = returned
    elif isinstance(returned, list | tuple) and len(returned) == 2:
        session.report(*returned)
    elif returned is not None:
        session.report(returned)


@entry("generate", "agent", argument="function")
async def function_agent(
    sampler: TurnSampler,
    sample: Sample,
    *,
    named: str,
    python: str = "auto",
    seconds: float = 300.0,
    max_calls: int = 32,
    max_tokens: int = 0,
    max_bytes: int = 4 << 30,
    at_once: int = 16,
) -> Sample:
    """A function of yours that asks the policy by OpenAI's API, in a process of its own.

    python: the interpreter that has its packages. seconds: of a sample. at_once: processes. The others as
    nanodag.rl.environments.agent_session has them; max_bytes: address space of a process.
    """
    path, place = sys.executable if python == "auto" else shutil.which(python), places(f"agent {named}", at_once)
    if path is None:
        raise ConfigError(f"The agent's python {python!r} is no program. Give the path of an interpreter, or `auto`.")
    if seconds <= 0:
        raise ConfigError(f"agent {named}: seconds {seconds:g} must be above 0.")
    module = named.partition(":")[0]
    file = required_file(module, "agent")
    folder = file.parents[module.count(".") + (file.name == "__init__.py")]  # from which it is imported
    server = shared_server(
        f"{agent_fork.__name__}:make",
        json.dumps({"path": named, "folders": [str(folder)]}),
        ForkLimits(max_bytes=max_bytes, max_file_bytes=MAX_FILE_BYTES, shown_bytes=0),
        name=f"The agent {named}",
        python=path,
        max_answer_bytes=MAX_ANSWER,
    )

    async def run(session: Session, key: str) -> None:
        task = {
            "record": dict(sample.record),
            "base_url": the_api_server().base_url,
            "api_key": key,
            "model": MODEL,
            "seed": sample.seed,
        }
        with closing(await in_thread(server.fork)) as fork:
            _take(session, (await fork.ask(task, seconds)).get("returned"))

    return await visited(sampler, sample, run, place=place, max_calls=max_calls, max_tokens=max_tokens)


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
    given_up, place = threading.Event(), places("agent", at_once)

    async def run(session: Session, key: str) -> None:
        walls = sandbox.walls()
        outside = {
            "socket": "" if walls is None else SOCKET,
            "base_url": the_api_server().base_url,
            "command": list(command),
            "folder": folder,
            "answer_file": answer_file,
            "record": dict(sample.record),
            "environment": {
                "OPENAI_API_KEY": key,
                "NANODAG_SEED": str(sample.seed),
                "PATH": ":".join([*([f"{library}/bin"] if library else []), f"{sys.base_prefix}/bin", "/usr/bin:/bin"]),
            },
        }
        binds: list[sandbox.Bind] = [("--ro-bind", path, path) for path in (folder, library) if path]
        binds.append(("--bind", str(the_api_server().socket_path), SOCKET))
        finished = await in_thread(
            lambda: sandbox.run_python(
                PROXY.read_text(encoding="utf-8"),
                stdin=json.dumps(outside, default=str),
                timeout_s=seconds,
                max_bytes=max_bytes,
                binds=binds,
                max_processes=max_processes,
                is_given_up=given_up.is_set,
            )
        )
        if finished.timed_out:
            raise EpisodeFailed(f"it took longer than {seconds:g} s", finished.stderr)
        if finished.returncode:
            raise EpisodeFailed(f"it ended with code {finished.returncode}", finished.stderr)
        if session.answer is None and finished.stdout.strip():
            session.answer = finished.stdout.strip()

    try:
        return await visited(sampler, sample, run, place=place, max_calls=max_calls, max_tokens=max_tokens)
    finally:
        given_up.set()


@entry("generate", "verifiers", argument="module")
async def verifiers(
    sampler: TurnSampler,
    sample: Sample,
    *,
    named: str,
    max_calls: int = 64,
    max_tokens: int = 0,
    max_bytes: int = 8 << 30,
    at_once: int = 64,
    **options: Any,
) -> Sample:
    """An environment of the `verifiers` package, in a process of its Python environment; further options are verifiers'
    own, such as `agent.max_turns`.

    max_calls, max_tokens: as nanodag.rl.environments.agent_session has them. max_bytes: memory of the process, with all
    that it starts; one that takes more is ended. at_once: rollouts. The prompt's `metadata.task` is the task, as data
    of `verifiers:` have it.
    """
    if "task" not in sample.record["metadata"]:
        raise ValueError(f"the prompt has no metadata.task; take it from data as verifiers:{named}")
    block = json.dumps(block_of(named, options), sort_keys=True)
    # Another rollout may have ended the process. So a lost one has one to itself, and fails by its own fault alone.
    at_once = at_once if sampler.attempt == 0 else 1
    process, place = _process(block, max_bytes, at_once), places(f"verifiers:{named} {block}", at_once)

    async def run(session: Session, key: str) -> None:
        task = sample.record["metadata"]["task"]
        outcome = await process.rollout(task, base_url=the_api_server().base_url, api_key=key, model=MODEL)
        session.report(outcome["reward"], outcome["components"])
        session.metadata = {METRICS: outcome["metrics"], TURNS: outcome["turns"]}
        session.is_cut = outcome["is_cut"]

    return await visited(sampler, sample, run, place=place, max_calls=max_calls, max_tokens=max_tokens)


@MadeOnce
def _process(block: str, max_bytes: int, at_once: int) -> VerifiersProcess:
    """The process of an environment, for all samples. It belongs to the event loop of turns."""
    return VerifiersProcess(json.loads(block), max_bytes=max_bytes)
