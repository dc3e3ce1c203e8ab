"""The only module that imports deepspeed: a model under ZeRO 0 to 3, its update, its shards on disk.

    engine = Engine(model, optimizer=config.optimizer, zero_stage=2, precision="bf16", gradient_clipping=1.0)
    for index, batch in enumerate(micro_batches):                     # as many as this step has
        loss_sum = engine(batch.input_ids, ...)                       # the model's forward
        engine.backward(loss_sum / global_count, last=index == len(micro_batches) - 1)
    gradient_norm = engine.step(learning_rate=2e-4)
    if ...: engine.save(folder)
    leave()

What is passed to `backward` is summed over micro-batches and over ranks, so a denominator must be the count over all of
them. Not covered: offload to disk, tensor, sequence and pipeline parallelism.
"""

import contextlib
import io
import logging
import math
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import deepspeed
import deepspeed.ops
import torch
from torch import Tensor, nn
from torch import distributed as dist

from nanodag.children.tree import killed_with_starter
from nanodag.config.section import Precision
from nanodag.config.stage_base import Resources
from nanodag.config.supervised import OptimizerConfig
from nanodag.errors import TrainingDiverged
from nanodag.host.beside import table_beside
from nanodag.inference.bound_store import BoundStore
from nanodag.inference.number_formats import DTYPES
from nanodag.train.checkpoint import key, saved_state, write_state
from nanodag.train.lent_memory import LentMemory
from nanodag.train.optimizer import Segment, SegmentedOptimizer
from nanodag.train.shares import Shares, in_buckets

GATHER_BYTES = 64 << 20


def start_ranks(device: str) -> torch.device:
    """Join the other ranks of torchrun, or be the only one; the device of this rank. device: `cpu` or `cuda`.

    A second call changes nothing.
    """
    killed_with_starter()  # else ranks train on that have lost torchrun
    local = int(os.environ.setdefault("LOCAL_RANK", "0"))
    here = torch.device(device, local) if device == "cuda" else torch.device(device)
    if not dist.is_initialized():
        options: dict[str, Any] = {"backend": "gloo"}
        if device == "cuda":
            # Before NCCL starts, and named to it: else every rank's first collective takes memory on GPU 0, or guesses
            # its GPU from its rank, which is wrong on a second node.
            torch.cuda.set_device(here)
            options = {"backend": "nccl", "device_id": here}
        if "RANK" in os.environ:
            rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            dist.init_process_group(store=_store(rank, world), rank=rank, world_size=world, **options)
        else:
            # No port is opened: two workers on one machine cannot collide.
            dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1, **options)
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    return here


def _store(rank: int, world: int) -> dist.Store:
    """Meeting place of ranks: torchrun's, or the first rank's, which listens on MASTER_ADDR only."""
    is_master = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return BoundStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world, is_master)


def leave(code: int = 0) -> NoReturn:
    """End this rank after all ranks got here.

    os._exit: at a normal exit under torchrun, threads of DeepSpeed and gloo end one run in four with SIGABRT.
    """
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class TrainEngine:
    """A model, its optimizer state and its gradients, spread over ranks as the ZeRO stage says.

    model: on CPU in float32; it is cast and moved here. One that was loaded deferred is read here: under ZeRO-3 in
    shares, so that no rank ever holds all of it. leaf_modules: classes whose parameters are gathered all at once
    under ZeRO-3 (a decoder layer). gradient_limit, skips_bad_gradients: as of the SegmentedOptimizer, which `updates`
    is. Calling an engine calls the model. Parameters that need no gradient stay as they are, and are not saved.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: OptimizerConfig,
        zero_stage: int,
        precision: Precision,
        gradient_clipping: float,
        gradient_limit: float = math.inf,
        skips_bad_gradients: bool = False,
        device: str = "cpu",
        leaf_modules: tuple[type[nn.Module], ...] = (),
        offload: Resources | None = None,
    ) -> None:
        self.device = start_ranks(device)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.zero_stage, self.precision = zero_stage, precision
        self.dtype: torch.dtype = getattr(torch, DTYPES[precision])
        # DeepSpeed's shared-memory all-reduce compiles C++ for 26 s at first use; gloo is there.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        self.config = _deepspeed_config(zero_stage, precision, device, offload)
        whole = {name: tuple(p.shape) for name, p in model.named_parameters()}
        model = self.placed(model, leaf_modules)
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.shapes = {name: whole[name] for name, _ in trained}
        self.updates = SegmentedOptimizer(
            trained, self.shapes, optimizer, clip=gradient_clipping, limit=gradient_limit, skips=skips_bad_gradients
        )
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)  # it warns of every optimizer that is not its own
        self._engine, self._zero = _started(model, self.config, self.updates)
        self.model = model
        self.shares = Shares(model, whole, dtype=self.dtype, is_spread=zero_stage == 3)
        masters, segments = self._layout()
        self.updates.attach(masters, segments, sharded=self._sharded, dtype=self.dtype, device=self.device)
        # This rank's weights between two steps, in the training precision: ZeRO-3 gives parameters their shares.
        weights = (getattr(parameter, "ds_tensor", parameter.data) for parameter in model.parameters())
        self.lent_weights = LentMemory(weights, device=self.device)
        self.lent_states = LentMemory(self.updates.tensors(), self._gradient_buffers(), device=self.device)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._engine(*args, **kwargs)

    def placed(self, model: nn.Module, leaf_modules: tuple[type[nn.Module], ...]) -> nn.Module:
        """A model on this rank's device in the training precision. Parameters that were not read yet are, one after the
        other by rank 0, and under ZeRO-3 each rank keeps its share of one before the next is read."""
        if self.zero_stage == 3 and leaf_modules:
            deepspeed.utils.set_z3_leaf_modules(model, list(leaf_modules))
        largest = max((p.numel() for p in model.parameters() if p.is_meta), default=0)
        whole = torch.empty(largest, dtype=self.dtype, device=self.device)  # one for all, else the heap has holes
        read: dict[nn.Parameter, nn.Parameter] = {}  # a tied one has two places
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is None or not parameter.is_meta:
                    continue
                if parameter not in read:
                    read[parameter] = self._read(parameter, whole, next(iter(read.values()), None))
                module._parameters[name] = read[parameter]
        return model.to(self.device, self.dtype)

    def _read(self, parameter: Any, whole: Tensor, shared: Any) -> nn.Parameter:
        """This rank's share of a parameter of a model that was loaded deferred. whole: room for all of it. shared: one
        that was read before."""
        whole = whole[: parameter.numel()].view(parameter.shape)
        if self.rank == 0:
            parameter.stored.read_into(whole)
        read = nn.Parameter(whole, requires_grad=parameter.requires_grad)
        if shared is None:
            deepspeed.zero.Init(nn.ParameterList([read]), config_dict_or_path=self.config, dtype=self.dtype)
        else:
            shared.convert_to_zero_parameters(param_list=[read])
        return read

    @property
    def _sharded(self) -> bool:
        return self.zero_stage > 0 and self.world_size > 1

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of a scalar to this step's. last: no more micro-batch follows in this step, on any rank."""
        self._engine.set_gradient_accumulation_boundary(last)
        # DeepSpeed averages gradients over ranks; what is passed here is to be summed.
        self._engine.backward(loss * self.world_size, scale_wrt_gas=False)

    def step(self, *, learning_rate: float, matrix_lr: float = 0.0) -> float:
        """Update the weights; returns the global gradient norm before clipping. matrix_lr: of an optimizer of
        matrices.

        Raises TrainingDiverged, with the weights unchanged, when the gradient is bad and not to be skipped.
        """
        self.updates.set_rates(learning_rate=learning_rate, matrix_lr=matrix_lr)
        self.updates.gradient_norm = None
        self._engine.step()
        if self.updates.gradient_norm is None:
            if not self.updates.skips:
                raise TrainingDiverged("The gradient is not finite: DeepSpeed skipped the update.")
            self.updates.num_skipped += 1
            return math.nan
        return self.updates.gradient_norm

    def summed(self, *values: float) -> list[float]:
        """Each value summed over all ranks, in float64."""
        if self.world_size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.tolist()

    def gathered(self, value: Any) -> list[Any]:
        """The values of all ranks, by rank; every rank must call it."""
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value)
        return values

    def highest(self, value: float) -> float:
        """The highest of a value over all ranks."""
        if self.world_size == 1:
            return value
        maximum = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(maximum, op=dist.ReduceOp.MAX)
        return float(maximum)

    def highest_device_bytes(self) -> int:
        """The most memory that torch has held on this rank's GPU; 0 on a CPU."""
        return torch.cuda.max_memory_reserved(self.device) if self.device.type == "cuda" else 0

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.world_size > 1:
            dist.barrier()

    def weights(self, *, bucket_bytes: int = GATHER_BYTES) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter whole, on the rank's device, in the training precision, as (name, tensor).

        A tensor is valid until the next one is asked for. All ranks must walk through, to the end; at most bucket_bytes
        are gathered at once.
        """
        named = dict(self.model.named_parameters())
        for bucket in in_buckets(list(named), self.shares.num_bytes, bucket_bytes):
            with deepspeed.zero.GatheredParameters([named[name] for name in bucket], enabled=self.zero_stage == 3):
                for name in bucket:
                    yield name, named[name].detach()

    def full_state_dict(self) -> dict[str, Tensor]:
        """Whole weights on CPU by name on rank 0, an empty dict elsewhere; all ranks must call it."""
        return {name: tensor.to("cpu", copy=True) for name, tensor in self.weights() if self.rank == 0}

    @contextlib.contextmanager
    def whole(self, parameter: nn.Parameter) -> Iterator[Tensor]:
        """One parameter whole on every rank's device, for reading, as long as the block lasts; all ranks must enter."""
        with deepspeed.zero.GatheredParameters([parameter], enabled=self.zero_stage == 3):
            yield parameter.detach()

    def snapshot(self) -> list[Tensor]:
        """A copy of this rank's master weights, for `restore`."""
        return [master.detach().clone() for master in self.updates.masters]

    def restore(self, snapshot: list[Tensor]) -> None:
        """Make the weights those of a snapshot; the optimizer's state stays."""
        for master, kept in zip(self.updates.masters, snapshot, strict=True):
            master.detach().copy_(kept)
        self._refresh_weights()

    def save(self, folder: Path, *, snapshot: list[Tensor] | None = None) -> None:
        """Write this rank's master weights and optimizer state into a folder; one file a rank, one in all at stage 0.

        snapshot: more weights to keep beside them. The files say which piece of which parameter they hold, so another
        number of ranks and another ZeRO stage can load them.
        """
        if not self._sharded and self.rank != 0:
            return
        planes = self.updates.planes(self.lent_states.readable)
        tensors = {key(plane, segment): view.cpu() for plane, segment, view in planes}
        if snapshot is not None:
            for segment in self.updates.segments:
                tensors[key("snapshot", segment)] = snapshot[segment.flat].view(-1)[segment.where].cpu()
        num_files = self.world_size if self._sharded else 1
        common = {"num_updates": self.updates.num_updates, "num_files": num_files, "shapes": self.shapes}
        write_state(folder, self.rank, common, tensors)

    def load(self, folder: Path) -> list[Tensor] | None:
        """Take weights and optimizer state from what `save` wrote, by any number of ranks at any stage; returns the
        snapshot that was kept beside them. Raises CorruptArtifact when a piece is missing, or ranks disagree."""
        with saved_state(folder, self.shapes) as saved:
            for plane, segment, view in self.updates.planes():
                saved.fill(plane, segment, view)
            self.updates.num_updates = saved.num_updates
            snapshot = None
            if any(plane == "snapshot" for plane, _ in saved.pieces):
                snapshot = self.snapshot()
                for segment in self.updates.segments:
                    saved.fill("snapshot", segment, snapshot[segment.flat].view(-1)[segment.where])
        self._refresh_weights()
        return snapshot

    def _gradient_buffers(self) -> list[Tensor]:
        """Tensors that DeepSpeed keeps between two steps for gradients that are yet to come."""
        buckets = getattr(self._zero, "ipg_buckets", {}).values()
        held = [getattr(bucket, "buffer", None) for bucket in buckets]
        held.append(getattr(self._zero, "grad_partitions_flat_buffer", None))
        return [buffer for buffer in held if isinstance(buffer, Tensor)]

    def _layout(self) -> tuple[list[Tensor], list[Segment]]:
        """This rank's float32 master tensors, and where each parameter lies in them.

        DeepSpeed makes parameters (under ZeRO-3 their shards) views into its flat buffers, so addresses say where.
        """
        named: list[tuple[str, Any]] = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        zero = self._zero
        places: list[tuple[int, int, int, int]] = []  # of each parameter, as of a Segment: flat, start, offset, length
        if self.zero_stage == 3:
            masters, flats = zero.fp32_partitioned_groups_flat, zero.fp16_partitioned_groups_flat
            for _, parameter in named:  # with the attributes that ZeRO-3 gives it
                shard = parameter.ds_tensor
                offset = self.rank * shard.ds_numel
                places.append((*_position(shard, flats), offset, min(shard.ds_numel, parameter.ds_numel - offset)))
        elif self.zero_stage == 0:
            parameters, masters = self._stage_0()
            order = {id(p): i for i, p in enumerate(parameters)}
            places += [(order[id(parameter)], 0, 0, parameter.numel()) for _, parameter in named]
        else:
            if hasattr(zero, "single_partition_of_fp32_groups"):
                masters, flats = zero.single_partition_of_fp32_groups, zero.bit16_groups_flat
            else:
                masters, flats = zero.fp32_groups_flat_partition, zero.bf16_groups_flat
            for _, parameter in named:
                flat, begin = _position(parameter.data, flats)
                first = self.rank * masters[flat].numel()
                mine = range(max(begin, first), min(begin + parameter.numel(), first + masters[flat].numel()))
                places.append((flat, mine.start - first, mine.start - begin, len(mine)))
        return masters, [
            Segment(name=name, shape=self.shapes[name], flat=flat, start=start, offset=offset, length=length)
            for (name, _), (flat, start, offset, length) in zip(named, places, strict=True)
            if length > 0
        ]

    def _stage_0(self) -> tuple[list[nn.Parameter], list[Tensor]]:
        """Parameters, and a master of its own for each: in bf16 a copy, in fp32 itself."""
        if hasattr(self._zero, "fp16_groups"):
            groups, masters = self._zero.fp16_groups, self._zero.fp32_groups
        else:
            groups = masters = [group["params"] for group in self.updates.param_groups]
        return [p for group in groups for p in group], [p for group in masters for p in group]

    @torch.no_grad()
    def _refresh_weights(self) -> None:
        """Make the model's weights those of the masters."""
        zero = self._zero
        if self.zero_stage == 3:
            for index in range(len(zero.fp32_partitioned_groups_flat)):
                zero._reassign_or_swap_out_partitioned_parameters(index)
            if persistent := zero.persistent_parameters:  # a forward pass has left them whole, as they were
                persistent[0].partition(persistent)
                persistent[0].all_gather(persistent)
        elif hasattr(zero, "update_lp_params"):
            zero.update_lp_params()
        elif self.precision == "bf16":
            for parameter, master in zip(*self._stage_0(), strict=True):
                parameter.data.copy_(master.data)


class FrozenModel:
    """A model that is asked and never trained, beside an engine: under its ZeRO-3 in shares, else whole on every rank.

    model, leaf_modules: as of the engine. shares: what this rank holds, by name; under ZeRO-3 (N / ranks,) each, the
    last one filled up. Calling it calls the model; all ranks must, equally often.
    """

    def __init__(self, model: nn.Module, *, beside: TrainEngine, leaf_modules: tuple[type[nn.Module], ...]) -> None:
        self.is_spread = beside.zero_stage == 3
        self._shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        self._model: Any = beside.placed(model.requires_grad_(False), leaf_modules)
        if self.is_spread:
            self._model, _ = _started(model, beside.config)
        self._parameters: dict[str, Any] = dict(model.named_parameters())
        self.shares = {name: p.ds_tensor if self.is_spread else p.data for name, p in self._parameters.items()}

    def __call__(self, *args: Any) -> Any:
        return self._model(*args)

    @torch.no_grad()
    def take(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take whole weights by name, flat or not, and filled up at their end or not; all ranks must call it."""
        for name, tensor in weights:
            parameter, shape = self._parameters[name], self._shapes[name]
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=self.is_spread):
                parameter.copy_(tensor.flatten()[: math.prod(shape)].view(shape))


def _started(model: nn.Module, config: dict[str, Any], optimizer: Any = None) -> tuple[Any, Any]:
    """DeepSpeed's engine of a model, and its optimizer."""
    with contextlib.redirect_stdout(io.StringIO()):  # it prints memory use
        engine, zero, _, _ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config, dist_init_required=False
        )
    return engine, zero


def _position(tensor: Tensor, flats: list[Tensor]) -> tuple[int, int]:
    """The flat buffer that a view lies in, and its first element there."""
    for index, flat in enumerate(flats):
        begin = (tensor.data_ptr() - flat.data_ptr()) // flat.element_size()
        if 0 <= begin < flat.numel():
            return index, begin
    raise AssertionError("a parameter is not a view into DeepSpeed's flat buffers")


def _deepspeed_config(zero_stage: int, precision: Precision, device: str, offload: Resources | None) -> dict[str, Any]:
    config: dict[str, Any] = table_beside(__file__)
    config["zero_optimization"]["stage"] = zero_stage
    for name in ("offload_optimizer", "offload_param"):
        if offload is not None and getattr(offload, name) == "cpu":
            config["zero_optimization"][name] = {"device": "cpu", "pin_memory": device == "cuda"}
    config["bf16"] = {"enabled": precision == "bf16"}
    if precision == "bf16" and zero_stage > 0:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config
