"""Tiny random checkpoints of each model type, written by transformers and read back by the sampler."""

import json
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.engines.conftest import samplers_are_forks  # noqa: F401 - for each module of this folder

VOCAB_SIZE = 150  # no multiple of 64: the padded columns must never be drawn
EOS = 7


def build_model(kind: str, seed: int = 0, **overrides) -> PreTrainedModel:
    """A random model whose distributions are neither flat nor certain."""
    sizes = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 256, "eos_token_id": EOS,
        "bos_token_id": 0, "tie_word_embeddings": False, "initializer_range": 0.3,
    }  # fmt: skip
    if kind == "qwen3":
        sizes["head_dim"] = 16  # not hidden_size / heads
    if kind == "smollm3":
        sizes["pad_token_id"] = None  # its own is outside of this vocabulary
    sizes.update(overrides)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # transformers starts gains at 1 and biases at 0, which would hide a gain or bias that is not applied.
            if name.endswith(("norm.weight", "bias")):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory) -> Callable[..., Path]:
    """make_checkpoint(kind, seed=0, **config) -> folder."""
    made: dict[str, Path] = {}

    def make(kind: str = "qwen3", seed: int = 0, **overrides) -> Path:
        key = json.dumps([kind, seed, overrides], sort_keys=True)
        if key not in made:
            made[key] = tmp_path_factory.mktemp(kind)
            build_model(kind, seed, **overrides).save_pretrained(made[key])
        return made[key]

    return make


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory) -> Path:
    """A checkpoint with a tokenizer, whose token 12 is the word "w12"."""
    folder = tmp_path_factory.mktemp("text")
    build_model("qwen3").save_pretrained(folder)
    tokenizer = Tokenizer(WordLevel({f"w{index}": index for index in range(VOCAB_SIZE)}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="session")
def make_model() -> Callable[..., PreTrainedModel]:
    return build_model


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Deterministic mode needs it, and two workers on two cores are slower with more."""
    torch.set_num_threads(1)


@pytest.fixture
def post(server) -> Callable[..., httpx.Response]:
    """post(path, body) to the server of the test's module; a body of bytes is sent as it is."""

    def send(path, body=None, method="POST"):
        content = body if isinstance(body, bytes) else json.dumps(body).encode() if body is not None else None
        return httpx.request(method, server.url + path, content=content, timeout=60, trust_env=False)

    return send
