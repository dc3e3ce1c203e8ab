"""Short texts of four kinds, on which every tokenizer's bytes per token are reported."""

from pathlib import Path

NAMES = ("english", "code", "mathematics", "other_language")
SAMPLES = {n: (Path(__file__).with_name("sample_texts") / f"{n}.txt").read_text(encoding="utf-8") for n in NAMES}
