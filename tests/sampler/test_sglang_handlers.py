"""Calls of weights as the trainer makes them, taken by SGLang's own handlers (`sglang_handlers.py`)."""

import ast
import base64
import json
import os
import pickle
import subprocess
from pathlib import Path
from threading import Thread

import pytest
import torch
from torch.multiprocessing import reductions

from nanodag.engines.named_adapters import NamedAdapters
from nanodag.engines.start import SHIM
from nanodag.host.folders import PROJECT
from nanodag.inference.sglang_options import NOT_TAKEN, OWN_OPTIONS
from nanodag.inference.weight_bodies import Bucket
from nanodag.sampler.shared_tensors import CUDA_DEVICE, share
from nanodag.sampler.weight_group import WeightGroup, open_store
from tests.guest_pythons import sglang_python
from tests.sampler import sglang_handlers

pytestmark = pytest.mark.slow

TENSORS = {"a": torch.tensor([1.0, 2.0, 3.0]), "b.c": torch.tensor([[4.0, 5.0], [6.0, 7.0]])}
BUCKET = Bucket(list(TENSORS), ["float32"] * 2, [[3], [2, 2]])
FLAT = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in TENSORS.values()])
VALUES = {name: tensor.tolist() for name, tensor in TENSORS.items()}
GPU = "GPU-6f1a"


class Noted(NamedAdapters):
    """A client that notes what it would send."""

    async def _call(self, method, path, body=None):
        self.sent.append([path, body])
        return b"{}"


async def sent_by(call):
    client = Noted("http://127.0.0.1:1")
    client.sent = []
    await call(client)
    return client.sent


@pytest.fixture(scope="module")
def ask():
    """ask(path, body): what SGLang's handler answers."""
    python = sglang_python()
    code = f"import runpy; kept = runpy.run_path({str(SHIM)!r}, run_name='__mp_main__')\n"
    code += f"runpy.run_path({sglang_handlers.__file__!r}, run_name='__main__')"
    environment = {**os.environ, "NANODAG_SGLANG_CPU": "1", "SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment = {name: value for name, value in environment.items() if not name.startswith("PYTHON")}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([str(python), "-c", code], env=environment, cwd=PROJECT, **pipes) as process:

        def ask(path, body):
            process.stdin.write(json.dumps([path, body]) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield ask
        process.stdin.close()
        process.wait(60)


async def test_every_call_has_a_form_of_sglangs(ask, tmp_path):
    async def call(client):
        await client.begin_weight_update()
        await client.end_weight_update()
        await client.update_weights_from_disk("/folder", 3, flush_cache=False)
        for version in (4, 5):  # and adapters in its place, the second ones in the place of the first
            await client.update_weights_from_disk(str(tmp_path), version)

    (tmp_path / "adapter_config.json").write_text("{}")
    sent = await sent_by(call)
    assert len(sent) == 8 and sent[-1] == ["/unload_lora_adapter", {"lora_name": sent[3][1]["lora_name"]}]
    for path, body in sent:
        assert ask(path, body) is True, path


async def test_sglang_reads_a_bucket_out_of_a_handle(ask):
    kept, handles = share(FLAT, {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}, torch.float32, 1)
    ((path, body),) = await sent_by(lambda client: client.take_weights(handles, version=4))
    assert ask(path, body) == VALUES
    del kept


class OfGPU:
    """A handle's tensor as it is pickled on a GPU."""

    def __reduce__(self):
        values = [torch.Tensor, (1,), (1,), 0, torch.UntypedStorage, torch.uint8, 0, b"", 1, 0, b"", 0, b"", False]
        values[CUDA_DEVICE] = GPU
        return reductions.rebuild_cuda_tensor, tuple(values)


async def test_sglang_looks_for_the_gpu_that_a_handle_names_by_its_uuid(ask):
    handle = base64.b64encode(pickle.dumps({"flattened_tensor": OfGPU(), "metadata": []})).decode()
    ((path, body),) = await sent_by(lambda client: client.take_weights([handle]))
    assert f"Invalid device_uuid={GPU}" in ask(path, body)


async def test_sglang_joins_a_group_takes_a_broadcast_and_leaves(ask):
    store, made = open_store("127.0.0.1", 20.0), []
    trainer = Thread(target=lambda: made.append(WeightGroup(store, name="one", rank=0, size=2, timeout_s=20.0)))
    trainer.start()
    where = {"name": "one", "port": store.port, "rank": 1, "size": 2}
    ((path, body),) = await sent_by(lambda client: client.join_weight_group(**where))
    assert ask(path, body) == [True, "Succeeded to initialize custom process group."]
    trainer.join(60)
    sending = Thread(target=lambda: made[0].broadcast(FLAT))
    sending.start()
    ((path, body),) = await sent_by(lambda client: client.receive_weights(BUCKET, group="one", version=5))
    assert ask(path, body) == VALUES
    sending.join(60)
    ((path, body),) = await sent_by(lambda client: client.leave_weight_group("one"))
    assert ask(path, body) == [True, "Succeeded to destroy custom process group."]
    made[0].close()


async def test_a_scheduler_of_sglangs_does_not_join_a_trainer_with_another_nccl_and_says_both(ask):
    store = open_store("127.0.0.1", 20.0, nccl="2.29.7")
    where = {"name": "two", "port": store.port, "rank": 1, "size": 2, "backend": "nccl"}
    ((path, body),) = await sent_by(lambda client: client.join_weight_group(**where))
    is_done, message = ask(path, body)
    assert not is_done and "NCCL refuses ranks of two versions: the trainer's torch has 2.29.7" in message


def source_of(name):
    """A file of SGLang's, parsed."""
    code = "import importlib.util as u; print(u.find_spec('sglang').submodule_search_locations[0])"
    command = [str(sglang_python()), "-c", code]
    folder = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return ast.parse(Path(folder, name).read_text())


def test_every_path_is_a_post_of_sglangs_server():
    posts = {
        argument.value
        for node in ast.walk(source_of("srt/entrypoints/http_server.py"))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("post", "api_route")
        for argument in node.args
        if isinstance(argument, ast.Constant)
    }
    assert sglang_handlers.FORMS.keys() <= posts


def test_what_is_refused_and_read_of_a_server_are_fields_of_sglangs():
    tree = source_of("srt/arg_groups/fields/parallel.py")
    fields = {node.target.id for node in ast.walk(tree) if isinstance(node, ast.AnnAssign)}
    assert {"tp_size", "dp_size", "pp_size", "nnodes", "node_rank"} <= fields
    words = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    known = fields | {word.removeprefix("--").replace("-", "_") for word in words if word.startswith("--")}
    assert {name.replace("-", "_") for name in (*NOT_TAKEN, "tp-size", "tensor-parallel-size")} <= known
    assert {"tp-size", "tensor-parallel-size"} <= OWN_OPTIONS


def test_sglangs_place_of_the_gpu_in_a_handle_is_ours():
    tree = source_of("srt/utils/patch_torch.py")
    places = [
        node.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "_REDUCE_TENSOR_ARG_DEVICE_INDEX"
    ]
    assert places == [CUDA_DEVICE]
