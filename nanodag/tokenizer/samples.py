"""Short texts of four kinds, on which every tokenizer's bytes per token are reported."""

from pathlib import Path

import yaml

SAMPLES: dict[str, str] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
