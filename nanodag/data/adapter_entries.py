"""The adapters there are. Each is small and pure; columns are as the data set has them on the hub."""

import ast
import hashlib
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nanodag.data.records import Kind

Adapt = Callable[..., dict[str, Any]]
ENTRIES: dict[tuple[str, Kind], Adapt] = {}
DEFAULTS: dict[str, str] = {  # hub name -> adapter
    "HuggingFaceTB/smol-smoltalk": "smoltalk",
    "HuggingFaceTB/smoltalk": "smoltalk",
    "HuggingFaceTB/smoltalk2": "smoltalk",
    "HuggingFaceFW/fineweb": "text",
    "HuggingFaceFW/fineweb-edu": "text",
    "karpathy/fineweb-edu-100b-shuffle": "text",
    "karpathy/climbmix-400b-shuffle": "text",
    "cais/mmlu": "mmlu",
    "openai/gsm8k": "gsm8k",
    "HuggingFaceH4/MATH-500": "math",
    "allenai/ai2_arc": "arc",
    "allenai/openbookqa": "arc",
    "tau/commonsense_qa": "arc",
    "allenai/sciq": "sciq",
    "baber/piqa": "piqa",
    "ybisk/piqa": "piqa",
    "allenai/winogrande": "winogrande",
    "google/boolq": "boolq",
    "google/IFEval": "ifeval",
    "openai/openai_humaneval": "humaneval",
    "evalplus/humanevalplus": "humaneval",
    "google-research-datasets/mbpp": "mbpp",
    "evalplus/mbppplus": "mbpp",
    "Idavidrein/gpqa": "gpqa",
    "gneubig/aime-1983-2024": "aime",
    "Maxwell-Jia/AIME_2024": "aime",
    "math-ai/aime25": "aime",
    "SaylorTwift/bbh": "bbh",
    "lukaemon/bbh": "bbh",
    "basicv8vc/SimpleQA": "simpleqa",
    "tatsu-lab/alpaca": "alpaca",
    "yahma/alpaca-cleaned": "alpaca",
}


def entry(name: str, *kinds: Kind) -> Callable[[Adapt], Adapt]:
    """Register a function as the adapter of that name for these kinds of record."""

    def register(adapt: Adapt) -> Adapt:
        for kind in kinds:
            ENTRIES[name, kind] = adapt
        return adapt

    return register


def _chat(question: str, answer: str | Sequence[Mapping[str, str]]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def _prompt(question: str, answer: str, reward: str, **metadata: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return {"messages": messages, "answer": answer, "reward": reward, "metadata": metadata}


@entry("text", "document")
def text(row: Mapping[str, Any]) -> dict[str, Any]:
    """Column `text` as it is."""
    return {"text": row["text"]}


@entry("messages", "conversation")
@entry("smoltalk", "conversation")
def messages(row: Mapping[str, Any]) -> dict[str, Any]:
    """Column `messages`; other keys of a message than role and content are left out."""
    return {"messages": [{"role": m["role"], "content": m["content"]} for m in row["messages"]]}


@entry("sharegpt", "conversation")
def sharegpt(row: Mapping[str, Any]) -> dict[str, Any]:
    """Column `conversations` of {from: system | human | gpt, value}."""
    roles = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
    return {"messages": [{"role": roles[turn["from"]], "content": turn["value"]} for turn in row["conversations"]]}


@entry("alpaca", "conversation")
def alpaca(row: Mapping[str, Any]) -> dict[str, Any]:
    """instruction, input (may be empty or missing), output."""
    context = row.get("input") or ""
    return _chat(f"{row['instruction']}\n\n{context}" if context else row["instruction"], row["output"])


@entry("prompt", "prompt")
def prompt(row: Mapping[str, Any]) -> dict[str, Any]:
    """Rows that are prompts already, `messages` or a string `prompt`, with answer, and maybe reward and metadata."""
    turns = row["messages"] if "messages" in row else [{"role": "user", "content": row["prompt"]}]
    made = {"messages": list(turns), "answer": str(row["answer"]), "reward": row.get("reward", "exact")}
    if "prompt_id" in row:
        made["prompt_id"] = str(row["prompt_id"])
    return {**made, "metadata": dict(row.get("metadata") or {})}


@entry("problem", "conversation")
def problem(row: Mapping[str, Any]) -> dict[str, Any]:
    """question -> answer."""
    return _chat(row["question"], str(row["answer"]))


@entry("problem", "prompt")
def problem_prompt(row: Mapping[str, Any]) -> dict[str, Any]:
    """question; the answer is compared exactly, or as column `reward` says."""
    return _prompt(row["question"], str(row["answer"]), row.get("reward", "exact"))


_CALCULATION = re.compile(r"<<([^<>=]*)=([^<>]*)>>")


def gsm8k_answer(solution: str) -> str:
    """The number after `####`, without thousands separators. Raises ValueError without one."""
    _, mark, answer = solution.rpartition("####")
    if not mark:
        raise ValueError(f"a GSM8K solution ends in `#### number`; found {solution[-40:]!r}")
    return answer.strip().replace(",", "")


def _gsm8k_parts(solution: str) -> list[dict[str, str]]:
    """`48/2 = <<48/2=24>>24` as text, a call of `48/2`, the result `24`, and the text that goes on."""
    parts: list[dict[str, str]] = []
    end = 0
    for match in _CALCULATION.finditer(solution):
        if match.start() > end:
            parts.append({"type": "text", "text": solution[end : match.start()]})
        parts.append({"type": "tool_call", "text": match.group(1)})
        parts.append({"type": "tool_result", "text": match.group(2)})
        end = match.end()
    return [*parts, {"type": "text", "text": solution[end:]}]


@entry("gsm8k", "conversation")
def gsm8k(row: Mapping[str, Any], tools: bool = False) -> dict[str, Any]:
    """question -> worked answer ending in `#### number`. tools: <<calculations>> become tool spans, else they go."""
    solution = row["answer"]
    return _chat(row["question"], _gsm8k_parts(solution) if tools else _CALCULATION.sub("", solution))


@entry("gsm8k", "prompt")
def gsm8k_prompt(row: Mapping[str, Any]) -> dict[str, Any]:
    """The question; its answer is the number alone."""
    return _prompt(row["question"], gsm8k_answer(row["answer"]), "gsm8k")


@entry("math", "conversation")
def math(row: Mapping[str, Any]) -> dict[str, Any]:
    """problem -> solution (MATH and its relatives)."""
    return _chat(row["problem"], row["solution"])


@entry("math", "prompt")
def math_prompt(row: Mapping[str, Any]) -> dict[str, Any]:
    """problem, with the reference answer as LaTeX."""
    return _prompt(row["problem"], row["answer"], "math")


@entry("aime", "prompt")
def aime(row: Mapping[str, Any]) -> dict[str, Any]:
    """A problem whose answer is an integer; the copies on the hub write the columns in three ways."""
    lower = {name.lower(): value for name, value in row.items()}
    question = lower["problem"] if "problem" in lower else lower["question"]
    return _prompt(question, str(int(lower["answer"])), "math")


@entry("bbh", "prompt")
def bbh(row: Mapping[str, Any]) -> dict[str, Any]:
    """input, target: of BIG-Bench Hard, and what is built like it."""
    return _prompt(row["input"], row["target"], "short_answer")


@entry("simpleqa", "prompt")
def simpleqa(row: Mapping[str, Any]) -> dict[str, Any]:
    """problem, answer: a fact in a few words, compared as words, without a judge."""
    return _prompt(row["problem"], row["answer"], "short_answer")


@entry("reasoning_gym", "conversation")
def reasoning_gym(row: Mapping[str, Any], answer_cot: bool = False) -> dict[str, Any]:
    """question -> answer; answer_cot: the worked answer of the generators that give one."""
    return _chat(row["question"], row["metadata"]["answer_cot"] if answer_cot else row["answer"])


@entry("reasoning_gym", "prompt")
def reasoning_gym_prompt(row: Mapping[str, Any]) -> dict[str, Any]:
    """question; the whole row is kept as metadata.entry, which the generator's own verifier needs."""
    return _prompt(row["question"], row["answer"], "reasoning_gym", entry=dict(row))


@entry("verifiers", "prompt")
def verifiers_prompt(row: Mapping[str, Any]) -> dict[str, Any]:
    """The task's messages; the task is kept as metadata.task, which its environment needs."""
    return {"messages": row["messages"], "answer": "", "reward": "reported", "metadata": {"task": row["task"]}}


def _choice_question(question: str, choices: Sequence[str], context: str = "") -> str:
    listed = "\n".join(f"{_letter(number)}. {choice}" for number, choice in enumerate(choices))
    lead = f"{context.strip()}\n\n" if context.strip() else ""
    return f"{lead}{question.strip()}\n{listed}\nAnswer with one letter."


def _letter(number: int) -> str:
    return chr(ord("A") + number)


Choice = tuple[str, list[str], int, str]  # question, choices, index of the right one, context


def _mmlu(row: Mapping[str, Any]) -> Choice:
    inner = row["train"] if isinstance(row.get("train"), Mapping) else row  # auxiliary_train nests its rows one deeper
    return inner["question"], list(inner["choices"]), int(inner["answer"]), ""


def _arc(row: Mapping[str, Any]) -> Choice:
    question = row["question_stem"] if "question_stem" in row else row["question"]
    return question, list(row["choices"]["text"]), list(row["choices"]["label"]).index(row["answerKey"]), ""


def _sciq(row: Mapping[str, Any]) -> Choice:
    choices = [row["correct_answer"], row["distractor1"], row["distractor2"], row["distractor3"]]
    choices = _shuffled(row["question"], choices)
    return row["question"], choices, choices.index(row["correct_answer"]), row.get("support") or ""


def _shuffled(question: str, choices: Sequence[str]) -> list[str]:
    """Choices whose columns on the hub give no order: it is drawn from the question's hash, the same in every run."""
    return sorted(choices, key=lambda choice: hashlib.blake2b(f"{question}\0{choice}".encode()).digest())


def gpqa_choice(row: Mapping[str, Any]) -> Choice:
    """GPQA's question and four choices in a fixed order, cleaned as lm-eval does, and the number of the right one."""
    columns = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
    answers = [row[column].strip().replace(" [title]", ". ").replace("  ", " ") for column in columns]
    choices = _shuffled(row["Question"], answers)
    return row["Question"], choices, choices.index(answers[0]), ""


def _piqa(row: Mapping[str, Any]) -> Choice:
    return row["goal"], [row["sol1"], row["sol2"]], int(row["label"]), ""


def _winogrande(row: Mapping[str, Any]) -> Choice:
    question = f"Which fits the blank: {row['sentence']}"
    return question, [row["option1"], row["option2"]], int(row["answer"]) - 1, ""


def _boolq(row: Mapping[str, Any]) -> Choice:
    return f"{row['question'].rstrip('?')}?", ["no", "yes"], int(bool(row["answer"])), row["passage"]


def _hellaswag(row: Mapping[str, Any]) -> Choice:
    return f"How does this go on: {row['ctx']}", list(row["endings"]), int(row["label"]), ""


_CHOICE_READERS: dict[str, Callable[[Mapping[str, Any]], Choice]] = {
    "mmlu": _mmlu,
    "multiple_choice": _mmlu,
    "arc": _arc,
    "sciq": _sciq,
    "gpqa": gpqa_choice,
    "piqa": _piqa,
    "winogrande": _winogrande,
    "boolq": _boolq,
    "hellaswag": _hellaswag,
}


def _register_choices(name: str, read: Callable[[Mapping[str, Any]], Choice]) -> None:
    def letter_of(number: int, choices: Sequence[str]) -> str:
        if not 0 <= number < len(choices):
            raise ValueError(f"the right answer is number {number} of {len(choices)} choices")
        return _letter(number)

    def conversation(row: Mapping[str, Any]) -> dict[str, Any]:
        question, choices, right, context = read(row)
        return _chat(_choice_question(question, choices, context), letter_of(right, choices))

    def as_prompt(row: Mapping[str, Any]) -> dict[str, Any]:
        question, choices, right, context = read(row)
        prompt_text = _choice_question(question, choices, context)
        return _prompt(prompt_text, letter_of(right, choices), "multiple_choice", choices=choices)

    entry(name, "conversation")(conversation)
    entry(name, "prompt")(as_prompt)


for _name, _read in _CHOICE_READERS.items():
    _register_choices(_name, _read)


@entry("ifeval", "prompt")
def ifeval(row: Mapping[str, Any]) -> dict[str, Any]:
    """prompt with its verifiable instructions; kwargs may be a JSON string, as some copies of the data have it."""
    kwargs = json.loads(row["kwargs"]) if isinstance(row["kwargs"], str) else list(row["kwargs"])
    rules = {"instruction_id_list": list(row["instruction_id_list"]), "kwargs": kwargs}
    return _prompt(row["prompt"], "", "instruction_following", **rules)


@entry("humaneval", "prompt")
def humaneval(row: Mapping[str, Any]) -> dict[str, Any]:
    """A function to complete; its tests are in metadata, and what stands before it."""
    question = f"Complete this Python function. Answer with the whole function.\n\n{row['prompt']}"
    known = {"tests": [row["test"]], "entry_point": row["entry_point"], "before": row["prompt"]}
    return _prompt(question, row["canonical_solution"], "code", **known)


@entry("mbpp", "prompt")
def mbpp(row: Mapping[str, Any]) -> dict[str, Any]:
    """A function to write, asked as lm-eval does; MBPP+ (column `test`) is judged by its own, larger tests."""
    shown = list(row["test_list"])
    task = row["prompt"] if "prompt" in row else row["text"]
    question = (
        f"You are an expert Python programmer, and here is your task: {task} Your code should pass these tests:\n\n"
        + "\n".join(shown[:3])
    )
    setup = [*(row.get("test_imports") or ()), row.get("test_setup_code") or ""]
    tests = [*filter(None, setup), *([row["test"]] if row.get("test") else shown)]
    return _prompt(question, row["code"], "code", tests=tests, entry_point=_called(row["code"], shown))


def _called(code: str, tests: Sequence[str]) -> str:
    """The function of a program that its tests call first."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of invalid escapes
        made = {node.name for node in ast.parse(code).body if isinstance(node, ast.FunctionDef)}
        nodes = [node for test in tests for node in ast.walk(ast.parse(test))]
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in made:
            return node.func.id
    raise ValueError(f"no test calls a function of the solution, which makes {', '.join(sorted(made)) or 'none'}")
