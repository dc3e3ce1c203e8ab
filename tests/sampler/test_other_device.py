"""The embedded sampler on a device that is not the CPU: nothing of the CPU is mixed in, the same tokens come out."""

from itertools import takewhile
from operator import eq

import pytest
import torch

from nanodag.inference.protocol import Request, SamplingParams
from tests.sampler.other_device import NAME, OtherDevice
from tests.sampler.reference import make_engine

DRAWN = (
    {},
    {"temperature": 0.7},
    {"temperature": 0.0},
    {"temperature": 2.0, "top_k": 5},
    {"top_p": 0.5},
    {"temperature": 0.5, "top_p": 0.9, "top_k": 7},
)


def requests(kinds):
    return [
        Request(
            input_ids=[1, 2, 3],
            params=SamplingParams(max_new_tokens=6, n=3, sampling_seed=1, ignore_eos=True, **kind),
            score_prompt=True,
        )
        for kind in kinds
    ]


@pytest.mark.parametrize("each_alone", [False, True])
@pytest.mark.parametrize(("kind", "dtype"), [("llama", "float32"), ("qwen2", "bfloat16"), ("qwen3", "float32")])
def test_what_is_sampled_on_another_device_is_what_is_sampled_on_a_cpu(make_checkpoint, kind, dtype, each_alone):
    lots = [requests([one]) for one in DRAWN] if each_alone else [requests(DRAWN)]
    folder = make_checkpoint(kind, tie_word_embeddings=kind == "llama")
    new = make_checkpoint(kind, seed=1, tie_word_embeddings=kind == "llama")

    def sampled(device):
        engine = make_engine(folder, device=device, max_batch=32, dtype=dtype)
        found = [group for lot in lots for group in engine.generate(lot)]
        weights = engine.load(new)
        engine.update_weights(weights, new, "1")
        assert engine.model.weights.sums() == weights.sums() and not engine.model.weights.differing(weights)
        return engine, found + [group for lot in lots for group in engine.generate(lot)]

    _, here = sampled("cpu")
    with OtherDevice():
        engine, there = sampled(NAME)
        assert engine.model.kernel is None and engine.model.weights.head.device.type == NAME
        assert {cache.dtype for cache in engine.model.buffers.keys} == {getattr(torch, dtype)}
    assert len(here) == len(there) == 2 * len(DRAWN)
    tolerance = 1e-4 if dtype == "float32" else 0.1  # there the cache and attention are bfloat16, too
    num_same = 0
    for one, other in zip(here, there, strict=True):
        for left, right in zip(one, other, strict=True):
            same = sum(takewhile(bool, map(eq, left.output_ids, right.output_ids)))  # tokens before they part
            num_same += same
            assert left.logprobs[:same] == pytest.approx(right.logprobs[:same], abs=tolerance)
            assert left.prompt_logprobs[1:] == pytest.approx(right.prompt_logprobs[1:], abs=tolerance)
    assert num_same >= (1.0 if dtype == "float32" else 0.8) * 2 * len(DRAWN) * 3 * 6


def test_the_device_of_these_tests_refuses_what_cuda_refuses():
    with OtherDevice():
        there = torch.ones(3, device=NAME)
        assert (there + 1.0).device.type == NAME and (there.cpu() + torch.ones(3)).tolist() == [2.0] * 3
        with pytest.raises(RuntimeError, match="same device"):
            there.div_(torch.ones(3))
        with pytest.raises(RuntimeError, match="same device"):
            torch.where(torch.tensor([True, False, True]), there, 0.0)
