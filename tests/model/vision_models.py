"""Tiny vision-language models of Qwen's two types, with tokenizer, chat template and processor of images."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from nanodag.data.adapters import open_adapter
from nanodag.data.picture_problems import count_shapes
from nanodag.host.images import digests_in, opened
from nanodag.tokenizer.bpe import save_tokenizer
from tests.model.model_types import taken_by_transformers

KINDS = ("qwen2_5_vl", "qwen3_vl")
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\
{% elif m.content is string %}{{ m.content }}<|im_end|>{% else %}{% for c in m.content %}{% if c.type == 'image' %}\
<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c.text }}{% endif %}{% endfor %}<|im_end|>{% endif %}
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def write_processor(folder: Path, template: str = TEMPLATE) -> Any:
    """Write tokenizer, chat template and the processor of images into a folder; returns the tokenizer."""
    from transformers import PreTrainedTokenizerFast
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    save_tokenizer({bytes([value]): value for value in range(256)}, folder)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL), "eos_token": "<|im_end|>"})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    sizes = {"shortest_edge": 256, "longest_edge": 128 * 128}
    Qwen2VLImageProcessorPil(patch_size=8, merge_size=2, size=sizes).save_pretrained(folder)
    return tokenizer


def make_vision(kind: str, folder: Path, *, width: int = 32, layers: int = 2, seed: int = 0, noise: float = 0.1) -> Any:
    """Write a tiny model into a folder, 16 tokens for a picture of 64 x 64; returns transformers' own."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    tokenizer = write_processor(folder)
    ids = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("image_pad", "video_pad")}
    text = {
        "vocab_size": len(tokenizer), "hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": width // 2, "max_position_embeddings": 128,
        "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": _thirds(width // 4)},
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": width, "intermediate_size": 2 * width, "num_heads": 2, "out_hidden_size": width,
        "patch_size": 8, "spatial_merge_size": 2, "window_size": 32, "fullatt_block_indexes": [1],
        "num_position_embeddings": 64, "deepstack_visual_indexes": [0],
    }  # fmt: skip
    config = AutoConfig.for_model(
        kind, text_config=text, vision_config=vision, tie_word_embeddings=True,
        image_token_id=ids["image_pad"], video_token_id=ids["video_pad"],
    )  # fmt: skip
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * noise)
    model.save_pretrained(folder)
    taken_by_transformers(folder)
    return model


def _thirds(size: int) -> list[int]:
    return [size - 2 * (size // 3), size // 3, size // 3]


def conversation(index: int, *, seed: int = 0) -> dict[str, Any]:
    """A picture, how many squares of a colour it has, and the answer; the picture is kept."""
    row = count_shapes(seed=seed)[index]
    return open_adapter("problem", "python:nanodag.data.picture_problems:count_shapes", "conversation", {})(0, row)


def seen(ids: torch.Tensor, model: Any, folder: Path) -> Mapping[str, torch.Tensor]:
    """(1, T) ids that spell images, as transformers' own model takes them."""
    from transformers import AutoImageProcessor

    is_image = (ids >= 1 << 30).int()
    if not is_image.any():
        return {"input_ids": ids}
    words = ids.masked_fill(is_image.bool(), model.config.image_token_id)
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    images = [opened(digest) for _, _, digest in digests_in(ids[0].numpy())]
    return {"input_ids": words, "mm_token_type_ids": is_image, **processor(images=images, return_tensors="pt")}
