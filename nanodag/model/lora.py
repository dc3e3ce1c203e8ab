"""Low-rank adapters on a decoder's matrices: the weight that is used is W + alpha / rank * up @ down, W is frozen.

Source: LoRA, arXiv:2106.09685. As in peft, `down` begins as Kaiming-uniform (a = sqrt 5) and `up` as zeros, so that
training begins at the model. Departing from peft the sum is formed before the product with the activations: the decoder
takes weights as arguments (nanodag.model.decoder), and what the sampler is given, the merged weights, is bit for bit
what the trainer computes with. It costs one matrix a layer in memory while gradients are computed.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils import parametrize

from nanodag.errors import BadRequest, ConfigError
from nanodag.model.architecture import read_json, write_json
from nanodag.model.four_bits import quantized, restored
from nanodag.model.headers import ADAPTER_CONFIG, faults_of_config

ADAPTER = "adapter"  # folder of adapters in a model's; not beside its files, where transformers would add them again
PEFT = "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."
PLAIN_BEGINNINGS = (True, False, "gaussian", "eva", "orthogonal")  # by others adapters belong to a changed base
BETWEEN = ".parametrizations.weight."  # of torch's names: layer.parametrizations.weight.original, .0.down, .0.up


class LowRank(nn.Module):
    """Low-rank addition to a weight of shape (out, in). down: (rank, in), up: (out, rank)."""

    def __init__(self, weight: Tensor, *, rank: int, scale: float, generator: torch.Generator) -> None:
        super().__init__()
        out, inner = weight.shape
        bound = 1 / math.sqrt(inner)  # Kaiming-uniform with a = sqrt 5
        self.down = nn.Parameter((2 * torch.rand(rank, inner, generator=generator) - 1) * bound)
        self.up = nn.Parameter(torch.zeros(out, rank))
        self.scale = scale

    def forward(self, weight: Tensor) -> Tensor:
        return merge(weight, self.down, self.up, self.scale)


class QuantizedBase(LowRank):
    """The same over a weight that is held in 4 bits, and is whole while it is used."""

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and scales, which take the weight's place."""
        return quantized(weight)

    def forward(self, codes: Tensor, scales: Tensor) -> Tensor:  # type: ignore[override]
        return merge(base_of(codes, scales, self.down, self.up), self.down, self.up, self.scale)


def base_of(codes: Tensor, scales: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """The weight in 4 bits below adapters, whole and in their precision."""
    return restored(codes, scales, (len(up), down.shape[1]), down.dtype)


def merge(weight: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """The weight that is used."""
    return weight + scale * (up @ down)


def add_lora(model: nn.Module, *, rank: int, alpha: float, seed: int, in_four_bits: bool = False) -> None:
    """Freeze a model's parameters and put adapters on its layers' matrices. seed: of `down`. in_four_bits: what these
    matrices are held in from now on (QLoRA)."""
    generator = torch.Generator().manual_seed(seed)
    model.requires_grad_(False)
    linears = list(_linears(model))
    if not linears:
        raise ConfigError("lora_rank adapts nn.Linear in a model's layers, and this one has none; set it to 0.")
    for linear in linears:
        kind = QuantizedBase if in_four_bits else LowRank
        adapter = kind(linear.weight, rank=rank, scale=alpha / rank, generator=generator)
        # Weights that were not read yet cannot be tried out, and codes have another shape.
        is_unsafe = linear.weight.is_meta or in_four_bits
        parametrize.register_parametrization(linear, "weight", adapter, unsafe=is_unsafe)
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            # The first layer's input must have a gradient: ZeRO-3 takes the layer for done when that is there.
            module.register_forward_hook(lambda _module, _ids, out: out.requires_grad_(torch.is_grad_enabled()))


def _linears(model: nn.Module) -> Iterator[nn.Linear]:
    """The matrices of a model's layers, but routers of experts, which decide and do not compute."""
    leaves, seen = getattr(getattr(model, "decoder", model), "leaf_modules", ()), set[int]()
    for layer in model.modules():
        for name, module in layer.named_modules() if isinstance(layer, leaves) else ():
            is_router = name.rpartition(".")[2] in ("gate", "router")
            if isinstance(module, nn.Linear) and not is_router and id(module) not in seen:
                seen.add(id(module))
                yield module


def merged(weights: Iterable[tuple[str, Tensor]], *, scale: float) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) pairs as `Engine.weights` yields them, with adapters merged and the names of a model without.

    A tensor is valid until the next one is asked for.
    """
    held: dict[str, Tensor] = {}
    for name, tensor in weights:
        layer, between, part = name.partition(BETWEEN)
        if not between:
            yield name, tensor
            continue
        held[part.removeprefix("0.")] = tensor.clone()
        if len(held) == (4 if "original0" in held else 3):
            down, up = held["down"], held["up"]
            base = held["original"] if "original" in held else base_of(held["original0"], held["original1"], down, up)
            yield f"{layer}.weight", merge(base, down, up, scale)
            held = {}
    assert not held


def peft_name(name: str) -> str:
    """Name in peft's files of an adapter's tensor, `down` or `up`; any other name as it is."""
    layer, _, part = name.partition(BETWEEN)
    letter = {"0.down": "A", "0.up": "B"}.get(part)
    return name if letter is None else f"{PEFT_PREFIX}{layer}.lora_{letter}.weight"


def save_adapter(folder: Path, weights: Mapping[str, Tensor], *, alpha: float, dtype: torch.dtype) -> None:
    """Write adapters into a folder in peft's format. Nothing where there are none. weights: by a model's names, with
    adapters among them, or by peft's."""
    named = {peft_name(name): tensor for name, tensor in weights.items()}
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in named.items() if ".lora_" in name}
    if not tensors:
        return
    folder.mkdir(exist_ok=True)
    layers = {name.rpartition(".lora_")[0].rpartition(".")[2] for name in tensors}
    rank = next(tensor.shape[0] for name, tensor in tensors.items() if name.endswith(".lora_A.weight"))
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": alpha, "lora_dropout": 0.0,
              "bias": "none", "target_modules": sorted(layers), "base_model_name_or_path": None}  # fmt: skip
    save_file(tensors, folder / PEFT, metadata={"format": "pt"})
    write_json(folder / ADAPTER_CONFIG, config)


def read_adapter(folder: Path) -> tuple[dict[str, Tensor], float]:
    """Tensors of an adapter folder in peft's format by their names there, and the scale of their products. LoRA,
    rank-stabilised too (arXiv:2312.03732).

    Raises BadRequest for one that does more than that, or is damaged.
    """
    config = read_json(folder / ADAPTER_CONFIG)
    refused = ("use_dora", "modules_to_save", "fan_in_fan_out", "rank_pattern", "alpha_pattern", "lora_bias",
               "target_parameters", "alora_invocation_tokens", "layer_replication")  # fmt: skip
    found = {name: config[name] for name in refused if config.get(name)}
    for name, taken in {"peft_type": ("LORA",), "bias": ("none",), "init_lora_weights": PLAIN_BEGINNINGS}.items():
        if config.get(name, taken[0]) not in taken:
            found[name] = config[name]
    if found:
        raise BadRequest(f"{folder / ADAPTER_CONFIG} has {min(found)} {found[min(found)]!r}, which is not built here.")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise BadRequest(f"{folder / ADAPTER_CONFIG} has r {rank!r} and lora_alpha {alpha!r}; both must be numbers.")
    try:
        tensors = load_file(folder / PEFT)
    except (OSError, SafetensorError) as error:
        raise BadRequest(f"{folder / PEFT} cannot be read: {error}") from error
    _pairs(tensors, str(folder / PEFT), rank)
    return tensors, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _pairs(tensors: Mapping[str, Tensor], source: str, rank: int | None = None) -> dict[str, tuple[Tensor, Tensor]]:
    """(down, up) by the weight that they add to. Raises BadRequest for what is no pair, or of another rank."""
    left, pairs = dict(tensors), {}
    for layer in {name.rpartition(".lora_")[0] for name in tensors}:
        down, up = (left.pop(f"{layer}.lora_{letter}.weight", torch.empty(0)) for letter in "AB")
        if down.ndim != 2 or up.ndim != 2 or not down.shape[0] == up.shape[1] == (rank or len(down)):
            raise BadRequest(f"{source}: no pair of LoRA of rank {rank or len(down)} for {layer or 'its tensors'}.")
        pairs[f"{layer.removeprefix(PEFT_PREFIX)}.weight"] = (down, up)
    if left or not pairs:
        raise BadRequest(f"{source} holds {min(left, default='nothing')}, which is no part of LoRA on a matrix.")
    return pairs


@faults_of_config()
def additions(folder: Path) -> dict[str, Tensor]:
    """Sums to a model's weights, float32 by name, of an adapter folder. Raises ConfigError for one that is refused."""
    tensors, scale = read_adapter(folder)
    return {name: scale * (up.float() @ down.float()) for name, (down, up) in _pairs(tensors, str(folder)).items()}


def merged_onto(
    base: Iterable[tuple[str, Tensor]], adapters: Mapping[str, Tensor], *, scale: float, source: str
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) pairs of a base with adapters, by peft's names, in the adapters' precision and on their device: to
    the bit what `merged` makes of the model that they were trained in.

    source: where the adapters are from, for messages. Raises BadRequest for adapters of another model.
    """
    pairs, like = _pairs(adapters, source), next(iter(adapters.values()))
    for name, tensor in base:
        down, up = pairs.get(name, (None, None))
        if down is None or up is None:
            yield name, tensor.to(like)
        elif tensor.shape == (len(up), down.shape[1]):
            del pairs[name]
            yield name, merge(tensor.to(like), down, up, scale)
    if pairs:
        raise BadRequest(f"{source} adapts {min(pairs)}, which the model lacks, or has in another shape.")
