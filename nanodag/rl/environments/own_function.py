"""A user's own function that generates, in forks of a process that has imported it once.

The controller sends the sample; the fork asks for answers of the sampler, `{"ask": number, "request"}`, some at a time,
hears `{"answer": number, "completion"}` or `{"answer": number, "error", "is_refusal"}`, and ends with `{"samples"}`, or
`{"unusable"}` where no sample can be played.
"""

import asyncio
import itertools
import json
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from nanodag import registry
from nanodag.children.fork_server import Line
from nanodag.children.forks import Fork, ForkLimits, shared_server
from nanodag.errors import BadRequest, ConfigError, MissingTool, SamplerError
from nanodag.host.threads import cancelled, in_thread
from nanodag.inference.protocol import Completion, Request, SamplingParams
from nanodag.rewards import sandbox
from nanodag.rl.environments.sample import Sample, TurnSampler
from nanodag.tokenizer.chat import ChatRenderer, load_renderer
from nanodag.tokenizer.encoding import Encoding

MAX_ANSWER_BYTES = 1 << 28
_SAMPLE, _REQUEST, _COMPLETION = TypeAdapter(Sample), TypeAdapter(Request), TypeAdapter(Completion)


class ForkedFunction:
    """A function `module:function` as an entry of ours is called. folder: of the tokenizer."""

    def __init__(self, name: str, options: Mapping[str, Any], folder: Path) -> None:
        given = json.dumps({"name": name, "options": dict(options), "folder": str(folder)}, sort_keys=True)
        self._server = shared_server(
            f"{__name__}:make", given, ForkLimits(), name=f"generate {name}", max_answer_bytes=MAX_ANSWER_BYTES
        )

    async def __call__(self, sampler: TurnSampler, sample: Sample) -> list[Sample]:
        """The samples that the function returns. Raises EpisodeFailed with the reason why it returns none."""
        with sampler.held():
            fork = await in_thread(self._server.fork)
        tasks: set[asyncio.Task[None]] = set()
        try:
            params, switches = sampler.params.model_dump(mode="json"), dict(sampler.switches)
            first = {"sample": _plain(_SAMPLE, sample), "params": params, "switches": switches}
            await fork.send({**first, "attempt": sampler.attempt})
            while "ask" in (message := await fork.hear()):
                tasks.add(asyncio.ensure_future(_answered(fork, sampler, message)))
            if "unusable" in message:
                raise ConfigError(message["unusable"])
            return [_SAMPLE.validate_python(plain_sample) for plain_sample in message["samples"]]
        finally:
            await cancelled(*tasks)
            fork.close()


async def _answered(fork: Fork, sampler: TurnSampler, message: Mapping[str, Any]) -> None:
    try:
        completion = await sampler.ask(_REQUEST.validate_python(message["request"]))
        answer = {"completion": _plain(_COMPLETION, completion)}
    except (SamplerError, ValueError) as error:
        answer = {"error": str(error), "is_refusal": isinstance(error, BadRequest)}
    await fork.send({"answer": message["ask"], **answer})


def make(name: str, options: Mapping[str, Any], folder: str) -> tuple[None, Callable[[Line], None]]:
    """Import a function, and serve a sample by what it returns."""
    function = registry.load("generate", name, options)
    with suppress(MissingTool):  # a function that runs no programs needs no walls
        sandbox.walls()  # looked for once, and not in each fork
    return None, partial(_serve, function, Encoding(Path(folder)), load_renderer(Path(folder)))


def _serve(function: Callable[..., Any], encoding: Encoding, renderer: ChatRenderer, line: Line) -> None:
    messages = iter(line)
    first = next(messages)

    async def samples() -> dict[str, Any]:
        sampler = TurnSampler(
            _Asking(line, messages).ask,
            params=SamplingParams.model_validate(first["params"]),
            encoding=encoding,
            renderer=renderer,
            switches=first["switches"],
            attempt=first["attempt"],
        )
        sample = _SAMPLE.validate_python(first["sample"])
        random.seed(sample.seed)  # the same numbers when it is played again
        try:
            returned = await function(sampler, sample)
        except (ConfigError, MissingTool) as error:  # it is no failure of this sample
            return {"unusable": str(error)}
        return {"samples": [_plain(_SAMPLE, sample) for sample in samples_in(returned)]}

    line.send(lambda: asyncio.run(samples()))


class _Asking:
    """The fork's way to the sampler. messages: its answers, heard in a thread, as the function may block."""

    def __init__(self, line: Line, messages: Iterator[Any]) -> None:
        self._line, self._loop = line, asyncio.get_running_loop()
        self._numbers, self._waiting = itertools.count(), dict[int, asyncio.Future[Any]]()
        threading.Thread(target=self._hear, args=(messages,), daemon=True).start()

    async def ask(self, request: Request) -> Completion:
        """The sampler's answer. Raises BadRequest, SamplerError."""
        number = next(self._numbers)
        future = self._waiting[number] = self._loop.create_future()
        self._line.send(lambda: {"ask": number, "request": _plain(_REQUEST, request)})
        answer = await future
        if "error" in answer:
            raise (BadRequest if answer["is_refusal"] else SamplerError)(answer["error"])
        return _COMPLETION.validate_python(answer["completion"])

    def _hear(self, messages: Iterator[Any]) -> None:
        for message in messages:
            self._loop.call_soon_threadsafe(self._settle, message)

    def _settle(self, message: Mapping[str, Any]) -> None:
        future = self._waiting.pop(message["answer"])
        if not future.done():  # the function may have given it up
            future.set_result(message)


def samples_in(returned: Any) -> Sequence[Sample]:
    """The samples that a function returned. Raises ValueError where that is no Sample and no list of some."""
    samples = [returned] if isinstance(returned, Sample) else returned
    are_samples = isinstance(samples, list | tuple) and all(isinstance(sample, Sample) for sample in samples)
    if not are_samples or not samples:
        raise ValueError(f"it must return a Sample, or some in a list; found {returned!r:.200}")
    return samples


def _plain(adapter: TypeAdapter[Any], value: Any) -> Any:
    return adapter.dump_python(value, mode="json", warnings=False)
