"""Runs benchmarks through lm-eval, and turns what it returns into records and scores of our own shape.

A benchmark is one YAML file in lm-eval's own format: shipped in benchmarks/, the user's (by path), or lm-eval's own
(`lm_eval:gsm8k/gsm8k.yaml`). A second file beside it, `<form>_chat.yaml`, is its form for chat models; without one the
text form is used for all. A job's own part (name, source, limit, few-shot) goes into a small YAML file that includes
the form. The file stays in the workspace, so the question can be read afterwards.
"""

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lm_eval.tasks
import yaml
from lm_eval.evaluator import evaluate

from nanodag.config.kinds.evaluation import BenchmarkConfig
from nanodag.errors import ConfigError
from nanodag.evaluation.evaluated_model import CutScore, EvaluatedModel, TooLong
from nanodag.evaluation.forms import FORMS, find_form
from nanodag.evaluation.intervals import Score, score_of

log = logging.getLogger(__name__)

MAX_RECORDED_CHARACTERS = 20_000


@dataclass(frozen=True, kw_only=True)
class BenchmarkResult:
    """metric: the main one, the first of the form's list. scores: by metric. records: one an item, with `too_long`
    where its prompt had no room: a written answer is then wrong, a likelihood that of a context without its beginning.
    """

    name: str
    form: str
    metric: str
    higher_is_better: bool
    is_chat: bool
    num_fewshot: int
    scores: Mapping[str, Score]
    records: list[dict[str, Any]]

    def as_json(self) -> dict[str, Any]:
        """Everything but the records."""
        return {
            "metric": self.metric,
            "higher_is_better": self.higher_is_better,
            "form": self.form,
            "chat": self.is_chat,
            "num_fewshot": self.num_fewshot,
            "too_long": sum(bool(record.get("too_long")) for record in self.records),
            **self.scores[self.metric].as_json(),
            "metrics": {name: score.as_json() for name, score in self.scores.items()},
        }


def run_benchmark(
    checkpoint: EvaluatedModel, config: BenchmarkConfig, *, chat: bool, seed: int, mirror: str, folder: Path
) -> BenchmarkResult:
    """Evaluate one benchmark. folder: where its YAML file is written. mirror: a path, empty for the hub.

    Raises ConfigError for a form that does not exist, SourceError for items that cannot be read.
    """
    form, is_chat = find_form(config, chat=chat)
    path = folder / f"{config.name}.yaml"
    path.write_text(_job_yaml(config, form, seed, mirror), encoding="utf-8")
    task = lm_eval.tasks.TaskManager(include_path=str(folder), include_defaults=False).load([config.name])
    checkpoint.is_chat = is_chat
    checkpoint.switch_template({} if config.source is None else config.source.template_options)
    evaluated = evaluate(
        checkpoint,
        task,
        bootstrap_iters=0,  # its standard errors would be drawn at random; ours are computed from the records
        apply_chat_template=is_chat,
        fewshot_as_multiturn=True,
    )
    assert evaluated is not None
    table = evaluated["configs"][config.name]
    metric_list = table["metric_list"]
    first_filter = evaluated["samples"][config.name][0]["filter"]  # lm-eval's own gsm8k has two, its main one first
    samples = [sample for sample in evaluated["samples"][config.name] if sample["filter"] == first_filter]
    records = [_record(sample, [m["metric"] for m in metric_list]) for sample in samples]
    weights = [record.get("weight", 1.0) for record in records]
    scores = {m["metric"]: score_of([r["scores"][m["metric"]] for r in records], weights) for m in metric_list}
    for name, score in scores.items():
        reported = evaluated["results"][config.name][f"{name},{first_filter}"]
        assert math.isclose(score.value, reported, rel_tol=1e-6, abs_tol=1e-9), (name, score.value, reported)
    return BenchmarkResult(
        name=config.name,
        form=form.stem,
        metric=metric_list[0]["metric"],
        higher_is_better=bool(metric_list[0]["higher_is_better"]),
        is_chat=is_chat,
        num_fewshot=config.num_fewshot,
        scores=scores,
        records=records,
    )


def _job_yaml(config: BenchmarkConfig, form: Path, seed: int, mirror: str) -> str:
    """The YAML that includes a form and adds what the job says."""
    made: dict[str, Any] = {"include": str(form), "task": config.name, "num_fewshot": config.num_fewshot}
    is_ours = form.is_relative_to(FORMS)
    if config.source is None:
        if is_ours or config.limit:
            raise ConfigError(f"Benchmark {config.name!r} needs `source:`, where its items come from.")
        return yaml.safe_dump(made, sort_keys=False)
    if config.num_fewshot and config.fewshot is None:
        raise ConfigError(
            f"Benchmark {config.name!r}: num_fewshot {config.num_fewshot} needs `fewshot:`, a source of worked "
            "examples that are no items, such as the training split."
        )
    made |= {"test_split": "test", "validation_split": None, "training_split": None}
    if config.num_fewshot:
        made |= {"fewshot_split": "fewshot", "fewshot_config": {"sampler": "first_n"}}
    else:
        made["fewshot_split"] = None
    made["dataset_kwargs"] = {
        "benchmark": config.name,
        "source": config.source.model_dump(mode="json"),
        "fewshot": config.fewshot.model_dump(mode="json") if config.fewshot else None,
        "num_fewshot": config.num_fewshot,
        "limit": config.limit,
        "seed": seed,
        "mirror": mirror,
    }
    text = yaml.safe_dump(made, sort_keys=False)
    # lm-eval's own forms speak of the data set's own columns, which is what `rows` gives.
    return text if is_ours else f"{text}custom_dataset: !function nanodag.evaluation.items.rows\n"


def _record(sample: Mapping[str, Any], metrics: list[str]) -> dict[str, Any]:
    """One line of samples/<benchmark>.jsonl, out of what lm-eval logs for an item."""
    doc = sample["doc"]
    record: dict[str, Any] = {"id": doc.get("item_id", sample["doc_hash"][:16])}
    scores: dict[str, float] = {}
    for name in metrics:
        value = sample[name]
        if name == "bits_per_byte":
            logprob, num_bytes = value
            scores[name] = -logprob / (num_bytes * math.log(2))
            record["weight"] = num_bytes
        else:
            scores[name] = float(value)
    record["scores"] = scores
    if any(isinstance(response[0], TooLong | CutScore) for response in sample["resps"]):
        record["too_long"] = True
    prompts = [arguments[0] for arguments in sample["arguments"]]
    if isinstance(sample["resps"][0][0], str):  # a text
        record |= {"prompt": prompts[0], "target": _plain(sample["target"]), "output": sample["resps"][0][0]}
    elif "weight" in record:
        record["prompt"] = prompts[0]
    else:  # choices, each with its log-probability
        record["prompt"] = prompts[0] if len(set(prompts)) == 1 else prompts
        record["choices"] = [arguments[1] for arguments in sample["arguments"]]
        record["logprobs"] = [round(float(response[0][0]), 4) for response in sample["resps"]]
        record["target"] = _plain(sample["target"])
    return {key: value[:MAX_RECORDED_CHARACTERS] if isinstance(value, str) else value for key, value in record.items()}


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))
