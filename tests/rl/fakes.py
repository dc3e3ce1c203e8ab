"""One fake of each thing that rollouts are made with: sampler, text, prompts, rewards; and the builders of configs."""

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from nanodag.config.kinds.rl import RLStage
from nanodag.data.config import SourceConfig
from nanodag.data.mixture import Mixture
from nanodag.inference.protocol import Completion, FinishReason, Request, VersionSpan
from nanodag.rewards.reward import Reward
from nanodag.rl.control.generation import RolloutGenerator
from nanodag.rl.rollouts.batch import RolloutBatch
from nanodag.rl.rollouts.prompts import PolicyFormat, PromptCursor

STOP = 0
SPREAD, EQUAL = "01", "11"  # the answers of a group of two


def config(**values: Any) -> RLStage:
    """An RL stage of two prompts x two samples a step."""
    base = {"kind": "rl", "data": ["file:x.jsonl"], "seed": 5, "samples_per_prompt": 2, "prompts_per_step": 2}
    return RLStage.of(**(base | values))


def completion(ids: Sequence[int], finish: str = "stop", *, version: int = 3, **values: Any) -> Completion:
    """What a sampler answers; the nth token has the log-probability -n / 10."""
    ids, reason = list(ids), FinishReason(type=finish, matched=values.pop("matched", None))
    base = {"rid": "r", "output_ids": ids, "logprobs": [-0.1 * (place + 1) for place in range(len(ids))]}
    versions = [VersionSpan(version=str(version), start=0, end=len(ids))]
    base |= {"finish_reason": reason, "weight_version": str(version), "weight_versions": versions}
    return Completion(**{**base, "num_prompt_tokens": 1, **values})


class FakeSampler:
    """says(request): ids of the answer, or of each of several, which are cut off at `max_new_tokens`; or completions.
    It may be a coroutine."""

    def __init__(self, says: Callable[[Request], Any], version: int = 3) -> None:
        self.says, self.version = says, version
        self.requests: list[Request] = []
        self.aborted: list[str] = []

    async def generate(self, requests: Sequence[Request]) -> list[list[Completion]]:
        self.requests += requests
        return [await self._answers(request) for request in requests]

    async def abort(self, rid: str) -> None:
        self.aborted.append(rid)

    async def _answers(self, request: Request) -> list[Completion]:
        said = self.says(request)
        said = await said if asyncio.iscoroutine(said) else said
        several = [said] if isinstance(said, Completion) or isinstance(said[0], int) else said
        return [one if isinstance(one, Completion) else self._cut(request, list(one)) for one in several]

    def _cut(self, request: Request, ids: list[int]) -> Completion:
        finish, matched, most = "length", None, request.params.max_new_tokens
        text = bytes(token for token in ids if token < 256)
        if len(ids) <= most:
            ends = [ids[-1]] if ids[-1] in request.params.stop_token_ids else []
            ends += [stop for stop in request.params.stop or () if text.endswith(stop.encode())]
            finish, matched = ("stop", ends[-1]) if ends else (finish, None)
        return completion(ids[:most], finish, version=self.version, rid=request.rid, matched=matched)


def answers(of: Mapping[int, str], delays: Mapping[int, int] | None = None) -> FakeSampler:
    """A sampler that answers prompt n with the letters of `of[n]`, after `delays[n]` turns of the loop."""

    async def says(request: Request) -> list[list[int]]:
        number = request.input_ids[0] - 1
        for _ in range((delays or {}).get(number, 0)):
            await asyncio.sleep(0)
        return [[ord(letter), STOP] for letter in of[number][: request.params.n]]

    return FakeSampler(says)


class FakeEncoding:
    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


class FakeRenderer:
    """A prompt's ids are its number, repeated as often as its text says."""

    stop_ids = (STOP,)

    def prompt(
        self, messages: Sequence[Mapping[str, str]], switches: object = None, *, tools: object = ()
    ) -> list[int]:
        number, length = messages[0]["content"].split("x")
        return [int(number) + 1] * int(length)


class FakePool:
    """score(answer): its reward, by default the number that it spells; what raises ValueError has failed.
    takes_reported: a reward that was reported comes before it. seen: the answers."""

    def __init__(self, score: Callable[[str], float] = float, *, takes_reported: bool = False) -> None:
        self.score, self.takes_reported = score, takes_reported
        self.seen: list[str] = []

    def submit_group(
        self, prompt: object, completions: Sequence[str], *, reported: Sequence[Any] = ()
    ) -> "list[Future[Reward | str]]":
        given = reported if self.takes_reported else ()
        return [self._scored(*pair) for pair in itertools.zip_longest(completions, given)]

    def _scored(self, answer: str, reported: Any) -> "Future[Reward | str]":
        self.seen.append(answer)
        future: Future[Reward | str] = Future()
        try:
            reward: Reward | str = Reward(self.score(answer))
        except ValueError:
            reward = "no number"
        future.set_result(Reward(reported["value"], reported["components"]) if reported else reward)
        return future


class SeenPool(FakePool):
    """Rewards by how many answers came before, so that groups have a spread."""

    def __init__(self, *, takes_reported: bool = False) -> None:
        super().__init__(lambda answer: float(len(self.seen) % 2), takes_reported=takes_reported)


def mended(answer: str) -> float:
    """The reward after its repair: what failed is worth 0.5."""
    return 0.5 if answer == "?" else float(answer)


def cursor_over(tmp_path, lengths: list[int], longest: int = 10, **more: Any) -> PromptCursor:
    """Prompts p0, p1, ... of a file, of so many tokens."""
    path = tmp_path / "prompts.jsonl"
    rows = [f'{{"prompt": "{n}x{length}", "answer": "", "prompt_id": "p{n}"}}\n' for n, length in enumerate(lengths)]
    path.write_text("".join(rows))
    mixture = Mixture([SourceConfig(url=f"file:{path}")], kind="prompt", seed=0, repeat=True, shuffle=False)
    return PromptCursor(mixture, PolicyFormat(FakeRenderer(), {}, ()), longest=longest, **more)


def ids(prompts) -> list[str]:
    return [prompt.prompt_id for prompt in prompts]


def kept(batch) -> list[str]:
    return ids(prompt for prompt, _ in batch.kept)


def dropped(batch) -> list[tuple[str, str]]:
    return [(drop.prompt.prompt_id, drop.reason) for drop in batch.dropped]


def generator(fake: FakeSampler, pool: FakePool | None = None, **values: Any) -> RolloutGenerator:
    """Groups of one turn by this sampler and these rewards. values: of the config."""
    return RolloutGenerator(config(**values), fake, pool or FakePool(), FakeEncoding(), (STOP,))


def step(fake: FakeSampler, cursor: PromptCursor, number: int = 1, **values: Any) -> RolloutBatch:
    return asyncio.run(generator(fake, **values).step(cursor, number))
