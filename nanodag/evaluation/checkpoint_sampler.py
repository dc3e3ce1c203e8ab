"""Greedy texts by the embedded sampler, inside this process."""

from collections.abc import Callable, Sequence
from pathlib import Path

from nanodag.inference.protocol import Completion, Request, SamplingParams
from nanodag.sampler.engine import Engine

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


class CheckpointSampler:
    """A sampler for one checkpoint. context: prompt and answer together, in tokens."""

    def __init__(self, folder: Path, *, precision: str, device: str, max_batch: int) -> None:
        self._engine = Engine(folder, dtype=DTYPES[precision], device=device, max_batch=max_batch)
        self.context: int = self._engine.context_length

    def greedy(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        stop_ids: Sequence[int],
        stops: Sequence[Sequence[str]],
        on_done: Callable[[int], None] = lambda done: None,
    ) -> list[list[int]]:
        """The new token ids of each prompt, up to a stop token, which is left out, a stop string of the prompt's own,
        which is not, or max_new_tokens.

        on_done gets the number of prompts that are done, now and then. Raises BadRequest for a prompt without room.
        """
        self._engine.forget_prompts()  # what an earlier call left in the cache must not change how this one rounds
        written: list[list[int]] = [[] for _ in prompts]
        num_done = 0

        def keep(number: int) -> Callable[[int, Completion], None]:
            def store(index: int, completion: Completion) -> None:
                nonlocal num_done
                ids = completion.output_ids
                written[number] = ids[:-1] if ids and ids[-1] in stop_ids else ids
                num_done += 1

            return store

        for number, (prompt, stop) in enumerate(zip(prompts, stops, strict=True)):
            params = SamplingParams(
                max_new_tokens=max_new_tokens, temperature=0.0, stop_token_ids=tuple(stop_ids), stop=tuple(stop) or None
            )
            self._engine.submit(Request(input_ids=prompt, params=params, return_logprob=False), keep(number))
        reported = 0
        while self._engine.has_work:
            self._engine.step()
            if num_done > reported:
                reported = num_done
                on_done(reported)
        return written
