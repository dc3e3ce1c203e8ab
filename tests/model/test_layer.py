"""The operations of layers in our own code on a CPU against those of torch."""

from types import SimpleNamespace

import pytest
import torch

from nanodag.model.layer import OWN, TORCH, Functions, after_attention, before_attention

TOKENS = 37  # runs of rows of two lengths
SIZES = SimpleNamespace(head_dim=32, intermediate_size=80, norm_eps=1e-6)  # of an Architecture
WIDTH = 48


def tensors(dtype: torch.dtype, *, has_norms: bool = True, has_biases: bool = False) -> dict[str, torch.Tensor]:
    """The arguments of both halves by name, float32 values that dtype can hold."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    query, key = 3 * SIZES.head_dim, SIZES.head_dim
    out = {"x": normal(TOKENS, WIDTH), "norm": normal(WIDTH), "after_norm": normal(WIDTH)}
    out |= {"q": normal(query, WIDTH) / 8, "k": normal(key, WIDTH) / 8, "v": normal(key, WIDTH) / 8}
    out |= {"attended": normal(TOKENS, query), "output": normal(WIDTH, query) / 8}
    out |= {"gate": normal(80, WIDTH) / 4, "up": normal(80, WIDTH) / 8, "down": normal(WIDTH, 80) / 8}
    if has_norms:
        out |= {"q_norm": normal(32), "k_norm": normal(32)}
    if has_biases:
        out |= {"q_bias": normal(query), "k_bias": normal(key), "v_bias": normal(key)}
        out |= {"output_bias": normal(WIDTH)}
    return {name: tensor.requires_grad_() for name, tensor in out.items()}


def outcome(operations, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The results of both halves of a layer, and the gradient of each argument."""
    angles = torch.arange(TOKENS)[:, None, None] * torch.logspace(0, -3, 16)
    cos, sin = (turn.to(given["x"].dtype) for turn in (angles.cos(), angles.sin()))
    biases = tuple(given[n] for n in ("q_bias", "k_bias", "v_bias")) if "q_bias" in given else None
    norms = (given["q_norm"], given["k_norm"]) if "q_norm" in given else None
    before = (given["x"], cos, sin, given["norm"], (given["q"], given["k"], given["v"]), biases, norms)
    passed, *heads = before_attention(*before, of=SIZES, operations=operations)
    weights = [given.get(name) for name in ("output", "output_bias", "after_norm", "gate", "up", "down")]
    out = after_attention(passed, given["attended"], *weights, of=SIZES, operations=operations)
    results = {"query": heads[0], "key": heads[1], "value": heads[2], "out": out}
    total = sum(((result.float() * 3).sin() * (n + 1)).sum() for n, result in enumerate(results.values()))
    total.backward()
    gradients = {f"d_{name}": tensor.grad.float() for name, tensor in given.items()}
    return {name: result.detach().float() for name, result in results.items()} | gradients


@pytest.mark.parametrize("has_norms, has_biases", [(True, False), (False, True)])
def test_values_and_gradients_are_those_of_torch(has_norms, has_biases):
    given = [tensors(torch.float32, has_norms=has_norms, has_biases=has_biases) for _ in range(2)]
    ours, expected = outcome(OWN, given[0]), outcome(TORCH, given[1])
    for name, tensor in expected.items():
        torch.testing.assert_close(ours[name], tensor, rtol=2e-4, atol=2e-5 * float(tensor.abs().max()), msg=name)


def test_in_bfloat16_they_are_nearer_to_float32_than_torchs_own():
    short = tensors(torch.bfloat16)
    wide = {name: tensor.detach().float().requires_grad_() for name, tensor in short.items()}
    exact, ours = outcome(TORCH, wide), outcome(OWN, short)
    theirs = outcome(TORCH, tensors(torch.bfloat16))
    for name in ("query", "key", "out"):
        assert (ours[name] - exact[name]).norm() <= (theirs[name] - exact[name]).norm(), name
    for name, tensor in exact.items():
        assert (ours[name] - tensor).norm() < 0.05 * tensor.norm(), name


def test_the_number_of_threads_changes_no_bit():
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            x, gain, gate = (torch.randn(TOKENS, 64, generator=torch.Generator().manual_seed(n)) for n in range(3))
            gain = gain[0].clone()
            for tensor in (x, gain, gate):
                tensor.requires_grad_()
            passed, normed = OWN.norm(x, gain, 1e-6)
            turned = OWN.rotate(normed.view(TOKENS, 2, 32), gain[:32], gate[:, None, :16], x[:, None, :16], 1e-6)
            (OWN.gate(turned.flatten(1), gate) * passed).sum().backward()
            found.append([x.grad, gain.grad, gate.grad])
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    finally:
        torch.set_num_threads(before)


def test_a_number_that_is_none_stays_so():
    x = torch.ones(2, 16, dtype=torch.bfloat16)
    x[1, 3] = torch.nan
    _, normed = OWN.norm(x, torch.ones(16, dtype=torch.bfloat16), 1e-6)
    assert normed[0].isfinite().all() and normed[1].isnan().all()
    assert OWN.gate(x, torch.ones_like(x))[1, 3].isnan()


@pytest.mark.parametrize(
    ("width", "head_dim", "dtype", "is_ours"),
    [
        (48, 32, torch.float32, True),
        (40, 32, torch.float32, False),
        (48, 16, torch.float32, False),
        (48, 32, torch.float64, False),
    ],
)
def test_layers_of_other_widths_are_left_to_torch(width, head_dim, dtype, is_ours):
    x = torch.zeros(2, width, dtype=dtype, requires_grad=True)
    weight, turn = torch.zeros(head_dim, width, dtype=dtype), torch.zeros(2, 1, head_dim // 2, dtype=dtype)
    of = SimpleNamespace(head_dim=head_dim, intermediate_size=80, norm_eps=1e-6)
    before = Functions(compiled=False).before
    _, query, _, _ = before(x, turn, turn, weight[0], (weight,) * 3, None, None, of=of, places=None)
    assert (type(query.grad_fn).__name__ == "RotatedBackward") == is_ours
