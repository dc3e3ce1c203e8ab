"""Agents that are a Python function: `agent:package.module:function`.

    def agent(task):
        client = openai.OpenAI(base_url=task.base_url, api_key=task.api_key)
        ...
        return 1.0

It may be `async def`. task: `record`, the prompt's (nanodag.data.records); `base_url`, `api_key` and `model`, which
are in OPENAI_BASE_URL and OPENAI_API_KEY, too; `seed`. It returns its reward, or a reward and its components, for the
reward `reported`; or its answer, a text, for a reward that judges it; or None.
"""

import asyncio
import shutil
import sys

from nanodag.children.forks import ForkServer, Limits
from nanodag.errors import ConfigError
from nanodag.host.threads import MadeOnce, in_thread
from nanodag.own_code.find import required_file
from nanodag.registry import entry
from nanodag.rl.environments import agent_fork
from nanodag.rl.environments.agent_session import MODEL, CallLimits
from nanodag.rl.environments.api_server import MAX_ANSWER
from nanodag.rl.environments.sample import Sample, TurnSampler
from nanodag.rl.environments.sample_context import Visit, take, visited

MAX_FILE_BYTES = 1 << 30


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
    server, places = _server(named, python, at_once, max_bytes)
    if seconds <= 0:
        raise ConfigError(f"agent {named}: seconds {seconds:g} must be above 0.")

    async def run(visit: Visit) -> None:
        task = {
            "record": dict(sample.record),
            "base_url": visit.base_url,
            "api_key": visit.api_key,
            "model": MODEL,
            "seed": sample.seed,
        }
        fork = await in_thread(server.fork)
        try:
            take(visit.session, (await fork.ask(task, seconds)).get("returned"))
        finally:
            fork.close()

    limits = CallLimits(max_calls=max_calls, max_tokens=max_tokens)
    return await visited(sampler, sample, limits, run, place=places)


@MadeOnce
def _server(named: str, python: str, at_once: int, max_bytes: int) -> tuple[ForkServer, asyncio.Semaphore]:
    """The fork server of a function, for all samples, and its places. Raises ConfigError for an interpreter or a module
    that is not there."""
    path = sys.executable if python == "auto" else shutil.which(python)
    if path is None:
        raise ConfigError(f"The agent's python {python!r} is no program. Give the path of an interpreter, or `auto`.")
    if at_once < 1:
        raise ConfigError(f"agent {named}: at_once {at_once} must be above 0.")
    given = {"path": named, "folders": [folder_of(named.partition(":")[0])]}
    limits = Limits(max_bytes=max_bytes, max_file_bytes=MAX_FILE_BYTES, shown_bytes=0)
    server = ForkServer(
        f"{agent_fork.__name__}:make",
        given,
        limits,
        name=f"The agent {named}",
        python=path,
        max_answer_bytes=MAX_ANSWER,
    )
    return server, asyncio.Semaphore(at_once)


def folder_of(module: str) -> str:
    """The folder from which a module is imported here. Raises ConfigError where there is no such module."""
    file = required_file(module, "agent")
    return str(file.parents[module.count(".") + (file.name == "__init__.py")])
