"""Weights by broadcast at the embedded sampler: what is wrong is answered 400, with the reason; old weights stay."""

import base64
import hashlib
import pickle
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nanodag.engines.start import start_engine
from nanodag.errors import BadRequest
from nanodag.inference.engine_settings import EngineSettings
from nanodag.sampler.shared_tensors import share
from tests.sampler.group import Trainer, begin_broadcast
from tests.sampler.reference import make_engine, request, with_client

ONE = {"names": ["a"], "dtypes": ["float32"], "shapes": [[2]]}
HANDLE = {"serialized_named_tensors": ["gA=="], "load_format": "flattened_bucket"}
GROUP = {"master_address": "127.0.0.1", "master_port": 9, "rank_offset": 1, "world_size": 2, "backend": "gloo"}


@pytest.fixture(scope="module")
def folders(make_checkpoint):
    return make_checkpoint("qwen3"), make_checkpoint("qwen3", seed=1)


@pytest.fixture(scope="module")
def server(folders, tmp_path_factory):
    settings = EngineSettings(model=folders[0], max_batch=4, weight_version=0, context_length=64)
    with start_engine(settings, log_path=tmp_path_factory.mktemp("log") / "log") as process:
        yield process


BAD_BODIES = {
    "update_weights_from_distributed": {
        "names": ONE | {"names": []},
        "1 names, 0 dtypes and 1 shapes": ONE | {"dtypes": []},
        "dtype 'int4'": ONE | {"dtypes": ["int4"]},
        "shapes.0.0": ONE | {"shapes": [[-1]]},
        "send them in parts": ONE | {"shapes": [[1 << 20, 1 << 20]]},
        "there is no such field": ONE | {"no_such": 1},
        "a name is given twice": {k: v * 2 for k, v in ONE.items()},
        "load_format": ONE | {"load_format": "other"},
        "between begin_weight_update": ONE,
    },
    "update_weights_from_tensor": {
        "between begin_weight_update": HANDLE,
        "2 handles for 1 ranks": HANDLE | {"serialized_named_tensors": ["gA=="] * 2},
        "base64": HANDLE | {"serialized_named_tensors": ["?"]},
        "load_format": HANDLE | {"load_format": "direct"},
    },
    "init_weights_update_group": {
        "backend 'nccl' needs a GPU": GROUP | {"backend": "nccl"},
        "backend: Input should be 'gloo' or 'nccl' (found 'mpi')": GROUP | {"backend": "mpi"},
        "rank_offset 2": GROUP | {"rank_offset": 2},
        "master_port": GROUP | {"master_port": 0},
    },
    "begin_weight_update": {"selector": {"selector": "draft"}},
    "end_weight_update": {"no weight-update session is open": {}},
    "destroy_weights_update_group": {"does not exist": {}},
}


@pytest.mark.parametrize("path", BAD_BODIES)
def test_a_body_that_cannot_be_honoured_is_refused_with_the_reason(post, path):
    for reason, body in BAD_BODIES[path].items():
        answer = post(f"/{path}", body)
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
    async def run(client):
        trainer = Trainer(reason)
        before = await client.generate([request(temperature=0.0)])
        for bucket in await begin_broadcast(client, trainer, folders[1], **instead):
            await client.receive_weights(bucket, group=trainer.name, version=3)
        with pytest.raises(BadRequest, match=f"old weights are kept: .*{reason}"):
            await client.end_weight_update()
        await client.leave_weight_group(trainer.name)
        after, info = await client.generate([request(temperature=0.0)]), await client.model_info()
        assert info["weight_version"] == "0"
        assert after[0][0].logprobs == before[0][0].logprobs

    with_client(server, run)


def test_what_is_broadcast_tensor_by_tensor_is_taken_too(server, folders):
    async def run(client):
        trainer = Trainer("by tensor")
        for bucket in await begin_broadcast(client, trainer, folders[1], each_alone=True):
            body = {"names": bucket.names, "dtypes": bucket.dtypes, "shapes": bucket.shapes}
            body |= {"group_name": trainer.name, "weight_version": "4"}
            await client._call("POST", "/update_weights_from_distributed", body)
        await client.end_weight_update()
        found, info = await client.fingerprints(), await client.model_info()
        await client.update_weights_from_disk(str(folders[1]), 0)
        assert found == await client.fingerprints() and info["weight_version"] == "4"
        await client.update_weights_from_disk(str(folders[0]), 0)

    with_client(server, run)


def test_what_is_no_handle_of_tensors_is_refused_and_runs_nothing(post, tmp_path):
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
        assert post("/begin_weight_update", {}).status_code == 200
        refused = post("/update_weights_from_tensor", HANDLE | {"serialized_named_tensors": [text]})
        assert refused.status_code == 400 and reason in refused.text, refused.text
        ended = post("/end_weight_update", {})
        assert ended.status_code == 400 and "old weights are kept" in ended.text
    assert not (tmp_path / "touched").exists()


def test_a_layer_is_built_when_its_last_tensor_comes_and_what_came_is_let_go(folders):
    engine = make_engine(folders[0], max_batch=1, context_length=64)
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

    async def run(client):
        took = []
        for _ in range(30):
            began = time.monotonic()
            await client.model_info()
            took.append(time.monotonic() - began)
        assert sorted(took)[10] < 0.03

    with_client(server, run)
