"""A policy with a Python interpreter."""

import threading

from nanodag.host.processor import usable_cores
from nanodag.host.threads import in_thread
from nanodag.registry import entry
from nanodag.rewards.sandbox import run_python
from nanodag.rl.environments.sample import Sample, TurnSampler
from nanodag.rl.environments.tools import with_tool

# Programs that share a core would run into their time limits.
_RUNNING = threading.BoundedSemaphore(usable_cores())


@entry("generate", "python", needs_sandbox=True)
async def interpreter(
    sampler: TurnSampler, sample: Sample, *, max_calls: int = 4, seconds: float = 5.0, max_result_tokens: int = 256
) -> Sample:
    """A call is a program of its own, run in the sandbox (`nanodag.rewards.sandbox`) for at most `seconds`; its result
    is what it printed, or the last line of its error. Nothing is kept from one call to the next.

    A program that looks at the clock or draws random numbers makes a run that is not the same the second time.
    """

    async def run(program: str) -> str:
        return await in_thread(lambda: printed(program, seconds=seconds, longest=max_result_tokens))

    return await with_tool(sampler, sample, "python", run, max_calls=max_calls, max_result_tokens=max_result_tokens)


def printed(program: str, *, seconds: float, longest: int) -> str:
    """Output of a program in the sandbox, or the last line of its error behind at most `longest` characters of that.
    Blocks until a core is free and the program has ended."""
    with _RUNNING:
        done = run_python(program, timeout_s=seconds)
    if done.timed_out:
        return "error: it took too long"
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return f"{done.stdout[:longest]}error: {lines[-1] if lines else 'it was ended'}"
    return done.stdout.rstrip("\n")
