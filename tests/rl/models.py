"""Tiny models and their trainers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from nanodag.config.kinds.rl import RLStage
from nanodag.tokenizer.bpe import save_tokenizer
from nanodag.tokenizer.layout import SPECIAL_TOKENS


def save_tiny_model(
    folder: Path,
    *,
    vocabulary: int = 32,
    seed: int = 0,
    tied: bool = False,
    num_layers: int = 2,
    bias: bool = False,
    head_dim: int = 8,
) -> Path:
    """A Qwen3 with random weights that make its choices clear, and a tokenizer of single bytes."""
    torch.manual_seed(seed)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": num_layers,
        "max_position_embeddings": 128,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": head_dim, "attention_bias": bias}
    config = Qwen3Config(vocab_size=vocabulary, tie_word_embeddings=tied, initializer_range=0.3, **sizes, **heads)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    save_tokenizer({bytes([value]): value for value in range(min(256, vocabulary - len(SPECIAL_TOKENS)))}, folder)
    return folder


def trainer_of(model: Path, *, beside: Mapping[str, Path] | None = None, **values: Any) -> Any:
    """A trainer of one rank; in a process of its own, as it imports DeepSpeed."""
    from nanodag.rl.trainer.trainer import Trainer

    base = {"kind": "rl", "data": ["file:x"], "learning_rate": 1e-3, "micro_batch_tokens": 4096}
    return Trainer(RLStage.of(**(base | values)), model, device="cpu", beside=beside)


def weights_of(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.engine.weights()}


def furthest(found: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max((tensor - other[name].detach()).abs().max().item() for name, tensor in found.items())


def all_files(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
