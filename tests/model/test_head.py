"""Log-probabilities and losses from hidden states, against the plain formulas."""

import pytest
import torch
from torch.nn.functional import cross_entropy, log_softmax

from nanodag.model import head
from nanodag.model.head import cross_entropy_sum, likeliest, selected_logprobs
from tests.watched import Watched

BLOCKS = [1 << 20, 7 * 11 * 4]  # all tokens in one block; seven tokens a block, the last one smaller


def inputs(num_tokens: int = 17, width: int = 5, vocabulary: int = 11, dtype: torch.dtype = torch.float32):
    torch.manual_seed(1)
    hidden = torch.randn(num_tokens, width).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, width).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, vocabulary, (num_tokens,))


@pytest.fixture
def held_at_once(monkeypatch):
    """Sets how many bytes of logits the head holds at once."""
    return lambda num_bytes: monkeypatch.setattr(head, "HEAD_BLOCK_BYTES", num_bytes)


def gradients(loss, *tensors):
    return torch.autograd.grad(loss, tensors)


@pytest.mark.parametrize("block_bytes", BLOCKS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("with_entropy", [True, False])
def test_logprobs_entropy_and_gradients_equal_the_plain_formula(held_at_once, block_bytes, temperature, with_entropy):
    held_at_once(block_bytes)
    hidden, weight, targets = inputs()
    mix = torch.randn(2, 17)
    plain = log_softmax(hidden @ weight.T / temperature, dim=-1)
    wanted = [plain.gather(1, targets[:, None]).squeeze(1), -(plain.exp() * plain).sum(1)][: 1 + with_entropy]
    found = list(selected_logprobs(hidden, weight, targets, temperature=temperature))[: 1 + with_entropy]
    torch.testing.assert_close(found, wanted)
    ours, theirs = (gradients(sum(map(torch.dot, several, mix)), hidden, weight) for several in (found, wanted))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_backward_twice_gives_the_same_gradients():
    hidden, weight, targets = inputs()
    logprobs, _ = selected_logprobs(hidden, weight, targets)
    first = torch.autograd.grad(logprobs.sum(), (hidden, weight), retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(logprobs.sum(), (hidden, weight)), first, rtol=0, atol=0)


@pytest.mark.parametrize("block_bytes", BLOCKS)
def test_cross_entropy_sum_and_gradients_equal_torch(held_at_once, block_bytes):
    held_at_once(block_bytes)
    hidden, weight, targets = inputs()
    targets[[0, 3, 4, 16]] = -100
    plain = cross_entropy(hidden @ weight.T, targets, reduction="sum")
    found = cross_entropy_sum(hidden, weight, targets)
    torch.testing.assert_close(found, plain)
    ours, theirs = (gradients(one / 3, hidden, weight) for one in (found, plain))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_cross_entropy_of_no_token_is_zero_with_zero_gradients():
    hidden, weight, targets = inputs()
    loss = cross_entropy_sum(hidden, weight, torch.full_like(targets, -100))
    assert loss.item() == 0.0
    assert all(gradient.count_nonzero() == 0 for gradient in gradients(loss, hidden, weight))


def test_the_weight_gradient_in_bfloat16_is_summed_in_float32_over_blocks(held_at_once):
    held_at_once(16 * 2 * 8)
    hidden, weight, targets = inputs(512, 8, 16, torch.bfloat16)
    wanted = gradients(cross_entropy(hidden.float() @ weight.float().T, targets, reduction="sum"), weight)[0]
    found = gradients(cross_entropy_sum(hidden, weight, targets), weight)[0]
    assert (found.float() - wanted.float()).abs().max() <= 0.01 * wanted.float().abs().max()


def test_logits_of_all_tokens_are_never_held_at_once(held_at_once):
    held_at_once(8 * 100 * 4)
    hidden, weight, targets = inputs(64, 4, 100)
    with Watched() as seen:
        logprobs, _ = selected_logprobs(hidden, weight, targets)
        logprobs.sum().backward()
        cross_entropy_sum(hidden, weight, targets).backward()
    assert seen.num_bytes == 8 * 100 * 4


def test_wrong_shapes_and_temperatures_are_refused():
    hidden, weight, targets = inputs()
    with pytest.raises(ValueError, match="shapes do not fit"):
        selected_logprobs(hidden, weight, targets[:-1])
    with pytest.raises(ValueError, match="temperature is 0"):
        selected_logprobs(hidden, weight, targets, temperature=0.0)


@pytest.mark.parametrize("wrong", [-1, 11])
def test_a_target_outside_of_the_vocabulary_is_an_error(wrong):
    hidden, weight, targets = inputs()
    targets[3] = wrong
    for loss in (cross_entropy_sum, selected_logprobs):
        with pytest.raises(IndexError, match="the vocabulary has 11 tokens"):
            loss(hidden, weight, targets)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_entropy_and_gradients_in_bfloat16_are_those_of_float64_on_the_same_logits(temperature):
    hidden, weight, targets = inputs(40, 8, 83, torch.bfloat16)
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    # Logits are rounded to bfloat16, so the exact side takes them as rounded, with the gradient of what they are from.
    product = exact[0] @ exact[1].T
    logits = product + ((hidden @ weight.T).double() - product).detach()
    plain = log_softmax(logits / temperature, dim=-1)
    selected = plain.gather(1, targets[:, None]).squeeze(1)
    mix = torch.randn(2, 40)
    wanted = gradients((selected * mix[0]).sum() - ((plain.exp() * plain).sum(1) * mix[1]).sum(), *exact)
    logprobs, entropy = selected_logprobs(hidden, weight, targets, temperature=temperature)
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), selected, rtol=0, atol=1e-5)
    found = gradients((logprobs * mix[0] + entropy * mix[1]).sum(), hidden, weight)
    torch.testing.assert_close([one.double() for one in found], list(wanted), rtol=2e-2, atol=5e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_likeliest_token_is_the_first_of_equals_as_torch_has_it(dtype):
    logits = torch.randn(7, 37, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[2, [5, 30]] = 9.0
    logits[3, 36] = 9.0
    logits[4] = -torch.inf
    logits[4, 7] = -1e30
    places, logsumexp = likeliest(logits)
    assert places.tolist() == logits.argmax(-1).tolist() and places[2:5].tolist() == [5, 36, 7]
    torch.testing.assert_close(logsumexp, logits.float().logsumexp(-1))
