"""Matrix products of a decoder's layers in float8, by torchao: `precision: fp8`.

Each tensor, weights, activations and gradients alike, is divided by its largest value and cast; the products are summed
in more. Weights, optimizer states, the head and attention are as in bfloat16. A GPU below compute capability 8.9, and a
CPU, cast just so and multiply in bfloat16. Source: torchao.float8, arXiv:2209.05433.
"""

import torch
from torch import Tensor

from nanodag.errors import MissingTool
from nanodag.host.machine import FP8_CAPABILITY
from nanodag.model.layer import Linear


def fp8_linear(device: torch.device) -> Linear:
    """A function like torch's linear of bfloat16 tensors, with gradients. Raises MissingTool without torchao."""
    try:
        from torchao.float8.config import Float8LinearConfig
        from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args
    except ImportError as error:
        raise MissingTool(f"precision fp8 needs torchao: pip install 'nanodag[fp8]' ({error})") from error
    emulates = device.type == "cpu" or float("{}.{}".format(*torch.cuda.get_device_capability(device))) < FP8_CAPABILITY
    # A GPU takes multiples of 16; the number of a row's tokens may be another.
    config = Float8LinearConfig(emulate=emulates, pad_inner_dim=True)
    how = Float8Linear(1, 1, bias=False, device="meta", config=config).linear_mm_config

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        product: Tensor = matmul_with_hp_or_float8_args.apply(x, weight.t(), how, config)
        return product.clone() if bias is None else product + bias  # a view: the layer adds to it in place

    return linear
