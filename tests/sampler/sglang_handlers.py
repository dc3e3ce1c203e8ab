"""SGLang's own handlers of weights, called one by one in SGLang's environment, without a server and without a model.

A line of stdin is a request's path and body; a line of stdout says what SGLang's handler made of it. What begins and
ends a session is checked against its form alone: it restores and packs the weights of a real model.
"""

import json
import sys
import tempfile
from contextlib import redirect_stdout
from typing import Any

FORMS = {
    "/init_weights_update_group": "InitWeightsUpdateGroupReqInput",
    "/destroy_weights_update_group": "DestroyWeightsUpdateGroupReqInput",
    "/begin_weight_update": "BeginWeightUpdateReqInput",
    "/end_weight_update": "EndWeightUpdateReqInput",
    "/update_weights_from_distributed": "UpdateWeightsFromDistributedReqInput",
    "/update_weights_from_tensor": "UpdateWeightsFromTensorReqInput",
    "/update_weights_from_disk": "UpdateWeightFromDiskReqInput",
    "/load_lora_adapter": "LoadLoRAAdapterReqInput",
    "/unload_lora_adapter": "UnloadLoRAAdapterReqInput",
    "/update_weight_version": "UpdateWeightVersionReqInput",
}


class Model:
    """A model that keeps what it is to load."""

    def load_weights(self, named: Any) -> None:
        self.loaded = {name: tensor.float().tolist() for name, tensor in named}


def form_of(path: str, body: dict[str, Any]) -> Any:
    """The request as SGLang's own type. Raises ValueError for a field that it does not have."""
    import msgspec
    from sglang.srt.managers import io_struct

    kind = getattr(io_struct, FORMS[path])
    if unknown := body.keys() - set(kind.__struct_fields__):
        raise ValueError(f"{kind.__name__} has no {unknown}")
    if handles := body.get("serialized_named_tensors"):  # in JSON a text, which its HTTP door decodes
        from sglang.srt.utils.common import normalize_serialized_named_tensor_payloads

        body = {**body, "serialized_named_tensors": normalize_serialized_named_tensor_payloads(handles)}
    return msgspec.convert(msgspec.to_builtins(kind(**body)), kind)  # the second time its types are looked at


def handled(updater: Any, path: str, asked: Any) -> Any:
    from sglang.srt.utils.common import MultiprocessingSerializer
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

    if path == "/init_weights_update_group":
        where = (asked.master_address, asked.master_port, asked.rank_offset, asked.world_size)
        return updater.init_weights_update_group(*where, asked.group_name, asked.backend)
    if path == "/destroy_weights_update_group":
        return updater.destroy_weights_update_group(asked.group_name)
    if path == "/update_weights_from_distributed":
        names = ("names", "dtypes", "shapes", "group_name", "load_format")
        got = updater.receive_weights_from_distributed(**{name: getattr(asked, name) for name in names})
        return {name: tensor.float().tolist() for name, tensor in got}
    if path == "/update_weights_from_tensor":
        assert asked.load_format == "flattened_bucket"
        monkey_patch_torch_reductions()  # as TpModelWorker.deserialize_own_rank
        bucket = MultiprocessingSerializer.deserialize(asked.serialized_named_tensors[updater.tp_rank])
        updater._update_weights_from_flattened_bucket(flattened_tensor_bucket_dict=bucket)
        return updater.get_model().loaded
    return True


def main() -> None:
    import torch
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        model, rest = Model(), ("model_config", "update_model_fields", "recapture_cuda_graph", "get_model_runner")
        settings = {"tp_rank": 0, "device": "cpu", "gpu_id": 0, "custom_weight_loaders": {}, **dict.fromkeys(rest)}
        updater = WeightUpdater(**settings, get_model=lambda: model)
        for line in sys.stdin:
            path, body = json.loads(line)
            try:
                with redirect_stdout(sys.stderr):
                    answer = handled(updater, path, form_of(path, body))
            except Exception as error:  # noqa: BLE001 - whoever asked is told
                answer = f"{type(error).__name__}: {error}"
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
