"""Products by oneDNN against those in float64."""

import subprocess
import sys

import pytest
import torch

from nanodag.model.cpu_linear import linear, times_transposed


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_values_and_gradients_are_those_of_a_linear_layer(dtype, tolerance):
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (7, 24), "weight": (10, 24), "bias": (10,)}
    given = {
        name: torch.randn(*shape, generator=generator).to(dtype).requires_grad_() for name, shape in shapes.items()
    }
    exact = {name: tensor.detach().double().requires_grad_() for name, tensor in given.items()}
    for call, arguments in ((linear, given), (torch.nn.functional.linear, exact)):
        call(*arguments.values()).sin().sum().backward()
    for name, tensor in exact.items():
        torch.testing.assert_close(given[name].grad.double(), tensor.grad, rtol=tolerance, atol=10 * tolerance)


def test_what_is_transposed_in_memory_and_what_has_no_rows_is_multiplied_too():
    x, matrix = torch.arange(12.0).view(4, 3), torch.arange(6.0).view(3, 2)
    assert torch.equal(times_transposed(x, matrix.T), x @ matrix)
    assert torch.equal(times_transposed(x.T, matrix.T.repeat(1, 2)[:, :4]), x.T @ matrix.T.repeat(1, 2)[:, :4].T)
    assert times_transposed(x[:0], matrix.T).shape == (0, 2)


def test_frozen_weights_get_no_gradient():
    x, weight = torch.ones(2, 3, requires_grad=True), torch.ones(4, 3)
    linear(x, weight).sum().backward()
    assert torch.equal(x.grad, torch.full((2, 3), 4.0))
    assert weight.grad is None


GROWTH = """
import torch
from nanodag.model.cpu_linear import linear

def resident_mb():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 1e6

weight = torch.ones(64, 64, requires_grad=True)
for num_rows in range(200, 400):
    linear(torch.ones(num_rows, 64, requires_grad=True), weight).sum().backward()
    if num_rows == 240:
        before = resident_mb()
print(resident_mb() - before)
"""


def test_products_of_ever_new_lengths_do_not_grow_the_process():
    """Trained rows of RL differ in length at each step. In a process of its own: the caches' sizes are read once."""
    grown = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, check=True).stdout
    assert float(grown) < 60  # MB; 250 where 1,024 shapes are kept
