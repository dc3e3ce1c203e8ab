"""How much of CORE is read: items, and text with the worked examples, of each task.

Counted on the first 100 questions of each task's file. hellaswag, coqa and squad were files made like the bundle's; of
squad the items are those of SQuAD 1.1's development set.
"""

from nanodag.data.core_tasks import TASKS
from nanodag.plan.sizes import bytes_per_token

CORE_CONTEXT = 1000
"""Tokens of a question with its worked examples, as the average token has them: what attention is counted for."""
SIZES: dict[str, tuple[int, int]] = {
    "hellaswag_zeroshot": (10_042, 777),
    "jeopardy": (2117, 1330),
    "bigbench_qa_wikidata": (20_321, 515),
    "arc_easy": (2376, 1754),
    "arc_challenge": (1172, 2016),
    "copa": (100, 97),
    "commonsense_qa": (1221, 1649),
    "piqa": (1838, 1664),
    "openbook_qa": (500, 120),
    "lambada_openai": (5153, 324),
    "hellaswag": (10_042, 4_529),
    "winograd": (273, 186),
    "winogrande": (1267, 209),
    "bigbench_dyck_languages": (1000, 1777),
    "agi_eval_lsat_ar": (230, 3537),
    "bigbench_cs_algorithms": (1320, 1570),
    "bigbench_operators": (210, 1463),
    "bigbench_repeat_copy_logic": (32, 2042),
    "squad": (10_570, 9_916),
    "coqa": (7983, 2306),
    "boolq": (3270, 7264),
    "bigbench_language_identification": (10_000, 3_636),
}
"""Label of a task: items, and bytes of a question with all of its answers, as they are scored."""


def core_items(limit: int) -> int:
    """Items of all tasks, at most `limit` of each; 0 for all."""
    return sum(_items(task.label, limit) for task in TASKS)


def core_tokens(limit: int, vocabulary: int) -> float:
    """Tokens that go through the model for one CORE on so many items a task."""
    return sum(_items(task.label, limit) * SIZES[task.label][1] for task in TASKS) / bytes_per_token(vocabulary)


def _items(label: str, limit: int) -> int:
    return min(SIZES[label][0], limit) if limit else SIZES[label][0]
