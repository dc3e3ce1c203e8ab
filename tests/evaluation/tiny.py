"""Tiny random models on disk, with a tokenizer and chat template of ours."""

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from nanodag.config.kinds.evaluation import EvalSamplerConfig, EvalStage
from nanodag.tokenizer.bpe import save_tokenizer, train_bpe

VOCABULARY = 280
ONE_EMBEDDED = EvalSamplerConfig(engine="embedded", replicas=1, max_batch=64, cache_bytes=2 << 30)
POSITIONS = 192
CLASSES = {"qwen3": (Qwen3Config, Qwen3ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}


def save_tiny_model(folder: Path, kind: str, *, seed: int = 0, head_dim: int = 8) -> None:
    """Random weights large enough that choices differ clearly."""
    config_class, model_class = CLASSES[kind]
    torch.manual_seed(seed)
    config = config_class(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=head_dim, intermediate_size=48, max_position_embeddings=POSITIONS, initializer_range=0.4,
    )  # fmt: skip
    model_class(config).save_pretrained(folder)
    save_tokenizer(train_bpe(iter(["the cat sat on the mat and the dog ran after the cat"] * 4), VOCABULARY), folder)


def asked_by(**settings: Any) -> EvalStage:
    """An eval stage on a CPU, derived: its model in float32, one embedded sampler unless another is given."""
    fixed = {"precision": "fp32", "micro_batch_tokens": 1024, "sampler": ONE_EMBEDDED, "device": "cpu", "threads": 1}
    return EvalStage.of(kind="eval", benchmarks=[{"name": "gsm8k"}], **{**fixed, **settings})
