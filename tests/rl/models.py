"""Tiny models and rollouts for the tests of this folder."""

from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from nanodag.rl.rollouts.rollout import Rollout, prompt_span, sampled_span
from nanodag.tokenizer.bpe import save_tokenizer
from nanodag.tokenizer.layout import SPECIAL_TOKENS


def save_tiny_model(
    folder: Path, *, vocabulary: int = 32, seed: int = 0, tied: bool = False, num_layers: int = 2, bias: bool = False
) -> Path:
    """A Qwen3 with random weights that make its choices clear, and a tokenizer of single bytes."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        initializer_range=0.3,
        tie_word_embeddings=tied,
        attention_bias=bias,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    save_tokenizer({bytes([value]): value for value in range(min(256, vocabulary - len(SPECIAL_TOKENS)))}, folder)
    return folder


def rollout(
    group: str, sample: int, prompt: list[int], response: list[int], *, reward: float, logprob: float = -2.0
) -> Rollout:
    """One rollout of one sampled span."""
    return Rollout(
        group_id=group,
        prompt_id=group,
        sample_index=sample,
        spans=(prompt_span(prompt), sampled_span(response, [logprob] * len(response), version=0)),
        finish_reason="stop",
        reward=reward,
    )
