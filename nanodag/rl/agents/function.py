"""Agents that are a Python function: `agent:package.module:function`.

    def agent(task):
        client = openai.OpenAI(base_url=task.base_url, api_key=task.api_key)
        ...
        return 1.0

It may be `async def`. task: `record`, the prompt's (nanodag.data.canonical); `base_url`, `api_key` and `model`, which
are in OPENAI_BASE_URL and OPENAI_API_KEY, too; `seed`. It returns its reward, or a reward and its components, for the
reward `reported`; or its answer, a text, for a reward that judges it; or None.
"""

from nanodag.host.threads import MadeOnce
from nanodag.own_code.find import required_file
from nanodag.registry import entry
from nanodag.rl.agents.session import MODEL, CallLimits
from nanodag.rl.agents.visit import Visit, take, visited
from nanodag.rl.agents.workers import Workers, interpreter
from nanodag.rl.rollouts.turns.sample import Sample, TurnSampler


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
    nanodag.rl.agents.session has them; max_bytes: address space of a process.
    """
    workers = _workers(named, python, seconds, max_bytes, at_once)

    async def run(visit: Visit) -> None:
        task = {
            "record": dict(sample.record),
            "base_url": visit.base_url,
            "api_key": visit.api_key,
            "model": MODEL,
            "seed": sample.seed,
        }
        take(visit.session, await workers.run(task))

    limits = CallLimits(max_calls=max_calls, max_tokens=max_tokens)
    return await visited(sampler, sample, limits, run, place=lambda: workers.places)


@MadeOnce
def _workers(named: str, python: str, seconds: float, max_bytes: int, at_once: int) -> Workers:
    """Those of a function: one pool for all samples."""
    return Workers(
        named,
        python=interpreter(python),
        folders=[folder_of(named.partition(":")[0])],
        at_once=at_once,
        max_bytes=max_bytes,
        timeout_s=seconds,
    )


def folder_of(module: str) -> str:
    """The folder from which a module is imported here. Raises ConfigError where there is no such module."""
    file = required_file(module, "agent")
    return str(file.parents[module.count(".") + (file.name == "__init__.py")])
