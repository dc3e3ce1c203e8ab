"""Adapters: what peft computes, and merged weights that are a model without them."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from nanodag.model.folder import load
from nanodag.model.lora import LINEARS, add_lora, merged
from tests.rl.models import save_tiny_model


@pytest.fixture(params=[False, True], ids=["plain", "biased"])
def folder(request, tmp_path):
    return save_tiny_model(tmp_path / "model", vocabulary=64, bias=request.param)


def adapted(folder):
    """A model with adapters that are not zero, and its weights by name."""
    model = load(folder)
    add_lora(model, rank=4, alpha=12.0, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".up"):
                parameter.normal_(0, 0.1, generator=generator)
    return model


def logits_of(model, ids):
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    return model(ids, positions, torch.zeros_like(ids), want="logits")


IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


def test_a_model_with_new_adapters_is_the_model(folder):
    plain, model = load(folder), load(folder)
    add_lora(model, rank=4, alpha=12.0, seed=0)
    assert torch.equal(logits_of(model, IDS), logits_of(plain, IDS))


def test_merged_weights_are_a_model_of_the_same_names_that_computes_the_same_bits(folder):
    model, plain = adapted(folder), load(folder)
    weights = {name: tensor.clone() for name, tensor in merged(model.named_parameters(), scale=3.0)}
    assert weights.keys() == dict(plain.named_parameters()).keys()
    plain.load_state_dict(weights, strict=False)
    assert torch.equal(logits_of(model, IDS), logits_of(plain, IDS))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
def test_logits_are_those_of_peft(folder):
    from peft import LoraConfig, get_peft_model

    model = adapted(folder)
    config = LoraConfig(r=4, lora_alpha=12, target_modules=list(LINEARS), lora_dropout=0.0)
    peer = get_peft_model(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), config)
    ours = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in peer.named_parameters():
            for theirs, part in ((".lora_A.default.weight", "down"), (".lora_B.default.weight", "up")):
                if name.endswith(theirs):
                    layer = name.removesuffix(theirs).removeprefix("base_model.model.")
                    parameter.copy_(ours[f"{layer}.parametrizations.weight.0.{part}"])
        found, wanted = logits_of(model, IDS), peer(IDS).logits
    assert not torch.allclose(found, logits_of(load(folder), IDS), atol=1e-2)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
