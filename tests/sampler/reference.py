"""Short requests, and the logprobs of their samples by transformers."""

import asyncio

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from nanodag.inference.client import SamplerClient
from nanodag.inference.engine_settings import EngineSettings
from nanodag.inference.protocol import Request, SamplingParams
from nanodag.sampler.engine import Engine


def make_engine(folder, **settings):
    """An engine with these settings, unchecked: the device may be one of the tests' own."""
    return Engine(EngineSettings.model_construct(model=folder, **settings))


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
