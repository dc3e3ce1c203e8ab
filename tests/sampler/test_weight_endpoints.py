"""Weights by broadcast at the embedded sampler: what is wrong is answered 400, with the reason; old weights stay."""

import asyncio
import base64
import hashlib
import pickle
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file

from nanodag.engines.start import start_engine
from nanodag.errors import BadRequest
from nanodag.inference.client import SamplerClient
from nanodag.inference.engine_settings import EngineSettings
from nanodag.inference.protocol import Request, SamplingParams
from nanodag.sampler.engine import Engine
from nanodag.sampler.shared_tensors import share
from tests.sampler.group import Trainer

ONE = {"names": ["a"], "dtypes": ["float32"], "shapes": [[2]]}
GROUP = {"master_address": "127.0.0.1", "master_port": 9, "rank_offset": 1, "world_size": 2, "backend": "gloo"}

TWICE = {"serialized_named_tensors": ["gA=="] * 2}
HANDLE = {"serialized_named_tensors": ["gA=="], "load_format": "flattened_bucket"}


@pytest.fixture(scope="module")
def folders(make_checkpoint):
    return make_checkpoint("qwen3"), make_checkpoint("qwen3", seed=1)


@pytest.fixture(scope="module")
def server(folders, tmp_path_factory):
    log = tmp_path_factory.mktemp("log") / "log"
    with start_engine(
        EngineSettings(model=folders[0], max_batch=4, weight_version=0, context_length=64), log_path=log
    ) as process:
        yield process


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("update_weights_from_distributed", ONE | {"names": []}, "names"),
        ("update_weights_from_distributed", ONE | {"dtypes": []}, "1 names, 0 dtypes and 1 shapes do not go together"),
        ("update_weights_from_distributed", ONE | {"dtypes": ["int4"]}, "dtype 'int4' is not one of float32"),
        ("update_weights_from_distributed", ONE | {"shapes": [[-1]]}, "shapes.0.0"),
        ("update_weights_from_distributed", ONE | {"shapes": [[1 << 20, 1 << 20]]}, "send them in parts"),
        ("update_weights_from_distributed", ONE | {"no_such": 1}, "there is no such field"),
        ("update_weights_from_distributed", {k: v * 2 for k, v in ONE.items()}, "a name is given twice"),
        ("update_weights_from_distributed", ONE | {"load_format": "other"}, "load_format"),
        ("update_weights_from_distributed", ONE, "between begin_weight_update"),
        (
            "init_weights_update_group",
            {k: v for k, v in GROUP.items() if k != "backend"},
            "backend 'nccl' needs a GPU",
        ),
        ("init_weights_update_group", GROUP | {"backend": "mpi"}, "backend 'mpi' is not built"),
        ("update_weights_from_tensor", HANDLE, "between begin_weight_update"),
        (
            "update_weights_from_tensor",
            HANDLE | {"serialized_named_tensors": ["gA=="] * 2},
            "2 handles for the one rank",
        ),
        ("update_weights_from_tensor", HANDLE | {"serialized_named_tensors": ["?"]}, "base64"),
        ("update_weights_from_tensor", HANDLE | {"load_format": "direct"}, "load_format"),
        ("init_weights_update_group", GROUP | {"rank_offset": 2}, "rank_offset 2 is not below world_size 2"),
        ("init_weights_update_group", GROUP | {"master_port": 0}, "master_port"),
        ("begin_weight_update", {"selector": "draft"}, "selector"),
        ("end_weight_update", {}, "no weight-update session is open"),
        ("destroy_weights_update_group", {}, "does not exist"),
    ],
)
def test_a_body_that_cannot_be_honoured_is_refused_with_the_reason(server, path, body, reason):
    answer = httpx.post(f"{server.url}/{path}", json=body, timeout=60, trust_env=False)
    assert answer.status_code == 400 and reason in answer.text, answer.text


@pytest.mark.parametrize(
    ("instead", "reason"),
    [
        ({"model_norm_weight": None}, "what was broadcast has no tensor 'model.norm.weight'"),
        ({"model_norm_weight": torch.full((32,), float("nan"))}, "'model.norm.weight' in what was broadcast holds NaN"),
        ({"model_norm_weight": torch.ones(31)}, "has shape"),
    ],
)
def test_weights_that_are_not_whole_leave_the_old_ones(server, folders, instead, reason):
    trainer = Trainer(reason)

    async def work():
        async with SamplerClient(server.url) as client:
            request = Request(input_ids=[1, 2], params=SamplingParams(temperature=0.0, max_new_tokens=4))
            before = await client.generate([request])
            buckets = trainer.broadcast(folders[1], **instead)
            await client.join_weight_group(name=trainer.name, port=trainer.store.port, rank=1, size=2)
            await client.begin_weight_update()
            for bucket in buckets:
                await client.receive_weights(bucket, group=trainer.name, version=3)
            with pytest.raises(BadRequest, match=f"old weights are kept: .*{reason}"):
                await client.end_weight_update()
            await client.leave_weight_group(trainer.name)
            after, info = await client.generate([request]), await client.model_info()
            assert info["weight_version"] == "0"
            assert after[0][0].logprobs == before[0][0].logprobs

    asyncio.run(work())


def test_what_is_broadcast_tensor_by_tensor_is_taken_too(server, folders):
    trainer = Trainer("by tensor")

    async def work():
        async with SamplerClient(server.url) as client:
            buckets = trainer.broadcast(folders[1], each_alone=True)
            await client.join_weight_group(name=trainer.name, port=trainer.store.port, rank=1, size=2)
            await client.begin_weight_update()
            for bucket in buckets:
                body = {"names": bucket.names, "dtypes": bucket.dtypes, "shapes": bucket.shapes}
                body |= {"group_name": trainer.name, "weight_version": "4"}
                await client._call("POST", "/update_weights_from_distributed", body)
            await client.end_weight_update()
            found, info = await client.fingerprints(), await client.model_info()
            await client.update_weights_from_disk(str(folders[1]), 0)
            assert found == await client.fingerprints() and info["weight_version"] == "4"
            await client.update_weights_from_disk(str(folders[0]), 0)

    asyncio.run(work())


def test_what_is_no_handle_of_tensors_is_refused_and_runs_nothing(server, tmp_path):
    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "touched",))

    _, (handle,) = share(torch.ones(8, dtype=torch.uint8), {"a": (2,)}, torch.float32, 1)
    gone = base64.b64decode(handle).replace(b"/torch_", b"/gone__")
    for handle, reason in (
        (b"no pickle", "no handle"),
        (pickle.dumps(Evil()), "has no place in it"),
        (gone, "shared memory"),
    ):
        text = base64.b64encode(handle).decode()
        answers = [
            httpx.post(f"{server.url}/{path}", json=body, timeout=60, trust_env=False)
            for path, body in (
                ("begin_weight_update", {}),
                ("update_weights_from_tensor", HANDLE | {"serialized_named_tensors": [text]}),
                ("end_weight_update", {}),
            )
        ]
        assert [answer.status_code for answer in answers] == [200, 400, 400]
        assert reason in answers[1].text and "old weights are kept" in answers[2].text, answers[1].text
    assert not (tmp_path / "touched").exists()


def test_a_layer_is_built_when_its_last_tensor_comes_and_what_came_is_let_go(folders):
    engine = Engine(folders[0], max_batch=1, context_length=64)
    tensors = load_file(folders[1] / "model.safetensors")
    order = sorted(tensors, key=lambda name: hashlib.sha256(name.encode()).digest())  # any
    builder = engine.builder("here")
    for name in order:
        builder.add({name: tensors[name]})
    assert not any(".layers." in name for name in builder._raw)
    assert builder.whole().sums() == engine.load(folders[1]).sums()
    with pytest.raises(BadRequest, match=f"'{order[0]}' in here came twice"):
        builder.add({order[0]: tensors[order[0]]})


def test_an_answer_does_not_wait_for_the_clients_acknowledgement(server):
    """As it did, 40 ms an answer, while Nagle's algorithm was on."""

    async def work():
        async with SamplerClient(server.url) as client:
            took = []
            for _ in range(30):
                began = asyncio.get_running_loop().time()
                await client.model_info()
                took.append(asyncio.get_running_loop().time() - began)
            return sorted(took)

    assert asyncio.run(work())[10] < 0.03
