"""Tiny random models of 24 types by transformers: two layers of each kind or more, windows shorter than a row."""

from pathlib import Path
from typing import Any

import torch

_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ROUTED = {**_EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "topk_group": 1, "first_k_dense_replace": 2}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_WINDOWED = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
_LINEAR = {f"linear_{name}": size for name, size in
           {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 8, "value_head_dim": 8}.items()}  # fmt: skip
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
_NO_HEADS = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "max_position_embeddings")

TYPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 8},
    "ministral": _WINDOWED,
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {**_EXPERTS, "num_experts": 4},
    "qwen3_next": {
        **_EXPERTS, **_LINEAR, "num_experts": 4, "shared_expert_intermediate_size": 32,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "gemma2": {"sliding_window": 8, "query_pre_attn_scalar": 8, "final_logit_softcapping": 2.0},
    "gemma3_text": {**_WINDOWED, "query_pre_attn_scalar": 8},
    "phi3": {"sliding_window": 8},
    "phimoe": {**_LOCAL, "sliding_window": 8},
    "mixtral": _LOCAL,
    "deepseek_v3": {**_ROUTED, **_LATENT, "n_group": 2, "num_key_value_heads": 4, "head_dim": None},
    "glm4": {},
    "glm4_moe": {**_ROUTED, "n_group": 1},
    "olmo2": {},
    "olmo3": _WINDOWED,
    "smollm3": {},
    "gpt_oss": {**_LOCAL, **_WINDOWED, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "llama4_text": {
        "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 64, "attention_chunk_size": 8,
        "interleave_moe_layer_step": 2, "no_rope_layers": [1, 0, 1, 0],
    },
    "granite": {
        "logits_scaling": 8.0, "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1
    },
    "falcon_h1": {
        "mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 16,
        "lm_head_multiplier": 0.5,
    },
    "mamba2": {
        "num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 16, "expand": 2,
        **dict.fromkeys(_NO_HEADS),
    },
    "gpt2": {
        "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 128, "hidden_size": None, "num_hidden_layers": None,
        "head_dim": None, **dict.fromkeys(_NO_HEADS),
    },
}  # fmt: skip


def make_tiny(name: str, folder: Path, *, vocab_size: int = 96, seed: int = 0, **settings: Any) -> Any:
    """Write a tiny model of a type into a folder; returns transformers' own."""
    from transformers import AutoConfig, AutoModelForCausalLM

    base = {
        "vocab_size": vocab_size, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 64, "head_dim": 8, "max_position_embeddings": 128,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, **TYPES.get(name, {}), **settings,
    }  # fmt: skip
    config = AutoConfig.for_model(name, **{key: value for key, value in base.items() if value is not None})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return model


def taken_by_transformers(folder: Path) -> None:
    """State in a folder that transformers computes its model, as an import does."""
    from nanodag.model.architecture import MODEL_CODE, read_json, write_json

    path = folder / "config.json"
    write_json(path, {**read_json(path), MODEL_CODE: "transformers"})
