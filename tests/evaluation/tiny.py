"""Tiny random models on disk, with a tokenizer and chat template of ours."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from nanodag.tokenizer.bpe import save_tokenizer, train_bpe

VOCABULARY = 280
POSITIONS = 192
CLASSES = {"qwen3": (Qwen3Config, Qwen3ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}


def save_tiny_model(folder: Path, kind: str, *, seed: int = 0) -> None:
    """Random weights large enough that choices differ clearly."""
    config_class, model_class = CLASSES[kind]
    torch.manual_seed(seed)
    config = config_class(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, intermediate_size=48, max_position_embeddings=POSITIONS, initializer_range=0.4,
    )  # fmt: skip
    model_class(config).save_pretrained(folder)
    save_tokenizer(train_bpe(iter(["the cat sat on the mat and the dog ran after the cat"] * 4), VOCABULARY), folder)
