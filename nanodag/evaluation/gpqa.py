"""GPQA as lm-eval puts it, with its choices in a fixed order where lm-eval's is drawn anew in each process."""

from typing import TYPE_CHECKING, Any

from nanodag.data.adapter_entries import gpqa_choice

if TYPE_CHECKING:
    from datasets import Dataset


def with_choices(rows: "Dataset") -> "Dataset":
    """The rows with choice1 to choice4 and `answer`, the right one's letter in brackets."""
    return rows.map(_with_choices)


def _with_choices(row: dict[str, Any]) -> dict[str, Any]:
    _, choices, right, _ = gpqa_choice(row)
    return {**{f"choice{n}": choice for n, choice in enumerate(choices, start=1)}, "answer": f"({'ABCD'[right]})"}
