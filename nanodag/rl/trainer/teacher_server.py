"""A server as the teacher of on-policy distillation: it scores what the policy sampled.

It speaks SGLang's protocol: SGLang itself, or the embedded sampler. Asked for are sequences of token ids with
`return_logprob`, `logprob_start_len: 0` and `max_new_tokens: 0`, and read are `input_token_logprobs`, which both give
at temperature 1. Several sequences go in a request; a server that is lost, or fails at a request, is asked again.
Or an OpenAI API that gives a prompt's log-probabilities, as `nanodag serve` does: `http://HOST:8000/v1#MODEL`.
"""

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import torch
from tenacity import retry, retry_if_exception, stop_after_attempt, wait_exponential_jitter
from torch import Tensor

from nanodag.errors import BadRequest, ConfigError, SamplerError
from nanodag.inference.client import SamplerClient
from nanodag.inference.protocol import Completion, Request, SamplingParams
from nanodag.rewards.remote import post_json
from nanodag.rl.trainer.policy import ByRow, DeviceRow, Parts, Rows, check_tokens
from nanodag.tokenizer.encoding import Encoding

ATTEMPTS = 6
SEQUENCES_A_REQUEST = 16
REQUEST_TIMEOUT_S = 600.0
SCORE = SamplingParams(max_new_tokens=0, temperature=0.0)
PROBE = "The quick brown fox: 3.14 + 2 = 5.14\n\tdef naïve(): return 'größer' # 你好, мир 🙂"


class TeacherServer:
    """The server at `url`. policy: the policy's folder, whose tokenizer it must have.

    Raises ConfigError when it does not answer, has another, does not score prompts, or none of `context` tokens: SGLang
    wants a context that is 8 longer.
    """

    def __init__(self, url: str, policy: Path, *, context: int) -> None:
        self._url = url
        self._version = ""
        asyncio.run(self._check(policy, context))

    def logprobs(self, parts: Parts, rows: Rows) -> ByRow:
        """Log-probabilities of the tokens of each row of each part of a step, float32; 0 in a row without trained
        tokens. Raises SamplerError when the server fails ATTEMPTS times, or has other weights than at the beginning."""
        pairs = [
            (part[index].prompt_token_ids, part[index].response_token_ids)
            for part, part_rows in zip(parts, rows, strict=True)
            for row in part_rows
            if row.mask.any()
            for index in row.rollouts.tolist()
        ]
        scored = iter(asyncio.run(self._scored([[*prompt, *response] for prompt, response in pairs])))
        answers = iter([next(scored)[len(prompt) :] for prompt, _ in pairs])

        def of_row(row: DeviceRow) -> Tensor:
            if not row.mask.any():
                return torch.zeros(row.mask.shape, device=row.mask.device)
            values = [value for _ in row.rollouts.tolist() for value in next(answers)]
            return torch.tensor(values, dtype=torch.float32, device=row.mask.device)

        return [[of_row(row) for row in part_rows] for part_rows in rows]

    async def _scored(self, sequences: Sequence[list[int]]) -> list[list[float]]:
        """The logprob of every token of each sequence; that of its first is NaN."""
        logprobs: list[list[float]] = []
        async with SamplerClient(self._url) as client:
            for start in range(0, len(sequences), SEQUENCES_A_REQUEST):
                lot = sequences[start : start + SEQUENCES_A_REQUEST]
                for ids, completion in zip(lot, await _ask(client, lot), strict=True):
                    if self._version not in ("", completion.weight_version):
                        raise SamplerError(
                            f"The teacher at {self._url} has weights {completion.weight_version}, and had "
                            f"{self._version} at the beginning; it must not change while the stage runs."
                        )
                    self._version = completion.weight_version
                    logprobs.append(_values(completion, ids, self._url))
        return logprobs

    async def _check(self, policy: Path, context: int) -> None:
        encoding = Encoding(policy)
        tokens, probe = encoding.token_ids(), encoding.encode(PROBE)
        try:
            async with SamplerClient(self._url) as client:
                info = await client.model_info()
                folder = Path(info.get("tokenizer_path") or info["model_path"])
                is_here = (folder / "tokenizer.json").is_file()
                ids = [] if is_here else await client.prompt_ids(PROBE)
        except SamplerError as error:
            raise ConfigError(f"teacher.url {self._url} cannot be asked: {error}") from error
        if is_here:
            check_tokens(f"teacher.url {self._url} ({folder})", Encoding(folder).token_ids(), tokens)
        elif ids != probe and ids[1:] != probe:  # a token that its tokenizer begins every text with is left aside
            raise ConfigError(
                f"teacher.url {self._url} has another tokenizer than the policy: of a text it makes {len(ids)} tokens "
                f"that begin with {ids[:5]}, the policy {len(probe)} that begin with {probe[:5]}."
            )
        if (most := info.get("context_length", context)) < context:
            raise ConfigError(f"teacher.url {self._url} has a context of {most}, below sampler.context {context}.")
        highest = max(tokens.values())
        if (size := info.get("vocab_size", highest + 1)) <= highest:
            raise ConfigError(f"teacher.url {self._url} has {size} embeddings, too few for the policy's token ids.")
        longest = (probe * context)[:context]
        for ids, what in ((probe[:8], "prompts"), (longest, f"a sequence of {context} tokens (sampler.context)")):
            try:
                await self._scored([ids])
            except SamplerError as error:
                raise ConfigError(f"teacher.url {self._url} does not score {what}: {error}") from error


class ServedTeacher(TeacherServer):
    """A teacher behind an OpenAI API, whose /completions takes token ids and `echo` with `logprobs`. What its tokens
    spell, which it says, must be what the policy's spell."""

    async def _scored(self, sequences: Sequence[list[int]]) -> list[list[float]]:
        told: list[Any] = []
        for start in range(0, len(sequences), SEQUENCES_A_REQUEST):
            told += self._completion(sequences[start : start + SEQUENCES_A_REQUEST])
        pairs = zip(sequences, told, strict=True)
        return [[math.nan, *map(float, scores["token_logprobs"][1 : len(ids)])] for ids, scores in pairs]

    def _completion(self, lot: Sequence[list[int]]) -> list[Any]:
        """Scores of each sequence: names of its tokens and their log-probabilities, one more for what is written."""
        address, _, model = self._url.partition("#")
        body = {"model": model, "prompt": list(lot), "max_tokens": 1, "temperature": 1.0, "echo": True, "logprobs": 1}
        try:
            with httpx.Client(timeout=REQUEST_TIMEOUT_S, trust_env=False) as client:
                choices = post_json(client, f"{address.rstrip('/')}/completions", body)["choices"]
            told = [choice["logprobs"] for choice in sorted(choices, key=lambda choice: choice["index"])]
            for scores, ids in zip(told, lot, strict=True):
                if len(own := scores["token_logprobs"][: len(ids)]) < len(ids) or None in own[1:]:
                    raise ValueError(f"{len(own)} log-probabilities of {len(ids)} tokens")
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            raise SamplerError(f"{self._url} gives no log-probabilities of a prompt: {error!r:.200}") from error
        return told

    async def _check(self, policy: Path, context: int) -> None:
        encoding = Encoding(policy)
        probe = encoding.encode(PROBE)
        try:
            names = self._completion([probe])[0]["tokens"]
            self._completion([(probe * context)[:context]])
        except SamplerError as error:
            raise ConfigError(
                f"teacher.url {self._url} cannot score {context} tokens (sampler.context): {error}"
            ) from error
        for token, name in zip(probe, names[: len(probe)], strict=True):
            if (own := encoding.decode([token])).isascii() and own != name:
                raise ConfigError(
                    f"teacher.url {self._url} has another tokenizer than the policy: token {token} is {name!r} there, "
                    f"and {own!r} here."
                )


@retry(
    retry=retry_if_exception(lambda error: isinstance(error, SamplerError) and not isinstance(error, BadRequest)),
    wait=wait_exponential_jitter(multiplier=0.5, max=20.0),
    stop=stop_after_attempt(ATTEMPTS),
    reraise=True,
)
async def _ask(client: SamplerClient, sequences: Sequence[list[int]]) -> list[Completion]:
    requests = [Request(input_ids=ids, params=SCORE, score_prompt=True) for ids in sequences]
    return [completion for (completion,) in await client.generate(requests)]


def _values(completion: Completion, ids: Sequence[int], url: str) -> list[float]:
    """Raises SamplerError when they are not those of the ids that were sent."""
    first, *rest = completion.prompt_logprobs or [None]
    if list(completion.prompt_ids) != list(ids) or any(value is None for value in rest):
        raise SamplerError(
            f"{url} returned input_token_logprobs of {len(completion.prompt_ids)} tokens, which are not the {len(ids)} "
            "that were sent; it must know logprob_start_len."
        )
    return [float("nan") if first is None else first, *(value for value in rest if value is not None)]
