"""How well a reward model of steps finds the first wrong step of a sort, and how well it chooses one of 8 answers.

    python -m benchmarks.step_judge --seeds 1 2 3 --store /tmp/steps

An answer to `Sort in steps: 52 17 98` is an insertion sort, a line a step: each line has one number more, in order.
Tokenizer and pretraining on lists of numbers are those of all seeds. A run a seed: SFT on a few such answers; a reward
model of steps on right answers and on answers with one line spoilt (two neighbours exchanged, a digit changed, a number
left out), after which the sort goes on with what the line says. Its labels are 1 up to the spoilt line, and 0 from
there on.

It judges two sets of problems that it never saw: spoilt answers made in the same way, and 8 answers of the SFT model
itself, which were not made so. transformers computes its scores. Told are: steps told right or wrong; of answers with
a wrong step, how often the first one below 0.5 is the first wrong one; of answers without one, how often none is below.
Of 8 answers to a problem, how often the one whose least step it scores highest (judge@8) ends in the sorted list,
beside one at random (avg@8), the most frequent last line (maj@8), and what a verifier would choose (pass@8). Runs are
resumed by their name.
"""

import argparse
import bisect
import json
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

import nanodag
from nanodag.data.lists import sort

PROJECT = Path(__file__).resolve().parents[1]
COUNT, SAMPLES, BATCH = 4, 8, 128
LESSONS = ("reverse", "pick", "sort")  # of pretraining
METRICS = [f"{name}@{SAMPLES}" for name in ("avg", "maj", "pass")]  # one at random, the most frequent, a verifier's
Answer = tuple[str, list[str]]  # a question, and the steps of an answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--sft", type=int, default=200, help="answers that SFT learns from")
    parser.add_argument("--answers", type=int, default=60_000, help="answers that the reward model learns from")
    parser.add_argument("--store", type=Path, default=Path("/tmp/nanodag-steps"), help="what is done there is kept")
    options = parser.parse_args()
    for seed in options.seeds:
        folder = options.store / f"seed-{seed}"
        folder.mkdir(parents=True, exist_ok=True)
        write_data(folder, seed, num_sft=options.sft, num_judged=options.answers)
        file = folder / "steps.yaml"
        file.write_text(yaml.safe_dump(pipeline(folder, options.store / "store"), sort_keys=False))
        run = nanodag.run("steps", f"seed={seed}", file=str(file), name=f"steps-{seed}")
        judge = Judge(*run["judge"].load_model())
        print(f"seed {seed}: " + json.dumps(report(run, judge, seed)), flush=True)


def write_data(folder: Path, seed: int, *, num_sft: int, num_judged: int) -> None:
    """Files of rows for SFT, the judge and the evaluation; of problems that no two of them share."""
    stream = random.Random(seed)
    taught = [asked(row["question"]) for row in sort(count=COUNT, size=num_sft, seed=1)]
    judged = [asked(row["question"]) for row in sort(count=COUNT, size=num_judged // 2, seed=2)]
    rows = [*((q, steps_of(q)) for q in judged), *((q, spoilt(q, stream)) for q in judged)]
    _write(folder / "sft.jsonl", ({"question": q, "answer": "\n".join(steps_of(q))} for q in taught))
    _write(
        folder / "steps.jsonl",
        ({"prompt": q, "completions": s, "labels": [float(label) for label in labels_of(q, s)]} for q, s in rows),
    )
    _write(folder / "test.jsonl", ({"question": q, "answer": steps_of(q)[-1]} for q in test_questions()))


def _write(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_questions() -> list[str]:
    return [asked(row["question"]) for row in sort(count=COUNT, size=400, seed=7, split="test")]


def asked(question: str) -> str:
    return question.replace("Sort:", "Sort in steps:")


def _numbers(text: str) -> list[str]:
    return text.rpartition(":")[2].split()  # two digits each, so their order is that of texts


def steps_of(question: str) -> list[str]:
    """Lines of an insertion sort: the first k numbers in order."""
    numbers = _numbers(question)
    return [" ".join(sorted(numbers[: k + 1])) for k in range(len(numbers))]


def spoilt(question: str, stream: random.Random) -> list[str]:
    """The same with one line spoilt, and the next numbers put into what it says."""
    numbers = _numbers(question)
    wrong = stream.randrange(len(numbers))
    line = right = sorted(numbers[: wrong + 1])
    while line == right:
        line, place = list(right), stream.randrange(wrong + 1)
        match stream.choice(("exchange", "digit", "leave out") if place else ("digit",)):
            case "exchange":
                line[place - 1 : place + 1] = line[place], line[place - 1]
            case "digit":
                line[place] = _near(line[place], stream)
            case _:
                del line[place]
    steps = [" ".join(sorted(numbers[: k + 1])) for k in range(wrong)] + [" ".join(line)]
    for number in numbers[wrong + 1 :]:
        bisect.insort(line, number)
        steps.append(" ".join(line))
    return steps


def _near(number: str, stream: random.Random) -> str:
    """The number with one of its digits changed."""
    tens, ones = number
    digit = str(stream.randrange(1, 10))
    return digit + ones if stream.random() < 0.5 else tens + digit


def labels_of(question: str, steps: Sequence[str]) -> list[bool]:
    """True for each step before the first that is not its line of the sort."""
    right, labels = steps_of(question), list[bool]()
    for number, step in enumerate(steps):
        labels.append(all(labels) and number < len(right) and step == right[number])
    return labels


def pipeline(folder: Path, store: Path) -> dict[str, Any]:
    """The stages of one seed."""
    shipped = yaml.safe_load((PROJECT / "pipeline.yaml").read_text())
    old = shipped["presets"]["preferences"]["stages"]
    generators = [{"url": f"python:nanodag.data.lists:{name}?size=20000", "adapter": "problem"} for name in LESSONS]
    lists = {**generators[0], "weight": 0.5}  # with them a number is one token; of prose alone it is two
    prose = {"url": old["tokenizer"]["data"][0], "weight": 0.5}
    tokenizer = old["tokenizer"] | {"data": [prose, lists], "seed": 0}
    shape, of_all = {"depth": 3, "max_positions": 256}, {"seed": 0, "horizon_tokens": 307_200}
    pretrain = old["pretrain"] | {"data": generators, "shape": shape, "sequence_length": 256, **of_all}
    sft = old["sft"] | {"data": [{"url": f"file:{folder}/sft.jsonl", "adapter": "problem", "held_out": 0.1}]}
    samples = {
        "name": "steps",
        "form": "problems",
        "source": {"url": f"file:{folder}/test.jsonl", "adapter": "problem", "reward": "short_answer"},
        "num_samples": SAMPLES,
        "temperature": 1.0,
        "metrics": METRICS,
    }
    stages = {
        "tokenizer": tokenizer,
        "pretrain": pretrain,
        "sft": sft | {"sequence_length": 256},
        "answers": {"kind": "eval", "inputs": {"model": "sft"}, "benchmarks": [samples], "max_new_tokens": 64},
        "judge": {
            "kind": "reward_model",
            "judges": "steps",
            "step_separator": "\n",
            "inputs": {"model": "sft"},
            "data": [{"url": f"file:{folder}/steps.jsonl", "adapter": "stepwise", "held_out": 0.02}],
            "sequence_length": 256,
            "batch_tokens": 2048,
            "num_epochs": 1,
            "validation_every": 100,
            "optimizer": {"matrix_lr": 0.01, "learning_rate": 0.004},
        },
    }
    return shipped | {
        "default": "steps",
        "unchecked": ["answers.max_new_tokens"],  # the plan takes a file's prompts for long ones
        "store": {"url": str(store)},
        "presets": {"steps": {"nightly": {"enabled": False}, "stages": stages}},
    }


class Judge:
    """The chance of each step to be right, by transformers' own classifier."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._model, self._tokenizer = model.eval(), tokenizer

    def _ids(self, answer: Answer) -> tuple[list[int], list[int]]:
        """Ids of a question with an answer, and the places where its steps end."""
        question, steps = answer
        chat = [{"role": "user", "content": question}]
        text = self._tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        ids, places = self._tokenizer(text, add_special_tokens=False)["input_ids"], []
        for number, step in enumerate(steps):
            is_last = number == len(steps) - 1
            ids += self._tokenizer(step if is_last else step + "\n", add_special_tokens=False)["input_ids"]
            ids += [self._tokenizer.eos_token_id] if is_last else []
            places.append(len(ids) - 1)
        return ids, places

    @torch.inference_mode()
    def __call__(self, answers: Sequence[Answer]) -> list[list[float]]:
        chances: list[list[float]] = []
        for begin in range(0, len(answers), BATCH):
            batch = [self._ids(answer) for answer in answers[begin : begin + BATCH]]
            width = max(len(ids) for ids, _ in batch)
            rows = torch.tensor(
                [ids + [0] * (width - len(ids)) for ids, _ in batch]
            )  # causal: padding behind is unseen
            scores = self._model.score(self._model.base_model(input_ids=rows)[0])[..., 0].sigmoid()
            chances += [row[places].tolist() for row, (_, places) in zip(scores, batch, strict=True)]
        return chances


def report(run: Any, judge: Judge, seed: int) -> dict[str, Any]:
    """All that is told of a seed, in percent."""
    stream, records = random.Random(f"test {seed}"), run["answers"].samples()
    made = [(q, answer) for q in test_questions() for answer in (steps_of(q), spoilt(q, stream))]
    questions = [re.search(r"Sort in steps:[\d ]+\d", prompt).group() for prompt in records["prompt"]]  # type: ignore[union-attr]
    texts = [[sample["output"] for sample in samples] for samples in records["samples"]]
    own = [(q, _lines(text)) for q, group in zip(questions, texts, strict=True) for text in group]
    chances = judge(own)
    is_right = np.array([steps[-1] == steps_of(q)[-1] for q, steps in own]).reshape(-1, SAMPLES)
    chosen = np.array([min(each) for each in chances]).reshape(-1, SAMPLES).argmax(1)
    scores = {name: _percent(np.mean([one[name] for one in records["scores"]])) for name in METRICS}
    best = {f"judge@{SAMPLES}": _percent(is_right[np.arange(len(chosen)), chosen].mean())}
    return {"spoilt": found(made, judge(made)), "own": found(own, chances), **scores, **best}


def _lines(text: str) -> list[str]:
    return [line for line in text.split("\n") if line.strip()] or [""]


def found(answers: Sequence[Answer], chances: Sequence[Sequence[float]]) -> dict[str, float]:
    """What the chances of steps find: single steps, the first wrong one, and that there is none."""
    of_steps, first, none = list[bool](), list[bool](), list[bool]()
    for (question, steps), each in zip(answers, chances, strict=True):
        labels, told = labels_of(question, steps), [chance > 0.5 for chance in each]
        of_steps += [label == one for label, one in zip(labels, told, strict=True)]
        of_wrong = none if all(labels) else first
        of_wrong.append(_first(labels) == _first(told))
    shares = {"steps": of_steps, "first_error": first, "no_error": none}
    return {name: _percent(np.mean(values)) for name, values in shares.items()} | {"answers_with_error": len(first)}


def _first(labels: Sequence[bool]) -> int:
    return labels.index(False) if False in labels else len(labels)


def _percent(share: Any) -> float:
    return round(100 * float(share), 1)


if __name__ == "__main__":
    main()
