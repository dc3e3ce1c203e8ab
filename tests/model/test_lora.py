"""Adapters: what peft computes, and merged weights that are a model without them."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from nanodag.errors import ConfigError
from nanodag.model.folder import load
from nanodag.model.lora import add_lora, additions, merged, save_adapter
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
    config = LoraConfig(r=4, lora_alpha=12, target_modules="all-linear", lora_dropout=0.0)
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


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_peft_reads_our_adapters_to_the_same_logits(folder, tmp_path):
    from peft import PeftModel

    model = adapted(folder)
    save_adapter(tmp_path / "adapter", dict(model.named_parameters()), alpha=12.0, dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        wanted = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))(IDS).logits
        assert (logits_of(model, IDS) - wanted).abs().max() <= 1e-5


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("is_stabilised", [False, True])
def test_we_merge_an_adapter_of_peft_to_the_same_logits(folder, tmp_path, is_stabilised):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=3, lora_alpha=7, target_modules=["q_proj", "down_proj"], use_rslora=is_stabilised)
    peer = get_peft_model(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), config).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in peer.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1, generator=generator)
        peer.save_pretrained(tmp_path)
        model, sums = load(folder), additions(tmp_path)
        for name, parameter in model.named_parameters():
            parameter += sums.pop(name, 0.0)
        assert not sums
        assert (logits_of(model, IDS) - peer(IDS).logits).abs().max() <= 1e-5


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"r": None}, "r None"),
        ({"r": 0}, "r 0"),
        ({"r": 8}, "no pair of LoRA of rank 8"),
        ({"lora_alpha": float("nan")}, "lora_alpha nan"),
    ],
)
def test_an_adapter_that_does_more_than_low_ranks_is_refused_by_name(folder, tmp_path, changed, named):
    save_adapter(tmp_path / "adapter", dict(adapted(folder).named_parameters()), alpha=12.0, dtype=torch.float32)
    path = tmp_path / "adapter" / "adapter_config.json"
    config = {**json.loads(path.read_text()), "modules_to_save": [], **changed}
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=named):
        additions(tmp_path / "adapter")


def test_a_damaged_adapter_is_refused(folder, tmp_path):
    save_adapter(tmp_path / "adapter", dict(adapted(folder).named_parameters()), alpha=12.0, dtype=torch.float32)
    (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(b"x" * 9)
    with pytest.raises(ConfigError, match="cannot be read"):
        additions(tmp_path / "adapter")
