"""What a trainer relies on, asked of all engines over HTTP: the embedded sampler, SGLang, vLLM in their environments.

SGLang's half is slow, and needs what `nanodag sampler install --cpu` makes, or NANODAG_SGLANG_PYTHON.
"""

import asyncio
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from nanodag.engines.start import start_engine
from nanodag.errors import BadRequest
from nanodag.inference.client import SamplerClient
from nanodag.inference.engine_settings import EngineSettings
from nanodag.inference.protocol import Request, SamplingParams, completion_from_wire
from nanodag.sampler.fingerprints import Fingerprints
from nanodag.sampler.shared_tensors import share
from tests.guest_pythons import sglang_python, vllm_python
from tests.sampler.group import Trainer, begin_broadcast
from tests.sampler.reference import reference_logprobs, request, token_versions, with_client

CONTEXT = 1024
LONG = 1000  # tokens: under way long enough that something can be done meanwhile
VOCABULARY = 150


@dataclass
class Sampler:
    """A server under test, and the two checkpoints that it may have; it begins with the first, as version 0."""

    engine: str
    url: str
    first: Path
    second: Path

    def ask(self, work):
        """The result of `work(client)`."""
        return with_client(self, work, vocab_size=VOCABULARY, context_length=CONTEXT)

    def post(self, path, body):
        return httpx.post(self.url + path, json=body, timeout=120, trust_env=False)


def start(engine: str, folder: Path, log_path: Path):
    if engine != "embedded":
        {"sglang": sglang_python, "vllm": vllm_python}[engine]()
    settings = EngineSettings(
        engine=engine, model=folder, weight_version=0, dtype="float32", max_batch=8, context_length=CONTEXT,
        memory_fraction=0.3, start_timeout_s=1500,
    )  # fmt: skip
    with patch.dict(os.environ, PYTHONSAFEPATH="1"):  # as it is below Prefect
        return start_engine(settings, log_path=log_path)


@pytest.fixture(
    scope="module", params=["embedded", *(pytest.param(guest, marks=pytest.mark.slow) for guest in ("sglang", "vllm"))]
)
def sampler(request, make_checkpoint, tmp_path_factory) -> Iterator[Sampler]:
    sizes = {"max_position_embeddings": CONTEXT, "head_dim": 32}  # the least of vLLM on a CPU
    first, second = (make_checkpoint("qwen3", seed=seed, **sizes) for seed in (0, 1))
    with start(request.param, first, tmp_path_factory.mktemp("log") / "log") as server:
        yield Sampler(request.param, server.url, first, second)


def close(completion, folder, prompt, temperature=1.0):
    wanted = reference_logprobs(folder, prompt, completion.output_ids, temperature)
    return np.allclose(completion.logprobs, wanted, atol=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_sample_is_ids_with_the_logprobs_of_transformers(sampler, temperature):
    ((found,),) = sampler.ask(lambda client: client.generate([request(temperature=temperature)]))
    assert len(found.output_ids) == len(found.logprobs) == 12
    assert (found.finish_reason.type, found.num_prompt_tokens) == ("length", 3)
    assert token_versions(found) == ["0"] * 12
    assert close(found, sampler.first, (1, 2, 3), temperature)


def test_the_likeliest_tokens_of_each_place_are_those_of_transformers(sampler):
    prompt = (1, 2, 3)
    params = SamplingParams(max_new_tokens=4, temperature=0.6, ignore_eos=True)
    asked = Request(input_ids=list(prompt), params=params, score_prompt=True, top_logprobs=3)
    ((found,),) = sampler.ask(lambda client: client.generate([asked]))
    ids = torch.tensor([[*prompt, *found.output_ids]])
    logits = AutoModelForCausalLM.from_pretrained(sampler.first)(ids).logits[0].detach()
    assert found.prompt_top_logprobs[0] is None and len(found.top_logprobs) == 4
    told = [*found.prompt_top_logprobs[1:], *found.top_logprobs]
    for place, top in enumerate(told):
        temperature = 1.0 if place < len(prompt) - 1 else 0.6
        values, tokens = (logits[place] / temperature).log_softmax(-1).topk(3)
        assert [token for token, _ in top] == tokens.tolist()
        assert torch.allclose(torch.tensor([logprob for _, logprob in top]), values, atol=1e-4)


def test_a_prompt_is_scored_at_temperature_1_and_nothing_need_be_sampled(sampler):
    prompts = [(1, 2, 3, 4), (9, 8, 7)]
    params = SamplingParams(max_new_tokens=0, temperature=0.0)
    wanted = [Request(input_ids=list(prompt), params=params, score_prompt=True) for prompt in prompts]
    for (one,), prompt in zip(sampler.ask(lambda client: client.generate(wanted)), prompts, strict=True):
        assert list(one.prompt_ids) == list(prompt) and one.output_ids == [] and one.prompt_logprobs[0] is None
        expected = reference_logprobs(sampler.first, prompt[:1], prompt[1:])
        assert one.prompt_logprobs[1:] == pytest.approx(expected, abs=1e-4)


def test_samples_come_grouped_by_prompt(sampler):
    wanted = [request((1, 2), n=3, max_new_tokens=4), request((9, 8, 7, 6), n=3, max_new_tokens=6)]
    found = sampler.ask(lambda client: client.generate(wanted))
    assert [[len(one.output_ids) for one in group] for group in found] == [[4] * 3, [6] * 3]
    assert [[one.num_prompt_tokens for one in group] for group in found] == [[2] * 3, [4] * 3]
    for group, prompt in zip(found, ((1, 2), (9, 8, 7, 6)), strict=True):
        assert all(close(one, sampler.first, prompt) for one in group)


def test_the_stop_token_is_part_of_the_sample(sampler):
    async def work(client):
        ((free,),) = await client.generate([request(temperature=0.0, max_new_tokens=20)])
        stop = free.output_ids[4]
        params = {"temperature": 0.0, "max_new_tokens": 20, "ignore_eos": False, "stop_token_ids": (stop,)}
        return free, stop, await client.generate([request(**params)])

    free, stop, ((found,),) = sampler.ask(work)
    length = free.output_ids.index(stop) + 1
    assert found.output_ids == free.output_ids[:length]
    assert (found.finish_reason.type, found.finish_reason.matched) == ("stop", stop)
    assert len(found.logprobs) == length


def test_bad_requests_are_refused_and_it_goes_on_serving(sampler):
    good = {"input_ids": [[1, 2]], "sampling_params": {"max_new_tokens": 2}}
    for bad in (
        {"sampling_params": {"no_such_thing": 1}},
        {"input_ids": []},  # not [[]]: an empty prompt in a list ends SGLang's server
        {"input_ids": [[1] * (CONTEXT + 50)]},
        {"sampling_params": {"temperature": -1.0}},
    ):
        assert sampler.post("/generate", {**good, **bad}).status_code == 400, bad
    assert sampler.post("/generate", good).status_code == 200


async def share_weights(client, folder, version):
    tensors = {name: t.detach() for name, t in AutoModelForCausalLM.from_pretrained(folder).named_parameters()}
    names = list(tensors)
    await client.begin_weight_update()
    for part in (names[:1], names[1:]):
        flat = torch.cat([tensors[name].reshape(-1).view(torch.uint8) for name in part])
        kept, handles = share(flat, {name: tuple(tensors[name].shape) for name in part}, torch.float32, 1)
        await client.take_weights(handles, version=version if names[-1] in part else None)
        kept.fill_(1)  # a copy was taken
    await client.end_weight_update()


@pytest.mark.parametrize("way", ["disk", "broadcast", "shared memory"])
def test_new_weights_are_held_to_the_bit_and_sampled_with_and_change_the_version(sampler, way):
    trainer = Trainer("one")
    ways = {"disk": SamplerClient.update_weights_from_disk, "broadcast": trainer.give, "shared memory": share_weights}

    async def work(client):
        await ways[way](client, sampler.second, 5)
        info, ((found,),) = await client.model_info(), await client.generate([request()])
        (held,) = [None] if sampler.engine == "vllm" else await client.fingerprints()  # its layout is the processor's
        await ways[way](client, sampler.first, 0)  # a group goes on
        if way == "broadcast":
            await client.leave_weight_group("one")
        (back,) = [None] if sampler.engine == "vllm" else await client.fingerprints()
        return info, found, held, back

    info, found, held, back = sampler.ask(work)
    assert info["weight_version"] == "5" and token_versions(found) == ["5"] * 12
    assert close(found, sampler.second, (1, 2, 3)) and not close(found, sampler.first, (1, 2, 3))
    if sampler.engine == "vllm":
        return
    assert held == fingerprints_of(sampler.engine, sampler.second)
    assert back == fingerprints_of(sampler.engine, sampler.first)


def fingerprints_of(engine, folder):
    found = Fingerprints("checkpoint") if engine == "embedded" else Fingerprints("sglang", torch.float32)
    for name, parameter in AutoModelForCausalLM.from_pretrained(folder).named_parameters():
        found.add(name, parameter)
    return found.all()


def test_weights_that_cannot_be_read_leave_the_old_ones(sampler):
    async def work(client):
        ((before,),) = await client.generate([request(temperature=0.0)])
        with pytest.raises(BadRequest):
            await client.update_weights_from_disk("/no/such/folder", 9)
        ((after,),) = await client.generate([request(temperature=0.0)])
        return before, after

    before, after = sampler.ask(work)
    assert after.output_ids == before.output_ids and token_versions(after) == ["0"] * 12


@pytest.mark.parametrize("mode", ["retract", "in_place"])
@pytest.mark.parametrize("way", ["disk", "broadcast"])
def test_what_is_paused_continues_with_the_new_weights_and_says_from_which_token(sampler, way, mode):
    async def broadcast(client, trainer):
        for bucket in await begin_broadcast(client, trainer, sampler.second):
            # a cache that something uses cannot be flushed
            body = {"names": bucket.names, "dtypes": bucket.dtypes, "shapes": bucket.shapes, "weight_version": "7"}
            body |= {"group_name": trainer.name, "load_format": "flattened_bucket", "flush_cache": mode == "retract"}
            await client._call("POST", "/update_weights_from_distributed", body)
        await client.end_weight_update()
        await client.leave_weight_group(trainer.name)

    async def work(client):
        others = asyncio.create_task(client.generate([request((7, 7), n=7, max_new_tokens=LONG)]))
        chunks = client.stream(request(max_new_tokens=LONG))
        await anext(chunks)
        await client.pause(mode)
        late = asyncio.create_task(client.generate([request((4, 5))]))
        await asyncio.sleep(0.2)
        assert not late.done()
        if way == "broadcast":
            await broadcast(client, Trainer(f"paused-{mode}"))
        else:
            await client.update_weights_from_disk(sampler.second, 7, flush_cache=mode == "retract")
        await client.resume()
        last = [chunk async for chunk in chunks][-1]
        ((second,),) = await late
        await others
        await client.update_weights_from_disk(sampler.first, 0)
        return last, second

    last, second = sampler.ask(work)
    old, new = last.weight_versions
    assert (old.version, old.start, new.version, new.end) == ("0", 0, "7", LONG)
    assert old.end == new.start
    assert token_versions(second) == ["7"] * 12
    by_old, by_new = (reference_logprobs(one, (1, 2, 3), last.output_ids) for one in (sampler.first, sampler.second))
    np.testing.assert_allclose(last.logprobs[: old.end], by_old[: old.end], atol=1e-4)
    if mode == "retract":  # recomputed, so it is as if the new weights had had all of it
        np.testing.assert_allclose(last.logprobs[new.start :], by_new[new.start :], atol=1e-4)


def test_updates_outside_a_session_or_of_no_group_are_refused_and_it_goes_on_serving(sampler):
    one = {"names": ["a"], "dtypes": ["float32"], "shapes": [[2]], "group_name": "nobody"}
    for path, body, *statuses in (
        ("end_weight_update", {}, 400),
        ("update_weights_from_distributed", one, 400),
        ("destroy_weights_update_group", {"group_name": "nobody"}, 400),
        ("init_weights_update_group", {"master_address": "127.0.0.1"}, 400, 422),
        ("begin_weight_update", {}, 200),
        ("begin_weight_update", {}, 400),
        ("update_weights_from_distributed", one, 400),
        ("end_weight_update", {}, 200, 400),
    ):
        assert sampler.post(f"/{path}", body).status_code in statuses, path
    sampler.ask(lambda client: client.update_weights_from_disk(sampler.first, 0))
    ((found,),) = sampler.ask(lambda client: client.generate([request()]))
    assert close(found, sampler.first, (1, 2, 3))


def test_a_trainer_that_goes_away_in_mid_broadcast_is_answered_400_and_the_disk_mends_it(sampler):
    trainer = Trainer("gone")

    async def work(client):
        buckets = await begin_broadcast(client, trainer, sampler.second)
        await client.receive_weights(buckets[0], group="gone")
        trainer.work.join(0.5)
        await client.receive_weights(buckets[1], group="gone", version=9)  # the second is there; a third never comes
        waiting = asyncio.create_task(client.receive_weights(buckets[1], group="gone", version=9))
        await asyncio.sleep(0.5)
        assert not waiting.done()
        trainer.group.close()
        with pytest.raises(BadRequest, match="receive weights"):
            await waiting
        with suppress(BadRequest):  # SGLang has no way to take back what it has loaded
            await client.end_weight_update()
        info = await client.model_info()
        await client.update_weights_from_disk(sampler.first, 0)
        ((found,),) = await client.generate([request()])
        return info["weight_version"], found

    version, found = sampler.ask(work)
    assert version == ("9" if sampler.engine == "sglang" else "0")
    assert token_versions(found) == ["0"] * 12 and close(found, sampler.first, (1, 2, 3))


def test_an_aborted_request_ends_with_what_it_has(sampler):
    async def work(client):
        others = asyncio.create_task(client.generate([request((7, 7), n=7, max_new_tokens=LONG)]))
        chunks = client.stream(request(rid="mine", max_new_tokens=LONG))
        await anext(chunks)
        await client.abort("mine")
        await client.abort("never heard of")
        one = [chunk async for chunk in chunks][-1]
        await others
        ((other,),) = await client.generate([request(max_new_tokens=3)])
        return one, other

    one, other = sampler.ask(work)
    assert one.finish_reason.type == "abort" and 0 < len(one.output_ids) < LONG
    assert len(one.output_ids) == len(one.logprobs)
    assert other.finish_reason.type == "length"


def test_a_flushed_cache_is_empty(sampler):
    async def work(client):
        long = request((8,) * 300)  # vLLM keeps whole blocks, of 128 tokens on a CPU
        await client.generate([long])
        ((warm,),) = await client.generate([long])
        if sampler.engine == "vllm":  # which forgets prompts with weights alone
            await client.update_weights_from_disk(sampler.first, 0)
        else:
            await client._call("POST", "/flush_cache", {})
        ((cold,),) = await client.generate([long])
        return warm.num_cached_tokens, cold.num_cached_tokens

    warm, cold = sampler.ask(work)
    assert warm > 0 and cold == 0


def test_the_answer_to_a_request_that_sglang_ended_in_its_queue_is_read():
    reason = {"type": "abort", "message": "Abort in waiting queue"}
    found = completion_from_wire(
        {"text": "", "output_ids": [], "meta_info": {"id": "x", "finish_reason": reason, "weight_version": "3"}}
    )
    assert (found.finish_reason.type, found.output_ids, found.weight_versions) == ("abort", [], [])
