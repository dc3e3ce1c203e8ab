"""Tokenizers of Qwen and Llama, made of what packages carry: dashscope (Qwen's vocabulary), llama-models (Llama 3's)
and TRL (chat templates). NANODAG_TOKENIZERS names the folder that they lie in:

    pip install --no-deps --target FOLDER dashscope==2.0.2 llama-models==0.3.0 trl==1.16.0
"""

import base64
import json
import os
from functools import cache
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, normalizers
from transformers.convert_slow_tokenizer import TikTokenConverter

# Qwen3's, from id 151643 on; False: a mark that is a token of its own, but no special one
_BOXES = (f"<|{name}_{side}|>" for name in ("object_ref", "box", "quad", "vision") for side in ("start", "end"))
_PADS = ("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
_FILLS = (f"<|fim_{name}|>" for name in ("prefix", "middle", "suffix", "pad"))
_QWEN = {
    **dict.fromkeys(("<|endoftext|>", "<|im_start|>", "<|im_end|>", *_BOXES, *_PADS), True),
    **dict.fromkeys(("<tool_call>", "</tool_call>", *_FILLS, "<|repo_name|>", "<|file_sep|>"), False),
    **dict.fromkeys(("<tool_response>", "</tool_response>", "<think>", "</think>"), False),
}
_QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA = [
    "begin_of_text", "end_of_text", "reserved_special_token_0", "reserved_special_token_1", "finetune_right_pad_id",
    "reserved_special_token_2", "start_header_id", "end_header_id", "eom_id", "eot_id", "python_tag",
]  # fmt: skip


class _Ranks(TikTokenConverter):
    @staticmethod
    def load_tiktoken_bpe(path: str) -> dict[bytes, int]:
        pairs = (line.split() for line in Path(path).read_bytes().splitlines() if line)
        return {base64.b64decode(token): int(rank) for token, rank in pairs}


def packages() -> Path:
    """The folder of the packages. Without one the test is skipped, but fails where NANODAG_CI is set."""
    folder = Path(os.environ.get("NANODAG_TOKENIZERS", ""))
    if not (folder / "trl" / "chat_templates").is_dir():
        missing = "NANODAG_TOKENIZERS names no folder with dashscope, llama-models and trl"
        (pytest.fail if os.environ.get("NANODAG_CI") else pytest.skip)(missing)
    return folder


def chat_template(name: str) -> str:
    return (packages() / "trl" / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


@cache
def qwen() -> Tokenizer:
    """Qwen3's: 151,669 tokens."""
    made = _Ranks(str(packages() / "dashscope" / "resources" / "qwen.tiktoken"), pattern=_QWEN_WORDS).converted()
    made.normalizer = normalizers.NFC()
    made.add_tokens([AddedToken(name, normalized=False, special=is_one) for name, is_one in _QWEN.items()])
    return made


@cache
def llama() -> Tokenizer:
    """Llama 3.1's: 128,256 tokens."""
    made = _Ranks(str(packages() / "llama_models" / "llama3" / "tokenizer.model")).converted()
    names = [*_LLAMA, *(f"reserved_special_token_{number}" for number in range(3, 248))]
    made.add_special_tokens([AddedToken(f"<|{name}|>", normalized=False, special=True) for name in names])
    return made


def save(made: Tokenizer, template: str, folder: Path, *, bos: str, eos: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": eos}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    return folder
