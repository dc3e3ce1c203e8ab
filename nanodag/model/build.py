"""Makes, reads and writes models as plain Hugging Face directories."""

import json
import math
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from nanodag.config.dial import Shape
from nanodag.errors import ConfigError
from nanodag.model.architecture import Architecture, Rope, read_checkpoint
from nanodag.model.decoder import Decoder
from nanodag.store.atomic import write_json

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def qwen3_architecture(shape: Shape, *, vocabulary: int, rope_theta: float, max_positions: int) -> Architecture:
    """What a Shape of the dial is as a Qwen3-type model."""
    unused = {"factor": 1.0, "low_freq_factor": 0.0, "high_freq_factor": 0.0, "original_positions": 0}
    rope = Rope(theta=rope_theta, kind="default", **unused)  # type: ignore[arg-type]
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
        rope=rope,
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


def load(folder: Path, *, compiled: bool = False, activation_checkpointing: bool = False) -> Decoder:
    """The model in a Hugging Face directory, in float32 on CPU.

    Raises ConfigError when its architecture is not built here or a tensor is missing, unknown or of another shape.
    """
    architecture = read_checkpoint(folder).architecture
    model = Decoder(architecture, compiled=compiled, activation_checkpointing=activation_checkpointing)
    wanted = dict(model.named_parameters())
    found = set()
    for path in _weight_files(folder):
        with safe_open(str(path), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                if name == "lm_head.weight" and architecture.tied:
                    continue
                if name not in wanted:
                    raise ConfigError(f"{path} holds {name}, which a {architecture.model_type} model does not have.")
                tensor = file.get_tensor(name)
                if tensor.shape != wanted[name].shape:
                    raise ConfigError(
                        f"{name} in {path} has shape {tuple(tensor.shape)}; "
                        f"config.json says {tuple(wanted[name].shape)}."
                    )
                wanted[name].data.copy_(tensor)
                found.add(name)
    if missing := sorted(set(wanted) - found):
        raise ConfigError(f"{folder} lacks {len(missing)} tensors, the first is {missing[0]}.")
    return model


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    single = folder / "model.safetensors"
    if not single.is_file():
        raise ConfigError(f"{folder} holds neither model.safetensors nor {index.name}; older formats are not read.")
    return [single]


def save(
    folder: Path, weights: dict[str, Tensor], *, tokenizer: Path, source: Path | None = None, architecture: Architecture
) -> None:
    """Write a Hugging Face directory that transformers, SGLang and vLLM load as it is.

    weights: by name, whole, on CPU; a tied head may be among them and is left out. tokenizer: a folder whose tokenizer
    files are copied. source: the folder whose config.json is kept but for the dtype; without it one is written for
    the architecture.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kept = {n: t.contiguous() for n, t in weights.items() if not (n == "lm_head.weight" and architecture.tied)}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    for name in TOKENIZER_FILES:
        if (tokenizer / name).is_file():
            shutil.copyfile(tokenizer / name, folder / name)
    dtype = DTYPE_NAMES[next(iter(kept.values())).dtype]
    if source is not None:
        config = json.loads((source / "config.json").read_text())
        config.pop("torch_dtype", None)
        config["dtype"] = dtype
    else:
        config = _qwen3_config(architecture, dtype)
    generation = _read(folder / "generation_config.json")
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if name in generation and source is None:
            config[name] = generation[name]
    write_json(folder / "config.json", config)


def _read(path: Path) -> dict[str, object]:
    return json.loads(path.read_text()) if path.is_file() else {}


def _qwen3_config(of: Architecture, dtype: str) -> dict[str, object]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": dtype,
        "head_dim": of.head_dim,
        "hidden_act": "silu",
        "hidden_size": of.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": of.intermediate_size,
        "layer_types": ["full_attention"] * of.num_layers,
        "max_position_embeddings": of.max_positions,
        "max_window_layers": of.num_layers,
        "model_type": "qwen3",
        "num_attention_heads": of.num_heads,
        "num_hidden_layers": of.num_layers,
        "num_key_value_heads": of.num_kv_heads,
        "rms_norm_eps": of.norm_eps,
        "rope_parameters": {"rope_theta": of.rope.theta, "rope_type": "default"},
        "sliding_window": None,
        "tie_word_embeddings": of.tied,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": of.vocab_size,
    }
