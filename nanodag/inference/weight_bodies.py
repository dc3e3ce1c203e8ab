"""The wire protocol of weights: the bodies of SGLang's endpoints, as far as the embedded sampler honours them.

Source: sgl-project/sglang 0.5.23, python/sglang/srt/managers/io_struct.py and srt/weight_sync/tensor_bucket.py.
"""

import math
from base64 import b64decode
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, model_validator

from nanodag.errors import BadRequest
from nanodag.inference.number_formats import DTYPE_BYTES
from nanodag.inference.protocol import Wire

GROUP_NAME = "weight_update_group"
MAX_BROADCAST_BYTES = 16 << 30


@dataclass(frozen=True)
class Bucket:
    """Tensors that are broadcast in one piece: their names, the names of their dtypes, their shapes."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]

    @property
    def num_bytes(self) -> int:
        return sum(math.prod(shape) * DTYPE_BYTES[dtype] for shape, dtype in zip(self.shapes, self.dtypes, strict=True))


def largest_bucket(num_bytes: int) -> int:
    """Bytes of a bucket for a model of so many: each costs a request to every sampler, and room on both sides."""
    return min(max(num_bytes // 16, 64 << 20), 1 << 30)


class UpdateWeightsBody(Wire):
    """POST /update_weights_from_disk."""

    model_path: Annotated[str, Field(min_length=1, max_length=4096)]
    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    load_format: Literal["auto", "safetensors"] | None = None


class WeightsCheckerBody(Wire):
    """POST /weights_checker. ``checksum``: a fingerprint of every tensor (``sampler/fingerprints.py``)."""

    action: Literal["checksum"] = "checksum"


class InitGroupBody(Wire):
    """POST /init_weights_update_group: become rank ``rank_offset`` of a group whose rank 0 waits at the address."""

    master_address: Annotated[str, Field(min_length=1)]
    master_port: Annotated[int, Field(ge=1, le=65535)]
    rank_offset: Annotated[int, Field(ge=1)]
    world_size: Annotated[int, Field(ge=2)]
    group_name: Annotated[str, Field(min_length=1)] = GROUP_NAME
    backend: Literal["gloo", "nccl"] = "nccl"

    @model_validator(mode="after")
    def _can_be_joined(self) -> "InitGroupBody":
        if self.rank_offset >= self.world_size:
            raise ValueError(f"rank_offset {self.rank_offset} is not below world_size {self.world_size}")
        return self


class DestroyGroupBody(Wire):
    """POST /destroy_weights_update_group."""

    group_name: str = GROUP_NAME


class BeginUpdateBody(Wire):
    """POST /begin_weight_update. lora_scale: of adapters alone that are to come, by peft's names, to be merged onto the
    model that the sampler was started with; SGLang knows no such field."""

    lora_scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    selector: Literal["target", "all"] = "all"


class BucketBody(Wire):
    """Fields of a request that brings one bucket of weights, in either way."""

    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None
    selector: Literal["target", "all"] = "all"
    torch_empty_cache: bool = False


class ReceiveWeightsBody(BucketBody):
    """POST /update_weights_from_distributed: these tensors are what rank 0 broadcasts next. ``flattened_bucket``: in
    one piece, their bytes one after the other; else each by itself."""

    names: Annotated[list[str], Field(min_length=1)]
    dtypes: list[str]
    shapes: list[list[Annotated[int, Field(ge=0)]]]
    group_name: str = GROUP_NAME
    load_format: Literal["flattened_bucket"] | None = None

    @model_validator(mode="after")
    def _describes_tensors(self) -> "ReceiveWeightsBody":
        if not len(self.names) == len(self.dtypes) == len(self.shapes):
            raise ValueError(
                f"{len(self.names)} names, {len(self.dtypes)} dtypes and {len(self.shapes)} shapes do not go together"
            )
        if len(set(self.names)) < len(self.names):
            raise ValueError("a name is given twice")
        if unknown := sorted(set(self.dtypes) - DTYPE_BYTES.keys()):
            raise ValueError(f"dtype {unknown[0]!r} is not one of {', '.join(DTYPE_BYTES)}")
        if self.num_bytes > MAX_BROADCAST_BYTES:
            raise ValueError(f"{self.num_bytes} bytes at once are above {MAX_BROADCAST_BYTES}; send them in parts")
        return self

    @property
    def num_bytes(self) -> int:
        return Bucket(self.names, self.dtypes, self.shapes).num_bytes


class ReceiveTensorsBody(BucketBody):
    """POST /update_weights_from_tensor: handles of tensors in memory that both sides see, one for each rank of the
    sampler, in base64 (``sampler/shared_tensors.py``). The embedded sampler is one rank."""

    serialized_named_tensors: Annotated[list[str], Field(min_length=1)]
    load_format: Literal["flattened_bucket"]

    def handles(self, num_ranks: int) -> list[bytes]:
        """One for each rank of a sampler. Raises BadRequest for another number, and for what is no base64."""
        if len(self.serialized_named_tensors) != num_ranks:
            raise BadRequest(f"{len(self.serialized_named_tensors)} handles for {num_ranks} ranks of this sampler")
        try:
            return [b64decode(handle, validate=True) for handle in self.serialized_named_tensors]
        except ValueError as error:
            raise BadRequest(f"serialized_named_tensors is no base64: {error}") from error
