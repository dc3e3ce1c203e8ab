"""The optimizer against torch's own AdamW and Muon, and against formulas written out in numpy."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from nanodag import registry
from nanodag.config.supervised import OptimizerConfig
from nanodag.train.optimizer import Segment, SegmentedOptimizer
from nanodag.train.optimizers.muon import momentum_of

SHAPES = {"layers.0.up": (12, 8), "layers.0.down": (8, 12), "layers.0.norm": (8,), "embed": (20, 8)}


def parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def gradients(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def flat_optimizer(config: OptimizerConfig, *, clip: float = 0.0) -> tuple[SegmentedOptimizer, torch.Tensor]:
    """All parameters in one flat tensor, with padding at its end, as ZeRO keeps them."""
    named = parameters()
    optimizer = SegmentedOptimizer(named.items(), SHAPES, config, clip=clip)
    order = sorted(named, key=lambda name: ["matrix", "decayed", "plain"].index(optimizer.kinds[name]))
    flat = torch.cat([*(named[name].detach().flatten() for name in order), torch.zeros(3)]).requires_grad_()
    segments, start = [], 0
    for name in order:
        size = math.prod(SHAPES[name])
        segments.append(Segment(name=name, shape=SHAPES[name], flat=0, start=start, offset=0, length=size))
        start += size
    optimizer.attach([flat], segments, sharded=False, dtype=torch.float32, device=flat.device)
    return optimizer, flat


def take_step(optimizer: SegmentedOptimizer, flat: torch.Tensor, found: dict[str, torch.Tensor]) -> None:
    flat.grad = torch.zeros_like(flat)
    for segment in optimizer.segments:
        flat.grad[segment.where] = found[segment.name].flatten()
    optimizer.step()


def weight(optimizer: SegmentedOptimizer, flat: torch.Tensor, name: str) -> torch.Tensor:
    segment = next(s for s in optimizer.segments if s.name == name)
    return flat.detach()[segment.where].view(segment.shape)


def test_adamw_on_flat_weights_equals_torch():
    config = OptimizerConfig(name="adamw", weight_decay=0.1, betas=(0.9, 0.95))
    optimizer, flat = flat_optimizer(config)
    theirs = parameters()
    decayed, plain = ([p for p in theirs.values() if p.ndim == ndim] for ndim in (2, 1))
    reference = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], lr=0.01, betas=(0.9, 0.95)
    )
    optimizer.set_rates(learning_rate=0.01, matrix_lr=0.0)
    for step in range(4):
        take_step(optimizer, flat, gradients(step))
        for name, gradient in gradients(step).items():
            theirs[name].grad = gradient
        reference.step()
    for name in SHAPES:
        torch.testing.assert_close(weight(optimizer, flat, name), theirs[name].detach())
    assert flat.detach()[-3:].count_nonzero() == 0


def test_muon_equals_torch_to_the_rounding_of_its_bfloat16_iteration():
    optimizer, flat = flat_optimizer(OptimizerConfig(name="muon", weight_decay=0.1, momentum=0.9))
    theirs = parameters()
    matrices = ("layers.0.up", "layers.0.down")
    reference = torch.optim.Muon(map(theirs.get, matrices), lr=0.05, weight_decay=0.1, momentum=0.9, nesterov=True)
    optimizer.set_rates(learning_rate=0.0, matrix_lr=0.05)
    for step in range(3):
        take_step(optimizer, flat, gradients(step))
        for name in matrices:
            theirs[name].grad = gradients(step)[name]
        reference.step()
    for name in matrices:
        torch.testing.assert_close(weight(optimizer, flat, name), theirs[name].detach(), rtol=0, atol=3 * 0.05 * 0.02)


def test_muons_first_step_is_the_newton_schulz_formula_in_float64():
    optimizer, flat = flat_optimizer(OptimizerConfig(name="muon", momentum=0.95))
    before = weight(optimizer, flat, "layers.0.up").clone()
    optimizer.set_rates(learning_rate=0.0, matrix_lr=0.05)
    take_step(optimizer, flat, gradients(0))

    g = gradients(0)["layers.0.up"].double().numpy()
    momentum = 0.05 * g
    x = (0.05 * g + 0.95 * momentum).T  # Nesterov; 12 x 8 stands upright, so transposed
    x = x / np.linalg.norm(x)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    wanted = before.double().numpy() - 0.05 * math.sqrt(12 / 8) * x.T
    torch.testing.assert_close(weight(optimizer, flat, "layers.0.up").double(), torch.from_numpy(wanted))


def test_normuon_divides_muons_update_by_the_second_moments_of_rows_and_keeps_its_norm():
    config = {"momentum": 0.95, "momentum_warmup": 4}
    (optimizer, flat), (plain, other) = (flat_optimizer(OptimizerConfig(name=n, **config)) for n in ("normuon", "muon"))
    second = np.zeros((12, 1))
    for step in range(3):
        steps = []
        for of, weights in ((optimizer, flat), (plain, other)):
            of.set_rates(learning_rate=0.0, matrix_lr=0.05)
            before = weight(of, weights, "layers.0.up").double().numpy().copy()
            take_step(of, weights, gradients(step))
            steps.append((before - weight(of, weights, "layers.0.up").double().numpy()) / 0.05)
        found, update = steps  # muon's own update does not depend on the weights
        second = 0.95 * second + 0.05 * (update**2).mean(axis=1, keepdims=True)
        adapted = update / np.sqrt(second)
        wanted = adapted * np.linalg.norm(update) / np.linalg.norm(adapted)
        np.testing.assert_allclose(found, wanted, atol=2e-5)


def test_momentum_rises_to_its_value_over_the_warm_up():
    config = OptimizerConfig(momentum=0.95, momentum_warmup=100)
    assert [momentum_of(n, config) for n in (0, 50, 100, 1000)] == pytest.approx([0.85, 0.90, 0.95, 0.95])
    assert momentum_of(0, OptimizerConfig(momentum=0.95)) == 0.95


@pytest.mark.parametrize("name", registry.names("optimizer"))
def test_the_norm_is_that_of_the_gradient_and_clipping_scales_it_before_any_momentum(name):
    clipped, flat = flat_optimizer(OptimizerConfig(name=name), clip=1.0)
    by_hand, other = flat_optimizer(OptimizerConfig(name=name))
    for step in range(2):
        found = gradients(step)
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in found.values()))
        for optimizer in (clipped, by_hand):
            optimizer.set_rates(learning_rate=0.01, matrix_lr=0.01)
        take_step(clipped, flat, found)
        assert clipped.gradient_norm == pytest.approx(norm, rel=1e-6)
        take_step(by_hand, other, {key: g / norm for key, g in found.items()})
    torch.testing.assert_close(flat, other)


def test_embeddings_are_not_orthogonalised_and_norms_not_decayed():
    optimizer, _ = flat_optimizer(OptimizerConfig(name="muon", weight_decay=0.1))
    assert list(map(optimizer.kinds.get, SHAPES)) == ["matrix", "matrix", "plain", "decayed"]
