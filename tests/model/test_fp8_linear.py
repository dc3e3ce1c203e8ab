"""Products in float8 against casts and products by hand."""

import pytest
import torch

from nanodag.model.fp8_linear import fp8_linear

pytestmark = pytest.mark.slow  # which has torchao


def cast(tensor, dtype):
    """The tensor as it is in float8: divided by its largest value, rounded, multiplied back. In float64."""
    scale = torch.finfo(dtype).max / tensor.abs().max().double()
    return (tensor.double() * scale).to(dtype).double() / scale


def test_values_and_gradients_are_of_tensors_that_were_cast_to_float8():
    generator = torch.Generator().manual_seed(0)
    shapes = ((24, 32), (16, 32), (24, 16), (16,))
    x, weight, d_y, bias = (torch.randn(*s, generator=generator).bfloat16().requires_grad_() for s in shapes)
    product = fp8_linear(torch.device("cpu"))(x, weight, bias)
    product.backward(d_y)
    e4, e5 = torch.float8_e4m3fn, torch.float8_e5m2
    wide_x, wide_weight, wide_d_y = cast(x.detach(), e4), cast(weight.detach(), e4), cast(d_y.detach(), e5)
    by_hand = {
        "product": (product, wide_x @ wide_weight.T + bias.double()),
        "x": (x.grad, wide_d_y @ wide_weight),
        "weight": (weight.grad, wide_d_y.T @ wide_x),
    }
    for name, (found, expected) in by_hand.items():
        torch.testing.assert_close(found.double(), expected, rtol=0.01, atol=0.03, msg=name)
    plain = x.detach().double() @ weight.detach().double().T + bias.double()
    assert (product.double() - plain).abs().max() > 0.1  # so the casts are there
