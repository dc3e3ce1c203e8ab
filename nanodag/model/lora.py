"""Low-rank adapters on a decoder's matrices: the weight that is used is W + alpha / rank * up @ down, W is frozen.

Source: LoRA, arXiv:2106.09685. As in peft, `down` begins as Kaiming-uniform (a = sqrt 5) and `up` as zeros, so that
training begins at the model. Departing from peft the sum is formed before the product with the activations: the decoder
takes weights as arguments (nanodag.model.decoder), and what the sampler is given, the merged weights, is bit for bit
what the trainer computes with. It costs one matrix a layer in memory while gradients are computed.
"""

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
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


def merge(weight: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """The weight that is used."""
    return weight + scale * (up @ down)


def add_lora(model: nn.Module, *, rank: int, alpha: float, seed: int) -> None:
    """Freeze a model's parameters and put adapters on its layers' matrices. seed: of `down`."""
    generator = torch.Generator().manual_seed(seed)
    model.requires_grad_(False)
    chosen = [(name, layer) for name, layer in model.named_modules() if name.rpartition(".")[2] in LINEARS]
    for _, linear in chosen:
        adapter = LowRank(linear.weight, rank=rank, scale=alpha / rank, generator=generator)
        # Weights that were not read yet cannot be tried out.
        parametrize.register_parametrization(linear, "weight", adapter, unsafe=linear.weight.is_meta)
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            # The first layer's input must have a gradient: ZeRO-3 takes the layer for done when that is there.
            module.register_forward_hook(lambda _module, _ids, out: out.requires_grad_(torch.is_grad_enabled()))


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
        if len(held) == 3:
            yield f"{layer}.weight", merge(held["original"], held["down"], held["up"], scale)
            held = {}
    assert not held
