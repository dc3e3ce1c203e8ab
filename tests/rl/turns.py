"""Steps of samples that take several turns: their config, prompts and generator."""

import asyncio
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from nanodag.config.kinds.rl import RLStage
from nanodag.rl.control.generation import RolloutGenerator
from nanodag.rl.environments.runner import Turns
from nanodag.rl.rollouts.batch import RolloutBatch
from nanodag.rl.rollouts.prompts import Prompt
from nanodag.rl.rollouts.rollout import Rollout
from nanodag.tokenizer.chat import load_renderer
from nanodag.tokenizer.encoding import Encoding
from tests.rl import fakes
from tests.rl.stages import VOCABULARY

CONTEXT = 64


def ids_of(encoding: Encoding, text: str) -> list[int]:
    """Special tokens by name, the rest a token a character: `ids_of(encoding, "<|tool_call|>4*2<|tool_call_end|>")`."""
    special = {encoding.decode([token]): token for token in encoding.special_ids}
    parts = [part for part in re.split(r"(<\|\w+\|>)", text) if part]
    pieces = [piece for part in parts for piece in ([part] if part in special else part)]
    return [token for piece in pieces for token in ([special[piece]] if piece in special else encoding.encode(piece))]


def speaking(encoding: Encoding, says: Callable[[str], str]) -> fakes.FakeSampler:
    """A sampler that says what `says(text of the prompt)` gives."""
    return fakes.FakeSampler(lambda request: ids_of(encoding, says(encoding.decode(request.input_ids))))


def config(**values: Any) -> RLStage:
    sizes = {"prompts_per_step": 1, "max_new_tokens": 16, "sampler": {"context": CONTEXT, "max_batch": 64}}
    return fakes.config(**(sizes | values))


def generator_of(folder, fake, pool=None, *, stage: RLStage | None = None, **values: Any) -> RolloutGenerator:
    """folder: of the tokenizer. pool: of rewards, `SeenPool` by default. values: of the config, where there is none."""
    stage, encoding, renderer = stage or config(**values), Encoding(folder), load_renderer(folder)
    size = max(VOCABULARY, encoding.size)
    turns = Turns(stage, encoding, renderer, context=int(stage.sampler.context), vocabulary=size)
    return RolloutGenerator(stage, fake, pool or fakes.SeenPool(), encoding, renderer.stop_ids, turns)


def prompts(folder, count: int = 1, text: str = "{}?", **record: Any) -> list[Prompt]:
    """Prompts p0, p1, ... that ask their number. record: further fields of each."""
    renderer = load_renderer(folder)
    found = []
    for number in range(count):
        messages = [{"role": "user", "content": text.format(number)}]
        fields = {"prompt_id": f"p{number}", "reward": "exact", "answer": "", "messages": messages, **record}
        found.append(Prompt(epoch=0, record=fields, token_ids=tuple(renderer.prompt(messages))))
    return found


def batch_of(generator: RolloutGenerator, prompts: Sequence[Prompt]) -> RolloutBatch:
    waiting = deque(prompts)
    cursor = SimpleNamespace(
        take=lambda count: [waiting.popleft() for _ in range(min(count, len(waiting)))],
        give_back=lambda given: waiting.extendleft(reversed(given)),
        passed_over=list,
        note=lambda prompt_id, *, has_spread: None,
    )
    return asyncio.run(generator.step(cursor, 1))


def rollouts_of(folder, fake, records: Iterable[Mapping[str, Any]], **values: Any) -> list[Rollout]:
    """The rollouts of a prompt for each of these records, all at once; their rewards are those that were reported."""
    pool = fakes.FakePool(takes_reported=True)
    generator = generator_of(folder, fake, pool, filters=[], reward="reported", **values)
    (base,) = prompts(folder, text="hi")
    fields = [{**base.record, "prompt_id": f"p{number}", **record} for number, record in enumerate(records)]

    async def all_of_them() -> list[RolloutBatch]:
        return await asyncio.gather(*(generator.group(replace(base, record=record)) for record in fields))

    return [rollout for batch in asyncio.run(all_of_them()) for rollout in batch.all_rollouts]
