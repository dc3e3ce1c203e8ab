"""The adapters there are. Each is small and pure; columns are as the data set has them on the hub."""

import ast
import hashlib
import itertools
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from nanodag.data.records import Kind
from nanodag.host.beside import table_beside
from nanodag.host.images import keep_value

Adapt = Callable[..., dict[str, Any]]
ENTRIES: dict[tuple[str, Kind], Adapt] = {}
_IMAGES = ("image", "image_url")  # types of a part, and names of what it holds
_HUB_NAMES: dict[str, list[str]] = table_beside(__file__, "hub_names.yaml")
DEFAULTS = {hub_name: adapter for adapter, names in _HUB_NAMES.items() for hub_name in names}


def entry(name: str, kind: Kind) -> Callable[[Adapt], Adapt]:
    """Register a function as the adapter of that name for this kind of record."""

    def register(adapt: Adapt) -> Adapt:
        ENTRIES[name, kind] = adapt
        return adapt

    return register


def _chat(question: Any, answer: str | Sequence[Mapping[str, str]]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def _prompt(question: Any, answer: str, reward: str, **metadata: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return {"messages": messages, "answer": answer, "reward": reward, "metadata": metadata}


@entry("text", "document")
def text(row: Mapping[str, Any]) -> dict[str, Any]:
    """Column `text` as it is."""
    return {"text": row["text"]}


@entry("messages", "conversation")
@entry("smoltalk", "conversation")
def messages(row: Mapping[str, Any], tools: bool = True) -> dict[str, Any]:
    """Column `messages` in OpenAI's form, with calls and their results. `train: false` or `weight: 0` on a message:
    what it says is not learned. Column `tools`, a list or its JSON: what the template declares; tools: false leaves it
    out. Images: in the parts, or in column `images` or `image`. Other keys of a message are left out."""
    declared = row.get("tools") if tools else None
    declared = json.loads(declared) if isinstance(declared, str) else declared
    made = {"messages": [_message(message) for message in _with_images(row["messages"], row)]}
    return {**made, "tools": _without_none(declared)} if declared else made


def _with_images(turns: Sequence[Mapping[str, Any]], row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """A row's messages. Images are kept by digest: what a part holds, else the next of the row's. Texts are joined."""
    parts = [part for turn in turns if isinstance(turn.get("content"), list | tuple) for part in turn["content"]]
    has_places = any(isinstance(part, Mapping) and part.get("type") in _IMAGES for part in parts)
    images = list(row.get("images") or [image for image in [row.get("image")] if has_places and image is not None])

    def with_digest(part: Mapping[str, Any]) -> dict[str, Any]:
        if part.get("type") not in _IMAGES:
            return {"type": "text", "text": part["text"]} if part.get("type") == "text" else dict(part)
        values = [part[name] for name in _IMAGES if part.get(name) is not None] or images
        if not values:
            raise ValueError("its messages have places for more images than it has")
        return {"type": "image", "image": keep_value(values.pop(0))}

    made = []
    for turn in turns:
        content = turn.get("content")
        if has_places and isinstance(content, list | tuple):
            content = list(map(with_digest, content))
        made.append({**turn, "content": _joined(content)} if "content" in turn else turn)
    if images:
        raise ValueError(f"its images, {len(images)}, have no place: parts of the type image in messages")
    return made


def _joined(content: Any) -> Any:
    """Parts of text alone as one text."""
    are_parts = isinstance(content, list | tuple) and all(isinstance(part, Mapping) for part in content)
    are_texts = are_parts and all(part.get("type") == "text" for part in content)
    return "".join(part["text"] for part in content) if are_texts else content


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    calls, role = message.get("tool_calls") or (), message["role"]
    made: dict[str, Any] = {"role": role, "content": message.get("content") or "" if calls else message["content"]}
    if calls:
        made["tool_calls"] = [{"id": c.get("id") or "", "type": "function", "function": _called_as(c)} for c in calls]
    if role == "tool":
        made |= {name: message[name] for name in ("tool_call_id", "name") if message.get(name)}
    if (weight := message.get("weight")) not in (None, 0, 1):
        raise ValueError(f"a message has the weight {weight!r:.80}; a message is learned, 1, or not, 0")
    return {**made, "train": False} if weight == 0 or message.get("train") is False else made


def _called_as(call: Mapping[str, Any]) -> dict[str, Any]:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    arguments = json.loads(arguments or "{}") if isinstance(arguments, str) else _without_none(arguments)
    return {"name": name, "arguments": arguments}


def _without_none(value: Any) -> Any:
    """A value without the keys that are None: tables give every row the keys that any row has."""
    if isinstance(value, Mapping):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return [_without_none(inner) for inner in value] if isinstance(value, list | tuple) else value


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
    """Rows that are prompts already, `messages` or a string `prompt`, with answer, and maybe reward and metadata.
    Images as in conversations."""
    turns = row["messages"] if "messages" in row else [{"role": "user", "content": row["prompt"]}]
    made = {"messages": _with_images(turns, row), "answer": str(row["answer"]), "reward": row.get("reward", "exact")}
    if "prompt_id" in row:
        made["prompt_id"] = str(row["prompt_id"])
    return {**made, "metadata": dict(row.get("metadata") or {})}


@entry("preference", "preference")
@entry("preference", "judgement")
def preference(row: Mapping[str, Any]) -> dict[str, Any]:
    """Columns `chosen` and `rejected`, and `prompt` where the answers do not repeat it: texts, lists of messages, or
    transcripts of `Human:` and `Assistant:` turns, of answers without a prompt. What both begin with, up to where the
    assistant speaks, is the prompt. Scores make the margin. Or `prompt`, `completion` and a boolean `label`; or
    `prompt`, `responses` and as many `scores`, of which the best and the worst are the pair."""
    if row.get("responses") is not None:
        pairs = zip(row["scores"], row["responses"], strict=True)
        rated = [(float(score), said) for score, said in pairs if score is not None and score == score]
        if len(rated) < 2:
            raise ValueError(f"{len(rated)} of its {len(row['responses'])} responses are rated; a pair needs 2")
        # Where all are rated alike both are the first answer, which is counted and not trained.
        (low, rejected), (high, chosen) = min(rated, key=itemgetter(0)), max(rated, key=itemgetter(0))
        row = {**row, "chosen": chosen, "rejected": rejected, "score_chosen": high, "score_rejected": low}
    if row.get("completion") is not None:
        if (label := row["label"]) not in (True, False):
            raise ValueError(f"label is {label!r:.80}, which is neither true, for a good answer, nor false")
        said = _turns(row["completion"], "assistant", is_transcript=False)
        return {"messages": _before_answer(row["prompt"]), "chosen" if label else "rejected": said}
    is_apart = row.get("prompt") is not None
    chosen, rejected = (_turns(row[name], "assistant", is_transcript=not is_apart) for name in ("chosen", "rejected"))
    shared = len(list(itertools.takewhile(lambda turns: turns[0] == turns[1], zip(chosen, rejected))))
    while shared and chosen[shared - 1]["role"] == "assistant":
        shared -= 1
    if not shared and not is_apart:
        raise ValueError("there is no `prompt`, and `chosen` and `rejected` do not begin with the same turns")
    prompt = chosen[:shared] or _before_answer(row["prompt"])
    made: dict[str, Any] = {"messages": prompt, "chosen": chosen[shared:], "rejected": rejected[shared:]}
    scores = [row.get(name) for name in ("score_chosen", "score_rejected")]
    is_scored = all(score is not None and score == score for score in scores)  # tables say NaN for none
    return {**made, "margin": float(scores[0]) - float(scores[1])} if is_scored else made  # type: ignore[arg-type]


@entry("stepwise", "stepwise")
def stepwise(row: Mapping[str, Any]) -> dict[str, Any]:
    """Columns `prompt`, `completions`, the steps of an answer, and `labels`, true or false or from 0 to 1 for each."""
    labels = [float(label) for label in row["labels"]]
    return {"messages": _before_answer(row["prompt"]), "steps": list(row["completions"]), "labels": labels}


def _before_answer(prompt: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    turns = _turns(prompt, "user", is_transcript=True)
    # The last is empty where a transcript leaves the word to the answer.
    return turns[:-1] if turns[-1:] == [{"role": "assistant", "content": ""}] else turns


_TURN = re.compile(r"(?:^|\n\n)(Human|Assistant): ?")


def _turns(value: str | Sequence[Mapping[str, Any]], role: str, *, is_transcript: bool) -> list[dict[str, Any]]:
    """Messages of a column: of a text, one of the role, or those of its transcript."""
    if not isinstance(value, str):
        return [{"role": message["role"], "content": message["content"]} for message in value]
    begin, *pieces = _TURN.split(value)
    if not is_transcript or begin.strip() or not pieces:
        return [{"role": role, "content": value}]
    roles = {"Human": "user", "Assistant": "assistant"}
    return [{"role": roles[who], "content": said} for who, said in zip(pieces[::2], pieces[1::2], strict=True)]


entry("problem", "conversation")(lambda row: _chat(_asked(row), str(row["answer"])))
# The answer is compared exactly, or as column `reward` says.
entry("problem", "prompt")(lambda row: _prompt(_asked(row), str(row["answer"]), row.get("reward", "exact")))


def _asked(row: Mapping[str, Any]) -> Any:
    """The question, behind the row's images."""
    images = [{"type": "image", "image": keep_value(image)} for image in row.get("images") or ()]
    return [*images, {"type": "text", "text": row["question"]}] if images else row["question"]


_CALCULATION = re.compile(r"<<([^<>=]*)=([^<>]*)>>")


def gsm8k_answer(solution: str) -> str:
    """The number after `####`, without thousands separators. Raises ValueError without one."""
    _, mark, answer = solution.rpartition("####")
    if not mark:
        raise ValueError(f"a GSM8K solution ends in `#### number`; found {solution[-40:]!r}")
    return answer.strip().replace(",", "")


def _gsm8k_parts(solution: str) -> list[dict[str, str]]:
    """`48/2 = <<48/2=24>>24` as text, a call of `48/2`, the result `24`, and the text that goes on."""
    *pieces, rest = _CALCULATION.split(solution)
    kinds = itertools.cycle(("text", "tool_call", "tool_result"))
    parts = [{"type": kind, "text": text} for kind, text in zip(kinds, pieces) if text or kind != "text"]
    return [*parts, {"type": "text", "text": rest}]


@entry("gsm8k", "conversation")
def gsm8k(row: Mapping[str, Any], tools: bool = False) -> dict[str, Any]:
    """question -> worked answer ending in `#### number`. tools: <<calculations>> become tool spans, else they go."""
    solution = row["answer"]
    return _chat(row["question"], _gsm8k_parts(solution) if tools else _CALCULATION.sub("", solution))


entry("gsm8k", "prompt")(lambda row: _prompt(row["question"], gsm8k_answer(row["answer"]), "gsm8k"))


def _columns(question: str, answer: str, reward: str) -> Adapt:
    """The adapter of a prompt whose question and answer have a column each."""
    return lambda row: _prompt(row[question], row[answer], reward)


entry("math", "conversation")(lambda row: _chat(row["problem"], row["solution"]))  # MATH and its relatives
entry("math", "prompt")(_columns("problem", "answer", "math"))  # the reference answer as LaTeX
entry("bbh", "prompt")(_columns("input", "target", "short_answer"))  # of BIG-Bench Hard, and what is built like it
# A fact in a few words, compared as words, without a judge.
entry("simpleqa", "prompt")(_columns("problem", "answer", "short_answer"))


@entry("aime", "prompt")
def aime(row: Mapping[str, Any]) -> dict[str, Any]:
    """A problem whose answer is an integer; the copies on the hub write the columns in three ways."""
    question = next((name for name in ("problem", "Problem", "question", "Question") if name in row), "problem")
    return _prompt(row[question], str(int(row["answer"] if "answer" in row else row["Answer"])), "math")


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


Choice = tuple[str, list[str], int, str]  # question, choices, index of the right one, context
ReadChoice = Callable[[Mapping[str, Any]], Choice]


def choice(*names: str) -> Callable[[ReadChoice], ReadChoice]:
    """Register what reads a row's question and choices as adapters of these names: a letter is the answer."""

    def register(read: ReadChoice) -> ReadChoice:
        def as_prompt(row: Mapping[str, Any]) -> dict[str, Any]:
            question, choices, right, context = read(row)
            if not 0 <= right < len(choices):
                raise ValueError(f"the right answer is number {right} of {len(choices)} choices")
            letters = [chr(ord("A") + number) for number in range(len(choices))]
            listed = "\n".join(f"{letter}. {text}" for letter, text in zip(letters, choices, strict=True))
            lead = f"{context.strip()}\n\n" if context.strip() else ""
            asked = f"{lead}{question.strip()}\n{listed}\nAnswer with one letter."
            return _prompt(asked, letters[right], "multiple_choice", choices=choices)

        def conversation(row: Mapping[str, Any]) -> dict[str, Any]:
            record = as_prompt(row)
            return _chat(record["messages"][0]["content"], record["answer"])

        for name in names:
            entry(name, "prompt")(as_prompt)
            entry(name, "conversation")(conversation)
        return read

    return register


@choice("mmlu", "multiple_choice")
def _mmlu(row: Mapping[str, Any]) -> Choice:
    inner = row["train"] if isinstance(row.get("train"), Mapping) else row  # auxiliary_train nests its rows one deeper
    return inner["question"], list(inner["choices"]), int(inner["answer"]), ""


@choice("arc")
def _arc(row: Mapping[str, Any]) -> Choice:
    question = row["question_stem"] if "question_stem" in row else row["question"]
    return question, list(row["choices"]["text"]), list(row["choices"]["label"]).index(row["answerKey"]), ""


@choice("sciq")
def _sciq(row: Mapping[str, Any]) -> Choice:
    columns = ("correct_answer", "distractor1", "distractor2", "distractor3")
    choices = _shuffled(row["question"], [row[column] for column in columns])
    return row["question"], choices, choices.index(row["correct_answer"]), row.get("support") or ""


def _shuffled(question: str, choices: Sequence[str]) -> list[str]:
    """Choices whose columns on the hub give no order: it is drawn from the question's hash, the same in every run."""
    return sorted(choices, key=lambda choice: hashlib.blake2b(f"{question}\0{choice}".encode()).digest())


@choice("gpqa")
def gpqa_choice(row: Mapping[str, Any]) -> Choice:
    """GPQA's question and four choices in a fixed order, cleaned as lm-eval does, and the number of the right one."""
    columns = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
    answers = [row[column].strip().replace(" [title]", ". ").replace("  ", " ") for column in columns]
    choices = _shuffled(row["Question"], answers)
    return row["Question"], choices, choices.index(answers[0]), ""


@choice("winogrande")
def _winogrande(row: Mapping[str, Any]) -> Choice:
    question = f"Which fits the blank: {row['sentence']}"
    return question, [row["option1"], row["option2"]], int(row["answer"]) - 1, ""


choice("piqa")(lambda row: (row["goal"], [row["sol1"], row["sol2"]], int(row["label"]), ""))
choice("hellaswag")(lambda row: (f"How does this go on: {row['ctx']}", list(row["endings"]), int(row["label"]), ""))
choice("boolq")(
    lambda row: (f"{row['question'].rstrip('?')}?", ["no", "yes"], int(bool(row["answer"])), row["passage"])
)


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
