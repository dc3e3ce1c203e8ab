"""A mirror of all data sets and models that the shipped presets name, with a handful of rows of our own making."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from nanodag.config.derive import BUNDLE
from nanodag.tokenizer.bpe import save_tokenizer, train_bpe
from tests.core_bundle import write_archive

NUM_ROWS = 40
SYLLABLES = [consonant + vowel for consonant in "bcdfghjklmnprstvwz" for vowel in "aeiou"]
WORDS = ["".join(random.Random(n).choices(SYLLABLES, k=2 + n % 2)) for n in range(600)]

Row = dict[str, Any]


def _prose(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(num_words)).capitalize() + "."


def _document(rng: random.Random) -> Row:
    return {"text": _prose(rng, 60)}


def _gsm8k(rng: random.Random) -> Row:
    a, b = rng.randrange(1, 50), rng.randrange(1, 50)
    question = f"Ann has {a} apples and picks {b}. How many has she?"
    return {"question": question, "answer": f"{a}+{b}=<<{a}+{b}={a + b}>>{a + b} apples.\n#### {a + b}"}


def _mmlu(rng: random.Random) -> Row:
    choices = [_prose(rng, 2) for _ in range(4)]
    return {"subject": "anatomy", "question": _prose(rng, 8), "choices": choices, "answer": rng.randrange(4)}


def _arc(rng: random.Random) -> Row:
    choices = {"text": [_prose(rng, 2) for _ in range(4)], "label": list("ABCD")}
    return {"id": str(rng.random()), "question": _prose(rng, 8), "choices": choices, "answerKey": rng.choice("ABCD")}


def _piqa(rng: random.Random) -> Row:
    return {"goal": _prose(rng, 6), "sol1": _prose(rng, 4), "sol2": _prose(rng, 4), "label": rng.randrange(2)}


def _winogrande(rng: random.Random) -> Row:
    sentence = f"{_prose(rng, 5)} Then _ went home."
    return {"sentence": sentence, "option1": "Ann", "option2": "Bob", "answer": rng.choice("12")}


def _humaneval(rng: random.Random) -> Row:
    name, number = f"add_{rng.randrange(10**6)}", rng.randrange(9)
    return {
        "task_id": name,
        "prompt": f'def {name}(n):\n    """n and {number}."""\n',
        "canonical_solution": f"    return n + {number}\n",
        "test": f"def check(candidate):\n    assert candidate(2) == {2 + number}\n",
        "entry_point": name,
    }


def _smoltalk(rng: random.Random) -> Row:
    turns = [("user", _prose(rng, 8)), ("assistant", _prose(rng, 12))]
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


TABLES: dict[str, Callable[[random.Random], Row]] = {
    "karpathy/climbmix-400b-shuffle/default/train": _document,
    "wikimedia/wikipedia/20231101.en/train": _document,
    "crumb/openstax-text/default/train": _document,
    "HuggingFaceTB/smol-smoltalk/default/train": _smoltalk,
    "openai/gsm8k/main/train": _gsm8k,
    "openai/gsm8k/main/test": _gsm8k,
    **{f"cais/mmlu/{name}": _mmlu for name in ("auxiliary_train/train", "all/test", "all/dev")},
    **{f"allenai/ai2_arc/ARC-{name}": _arc for name in ("Easy/train", "Easy/validation")},
    **{f"allenai/ai2_arc/ARC-{name}": _arc for name in ("Challenge/train", "Challenge/validation")},
    "baber/piqa/default/validation": _piqa,
    "openai/openai_humaneval/openai_humaneval/test": _humaneval,
    "allenai/winogrande/winogrande_xl/validation": _winogrande,
}


def write_mirror(folder: Path) -> None:
    """Write every table, CORE's bundle, and a model, as Qwen2.5-0.5B-Instruct and as SmolLM2-135M-Instruct."""
    for number, (name, make) in enumerate(TABLES.items()):
        rng = random.Random(number)
        path = folder / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        table = pyarrow.Table.from_pylist([make(rng) for _ in range(NUM_ROWS)])
        pyarrow.parquet.write_table(table, path, row_group_size=NUM_ROWS // 2)  # the last group stands for a last shard
    write_archive(folder / BUNDLE.removeprefix("https://"))
    _write_model(folder / "Qwen" / "Qwen2.5-0.5B-Instruct")
    other = folder / "HuggingFaceTB" / "SmolLM2-135M-Instruct"
    other.parent.mkdir(exist_ok=True)
    other.symlink_to(folder / "Qwen" / "Qwen2.5-0.5B-Instruct")


def _write_model(folder: Path) -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    rng = random.Random(0)
    texts = [_prose(rng, 50) for _ in range(50)] + [str(_gsm8k(rng)) for _ in range(50)]
    texts += ["".join(map(chr, range(32, 127))), *(f"{rng.randrange(10**6)} {rng.random()}" for _ in range(500))]
    folder.mkdir(parents=True)
    save_tokenizer(train_bpe(iter(texts), 560), folder)
    torch.manual_seed(0)
    shape = {"vocab_size": 560, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    Qwen2ForCausalLM(Qwen2Config(**shape, tie_word_embeddings=True)).save_pretrained(folder)
