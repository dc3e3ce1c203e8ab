"""Every adapter that makes prompts, joined with the reward that it names: row, record, prompt, reward."""

import json

from nanodag import registry as entries
from nanodag.data.adapter_entries import ENTRIES
from nanodag.data.config import SourceConfig
from nanodag.data.mixture import Mixture
from nanodag.rl.rollouts.prompts import PolicyFormat, PromptCursor
from tests.data.rows import IFEVAL, gpqa, mbpp
from tests.rewards.pools import Pool

CHOICES = {"text": ["up", "down", "round"], "label": ["A", "B", "C"]}
HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": "from math import gcd\n\n\ndef lowest(a: int, b: int) -> list:\n    '''Lowest terms.'''\n",
    "canonical_solution": "    shared = gcd(a, b)\n    return [a // shared, b // shared]\n",
    "test": """

METADATA = {}


def check(candidate):
    import random
    assert candidate(2, 4) == [1, 2], "This prints if it fails"
    for n in range(9):
        m = random.randint(1, 9)
        assert candidate(n * m, m) == [n, 1]
    assert True
""",
    "entry_point": "lowest",
}
CHAIN_SUM = {
    "question": "State the final answer: 4 + 3 =",
    "answer": "7",
    "metadata": {"source_dataset": "chain_sum", "source_index": 0, "expression": "4 + 3"},
}
IFEVAL_ROW = {"key": 1, "prompt": "Write without commas, in 3 words or more.", **IFEVAL}
MBPP = mbpp("add", "+")
SANITIZED = {"prompt": "The sum.", "code": MBPP["code"], "test_list": MBPP["test_list"], "test_imports": []}
TESTS = {"tests": ["assert double(2) == 4", "assert double(-1) == -2"]}


def fenced(program: str) -> str:
    return f"It is\n```python\n{program}```\n"


# adapter, row, right answer, wrong answer; where these are empty, the letter is drawn: see right_and_wrong
CASES = [
    ("prompt", {"prompt": "2 + 2?", "answer": 4}, "4", "5"),
    ("prompt", {"messages": [{"role": "user", "content": "Who?"}], "answer": "Ada", "reward": "f1"}, "Ada", "Bo"),
    ("prompt", {"prompt": "Double it.", "answer": "", "reward": "code", "metadata": TESTS},
     fenced("def double(n): return 2 * n\n"), fenced("def double(n): return 4\n")),
    ("problem", {"question": "2 + 2?", "answer": 4}, "4", "22"),
    ("problem", {"question": "2 + 2?", "answer": "4", "reward": "gsm8k"}, "#### 4", "4"),
    ("gsm8k", {"question": "How many?", "answer": "48/2 = <<48/2=24>>24\n#### 1,072"}, "So #### 1072", "#### 24"),
    ("math",
     {"problem": "Half of $x$?", "solution": "It is $\\boxed{\\frac{x}{2}}$.", "answer": "\\frac{x}{2}", "level": 1},
     "\\boxed{x/2}", "\\boxed{2x}"),
    ("reasoning_gym", CHAIN_SUM, "<answer>7</answer>", "<answer>8</answer>"),
    ("mmlu", {"question": "2 + 2?", "choices": ["3", "4"], "answer": 1, "subject": "sums"}, "B", "A"),
    ("multiple_choice", {"question": "2 + 2?", "choices": ["4", "3"], "answer": 0}, "The answer is A.", "B"),
    ("arc", {"id": "1", "question": "Where?", "choices": CHOICES, "answerKey": "C"}, "C", "A"),
    ("arc", {"id": "1", "question_stem": "Where?", "choices": CHOICES, "answerKey": "B"}, "B. down", "C. round"),
    ("sciq",
     {"question": "Where?", "correct_answer": "up", "distractor1": "a", "distractor2": "b", "distractor3": "c",
      "support": "It rises."}, "", ""),
    ("piqa", {"goal": "Open it", "sol1": "push", "sol2": "pull", "label": 1}, "B", "A"),
    ("winogrande", {"sentence": "_ ran.", "option1": "Ada", "option2": "Bo", "answer": "1"}, "A", "B"),
    ("boolq", {"question": "is it so", "passage": "It is.", "answer": True}, "B", "A"),
    ("hellaswag", {"ctx": "He opens it", "endings": ["and goes", "and comes"], "label": "0"}, "A", "B"),
    ("ifeval", IFEVAL_ROW, "Not a comma here.", "Here, one comma."),
    ("ifeval", IFEVAL_ROW | {"kwargs": json.dumps(IFEVAL["kwargs"])}, "Not a comma here.", "Too few."),
    ("humaneval", HUMANEVAL,
     fenced("def lowest(a, b):\n    shared = gcd(a, b)\n    return [a // shared, b // shared]\n"),
     fenced("def lowest(a, b):\n    return [1, 2]\n")),
    ("mbpp", MBPP, fenced(MBPP["code"] + "\n"), fenced("def add(a, b):\n    return 1\n")),
    ("mbpp", SANITIZED | {"test": "for n in range(3):\n    assert add(n, 9) == n + 9"}, fenced(MBPP["code"] + "\n"),
     fenced("def add(a, b):\n    return 1\n")),
    ("gpqa", gpqa("Where?"), "", ""),
    ("aime", {"ID": "2024-I-1", "Problem": "Half of 408?", "Answer": 204}, "It is $\\boxed{204}$.", "\\boxed{205}"),
    ("aime", {"Question": "Half of 50?", "Answer": "025"}, "\\boxed{25}", "\\boxed{26}"),
    ("bbh", {"input": "not True is", "target": "False"}, "So the answer is False.", "True"),
    ("bbh", {"input": "Who? (A) Ada (B) Bo", "target": "(B)"}, "The answer is (B).", "(A)"),
    ("simpleqa", {"problem": "Who drew it?", "answer": "The Ada Group"}, "Answer: Ada Group.", "Bo"),
]  # fmt: skip


class Renderer:
    """A prompt is its characters."""

    def prompt(self, messages, switches, *, tools) -> list[int]:
        return [ord(character) for message in messages for character in message["content"]]


def drawn(source: SourceConfig, count: int, mirror=None) -> list:
    """Prompts as the RL stage draws them."""
    mixture = Mixture([source], kind="prompt", seed=0, repeat=True, shuffle=False, mirror=mirror)
    return PromptCursor(mixture, PolicyFormat(Renderer(), {}, ()), longest=100_000).take(count)


def right_and_wrong(case, record) -> tuple[str, str]:
    adapter, _, right, wrong = case
    if adapter not in ("sciq", "gpqa"):
        return right, wrong
    return record["answer"], "B" if record["answer"] == "A" else "A"


def test_each_adapter_of_prompts_has_a_case_and_each_reward_is_named_by_one():
    judged_by_environments = {"verifiers"}
    adapters = {name for name, kind in ENTRIES if kind == "prompt"} - judged_by_environments
    assert {adapter for adapter, *_ in CASES} == adapters


def test_a_right_and_a_wrong_answer_to_every_adapters_prompt_are_told_apart(tmp_path):
    records = []
    for number, (adapter, row, *_) in enumerate(CASES):
        path = tmp_path / f"{number}.jsonl"
        path.write_text(json.dumps(row) + "\n")
        (prompt,) = drawn(SourceConfig(url=f"file:{path}", adapter=adapter), 1)
        records.append(prompt.record)
    named_by_sources = {"boxed_math", "reported"}  # no adapter's own, or not of the answer alone
    assert {record["reward"] for record in records} == set(entries.names("reward")) - named_by_sources
    answers = [right_and_wrong(case, record) for case, record in zip(CASES, records, strict=True)]
    with Pool("auto", timeout_s=60.0) as pool:
        rights = pool.score([(record, right) for record, (right, _) in zip(records, answers, strict=True)])
        wrongs = pool.score([(record, wrong) for record, (_, wrong) in zip(records, answers, strict=True)])
    names = [f"{number} {adapter}" for number, (adapter, *_) in enumerate(CASES)]
    assert {n: s.value for n, s in zip(names, rights, strict=True)} == dict.fromkeys(names, 1.0)
    assert {n: s.value for n, s in zip(names, wrongs, strict=True)} == dict.fromkeys(names, 0.0)
