"""The stages of a small pipeline."""

STAGES = {
    "tokenizer": {"kind": "tokenizer", "data": ["file:/x.txt"], "vocabulary": 512},
    "base": {"kind": "pretrain", "inputs": {"tokenizer": "tokenizer"}, "data": ["file:text.txt"], "shape": {"depth": 2},
             "sequence_length": 8, "batch_tokens": 64},
    "rl": {"kind": "rl", "inputs": {"model": "base"}, "data": ["file:/p.jsonl"]},
}  # fmt: skip
