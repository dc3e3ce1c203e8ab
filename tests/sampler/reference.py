"""Short requests, and the logprobs of their samples by transformers."""

import asyncio
import itertools
from collections.abc import Sequence

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from nanodag.errors import SamplerError
from nanodag.inference.client import SamplerClient
from nanodag.inference.engine_settings import EngineSettings
from nanodag.inference.protocol import Completion, Request, SamplingParams
from nanodag.sampler.engine import Engine


class WholeEngine(Engine):
    """An engine that runs requests to their end."""

    def generate(self, requests: Sequence[Request]) -> list[list[Completion]]:
        """Run requests to their end: for each, its n completions.

        Raises BadRequest for the first request that cannot be served, before any runs, and SamplerError on NaN.
        """
        for request in requests:
            self.validate(request)
        done: list[list[Completion | None]] = [[None] * request.params.n for request in requests]

        for request, of_request in zip(requests, done, strict=True):
            self.submit(request, of_request.__setitem__)
        while self.has_work:
            self.step()
        results = [[sample for sample in of_request if sample is not None] for of_request in done]
        for sample in itertools.chain.from_iterable(results):
            if sample.finish_reason is not None and sample.finish_reason.type == "abort":
                raise SamplerError(str(sample.finish_reason.message))
        return results


def make_engine(folder, **settings):
    """An engine with these settings, unchecked: the device may be one of the tests' own."""
    return WholeEngine(EngineSettings.model_construct(model=folder, **settings))


def request(prompt=(1, 2, 3), rid=None, **params):
    params = {"max_new_tokens": 12, "ignore_eos": True, **params}
    return Request(input_ids=list(prompt), params=SamplingParams(**params), rid=rid)


def reference_logprobs(folder, prompt, output_ids, temperature=1.0) -> np.ndarray:
    """log_softmax(logits / temperature) of each output token, teacher-forced through transformers in float64."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *output_ids]])).logits[0, len(prompt) - 1 : -1]
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    return logprobs.gather(1, torch.tensor(output_ids)[:, None])[:, 0].numpy()


def with_client(server, work, **options):
    """The result of `work(client)`, by a client of the server."""

    async def main():
        async with SamplerClient(server.url, **options) as client:
            return await work(client)

    return asyncio.run(main())


def token_versions(completion):
    """The version of the weights behind each output token."""
    return [span.version for span in completion.weight_versions for _ in range(span.start, span.end)]
