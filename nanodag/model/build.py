"""Makes models of a size: architecture, first weights, and the config.json that says what they are."""

import math

import torch
from torch import nn

from nanodag.config.dial import Shape
from nanodag.host.beside import table_beside
from nanodag.model.architecture import Architecture, Rope
from nanodag.model.decoder import Decoder


def qwen3_architecture(shape: Shape, *, vocabulary: int, rope_theta: float, max_positions: int) -> Architecture:
    """Architecture of a Qwen3-type model with a Shape of the dial."""
    return Architecture(
        model_type="qwen3",
        vocab_size=vocabulary,
        hidden_size=shape.width,
        num_layers=shape.depth,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_width,
        intermediate_size=shape.mlp_width,
        norm_eps=1e-6,
        tied=shape.tied_embeddings,
        qk_norm=True,
        rope=Rope(theta=rope_theta),
        max_positions=max_positions,
    )


@torch.no_grad()
def initialise(model: Decoder, seed: int) -> None:
    """Random weights, the same for a seed whatever the machine's number of threads.

    1. Matrices: normal, standard deviation 1 / sqrt(inputs), which keeps the size of what passes through.
    2. Output projections of attention and MLP: 0, so that every layer starts as the identity.
    3. Embedding: normal, standard deviation 1 without tying (each layer reads it through a norm, so only its ratio to
       what layers add matters); 0.02 with tying, because a token's first logit for itself is deviation times width.
    4. Head of its own: 0.001. Norms 1, biases 0.

    Source: 1 to 4 as karpathy/nanochat nanochat/gpt.py, but for the tied case, which it does not have.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith(("norm.weight", "layernorm.weight")):
            nn.init.ones_(parameter)
        elif name.endswith("bias") or name.endswith(("o_proj.weight", "down_proj.weight")):
            nn.init.zeros_(parameter)
        elif "embed" in name:
            parameter.normal_(0.0, 0.02 if model.architecture.tied else 1.0, generator=generator)
        elif "lm_head" in name:
            parameter.normal_(0.0, 0.001, generator=generator)
        else:
            parameter.normal_(0.0, 1 / math.sqrt(parameter.shape[1]), generator=generator)


_QWEN3 = table_beside(__file__, "qwen3.yaml")


def qwen3_config(of: Architecture) -> dict[str, object]:
    """The config.json of a Qwen3-type model, but for the dtype and the tokenizer's ids."""
    return {
        **_QWEN3,
        "attention_bias": of.output_bias,
        "head_dim": of.head_dim,
        "hidden_size": of.hidden_size,
        "intermediate_size": of.intermediate_size,
        "layer_types": ["full_attention"] * of.num_layers,
        "max_position_embeddings": of.max_positions,
        "max_window_layers": of.num_layers,
        "num_attention_heads": of.num_heads,
        "num_hidden_layers": of.num_layers,
        "num_key_value_heads": of.num_kv_heads,
        "rms_norm_eps": of.norm_eps,
        "rope_parameters": {"rope_theta": of.rope.theta, "rope_type": "default"},
        "tie_word_embeddings": of.tied,
        "vocab_size": of.vocab_size,
    }
