"""A pipeline of fake stages (tests/fakes): real processes, real store, no training."""

from pathlib import Path

FAKES = Path(__file__).parent / "fakes"
SOURCE = "file:text.txt"
TRAINED = {"data": [SOURCE], "sequence_length": 8, "batch_tokens": 64}
STAGES = {
    "tokenizer": {"kind": "tokenizer", "data": [SOURCE], "vocabulary": 512},
    "pretrain": {
        **{"kind": "pretrain", "inputs": {"tokenizer": "tokenizer"}, "shape": {"depth": 1}, "horizon_tokens": 64},
        **TRAINED,
    },
    "eval_base": {"kind": "eval", "inputs": {"model": "pretrain"}, "benchmarks": [{"name": "x"}]},
    "sft": {"kind": "sft", "inputs": {"model": "pretrain"}, **TRAINED},
    "eval_sft": {"kind": "eval", "inputs": {"model": "sft"}, "benchmarks": [{"name": "x"}]},
    "report": {"kind": "report", "inputs": ["pretrain", "sft", "eval_base", "eval_sft"]},
}
NO_TRACKERS = {"trackers": []}  # TensorBoard would be half of what a fake stage takes
