"""Runs benchmarks through lm-eval, and turns what it returns into records and scores of our own shape.

A benchmark is one YAML file in lm-eval's own format: shipped in benchmarks/, the user's (by path), or lm-eval's own
(`lm_eval:gsm8k/gsm8k.yaml`). A second file beside it, `<form>_chat.yaml`, is its form for chat models; without one the
text form is used for all. A job's own part (name, source, limit, few-shot) goes into a small YAML file that includes
the form. The file stays in the workspace, so the question can be read afterwards.
"""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lm_eval.tasks
import yaml
from lm_eval.evaluator import evaluate

from nanodag.config.kinds.evaluation import BenchmarkConfig
from nanodag.evaluation import results
from nanodag.evaluation.evaluated_model import CutScore, EvaluatedModel
from nanodag.evaluation.forms import FORMS, find_form
from nanodag.evaluation.items import item_options
from nanodag.evaluation.results import Answer, BenchmarkResult, Judged, judged_from, plain
from nanodag.store.kept_lines import KeptLines, content_key

log = logging.getLogger(__name__)


def run_benchmark(
    checkpoint: EvaluatedModel, config: BenchmarkConfig, *, chat: bool, seed: int, mirror: str, folder: Path
) -> BenchmarkResult:
    """Evaluate one benchmark. folder: where its YAML file is written. mirror: a path, empty for the hub. Answers of
    which `checkpoint.kept` has a verdict are not judged again.

    Raises ConfigError for a form that does not exist, SourceError for items that cannot be read.
    """
    form, is_chat = find_form(config, chat=chat)
    path = folder / f"{config.name}.yaml"
    path.write_text(_job_yaml(config, form, seed, mirror), encoding="utf-8")
    tasks = lm_eval.tasks.TaskManager(include_path=str(folder), include_defaults=False).load([config.name])
    task = tasks["tasks"][config.name]
    returned = _keep_what_is_returned(task, checkpoint.kept)
    if config.num_samples > 1:  # number i of its documents is sample i % num_samples
        split = task.config.test_split
        items = task.dataset[split]
        numbers = [number for number in range(len(items)) for _ in range(config.num_samples)]
        task.dataset = {**task.dataset, split: items.select(numbers)}
    checkpoint.is_chat = is_chat
    checkpoint.under_way = (config, seed)
    checkpoint.switch_template({} if config.source is None else config.source.template_options)
    evaluated = evaluate(
        checkpoint,
        tasks,
        bootstrap_iters=0,  # its standard errors would be drawn at random; ours are computed from the records
        system_instruction=config.system or None,
        apply_chat_template=is_chat,
        fewshot_as_multiturn=True,
    )
    assert evaluated is not None
    listed = evaluated["configs"][config.name]["metric_list"]
    averaged = [m for m in listed if m["metric"] == "bits_per_byte" or m.get("aggregation", "mean").endswith("mean")]
    metrics = [metric["metric"] for metric in averaged or listed]
    logged = evaluated["samples"][config.name]
    first_filter = logged[0]["filter"]  # lm-eval's own gsm8k has two, its main one first
    samples = [sample for sample in logged if sample["filter"] == first_filter]
    if isinstance(samples[0]["resps"][0][0], str):
        # What the form's own function returned stands in the order of the samples, those of the first filter in front.
        # Without such a function the sample itself has the metrics.
        texts = [text if isinstance(text := sample["filtered_resps"][0], str) else "" for sample in samples]
        judged = [judged_from(output, text, metrics) for output, text in zip(returned or samples, texts, strict=False)]
        num, size = len(samples), config.num_samples
        records = [_written_record(config, samples[n : n + size], judged[n : n + size]) for n in range(0, num, size)]
        means = {name: math.fsum(verdict.scores[name] for verdict in judged) / len(judged) for name in metrics}
    else:
        records = [_likelihood_record(sample, metrics) for sample in samples]
        means = {}
    result = results.result_of(
        config,
        form=form.stem,
        is_chat=is_chat,
        base_metric=metrics[0],
        higher_is_better=bool((averaged or listed)[0]["higher_is_better"]),
        records=records,
    )
    for name in metrics:
        value = means[name] if means else result.scores[name].value
        reported = evaluated["results"][config.name][f"{name},{first_filter}"]
        assert math.isclose(value, reported, rel_tol=1e-6, abs_tol=1e-9), (name, value, reported)
    return result


def _keep_what_is_returned(task: Any, kept: KeptLines | None) -> list[Mapping[str, Any]]:
    """Results of the form's `process_results` in the order of lm-eval's samples. lm-eval gets the metrics alone, as it
    takes the mean of all there is. A verdict that was kept is not made again: a program may run for seconds."""
    returned: list[Mapping[str, Any]] = []
    function = task.config.process_results
    metrics = list(task.aggregation())

    def process_results(doc: Mapping[str, Any], responses: Sequence[Any]) -> dict[str, Any]:
        is_written = all(isinstance(text, str) for text in responses) and "item_id" in doc
        key = content_key("judged", doc["item_id"], list(responses)) if is_written else ""
        verdict = kept.get(key) if kept is not None else None
        if verdict is None:
            verdict = plain(function(doc, responses)) if is_written else function(doc, responses)
            if kept is not None and is_written:
                kept.add({key: verdict})
        returned.append(verdict)
        return {name: verdict[name] for name in metrics if name in verdict}

    if callable(function):
        task.config.process_results = process_results
    return returned


def _job_yaml(config: BenchmarkConfig, form: Path, seed: int, mirror: str) -> str:
    """The YAML that includes a form and adds what the job says."""
    made: dict[str, Any] = {"include": str(form), "task": config.name, "num_fewshot": config.num_fewshot}
    is_ours = form.is_relative_to(FORMS)
    if config.source is None:
        return yaml.safe_dump(made, sort_keys=False)
    made |= {"test_split": "test", "validation_split": None, "training_split": None, "fewshot_split": None}
    if config.num_fewshot:
        made |= {"fewshot_split": "fewshot", "fewshot_config": {"sampler": "first_n"}}
    made["dataset_kwargs"] = item_options(config, seed=seed, mirror=mirror)
    text = yaml.safe_dump(made, sort_keys=False)
    # lm-eval's own forms speak of the data set's own columns, which is what `rows` gives.
    return text if is_ours else f"{text}custom_dataset: !function nanodag.evaluation.items.rows\n"


def _written_record(
    config: BenchmarkConfig, samples: Sequence[Mapping[str, Any]], judged: Sequence[Judged]
) -> dict[str, Any]:
    """An item's line of samples/<benchmark>.jsonl, out of what lm-eval logs for its answers."""
    texts = [sample["resps"][0][0] for sample in samples]
    answers = [text if isinstance(text, Answer) else Answer(text) for text in texts]
    prompt, target = samples[0]["arguments"][0][0], _plain(samples[0]["target"])
    item_id = _id_of(samples[0])
    return results.written_record(config, item_id=item_id, prompt=prompt, target=target, answers=answers, judged=judged)


def _likelihood_record(sample: Mapping[str, Any], metrics: list[str]) -> dict[str, Any]:
    """An item's line of samples/<benchmark>.jsonl, out of what lm-eval logs for it."""
    prompts = [arguments[0] for arguments in sample["arguments"]]
    record: dict[str, Any] = {"id": _id_of(sample), "prompt": prompts[0] if len(set(prompts)) == 1 else prompts}
    scores = {name: sample[name] for name in metrics}
    if any(isinstance(response[0], CutScore) for response in sample["resps"]):
        record["too_long"] = True
    if "bits_per_byte" in metrics:
        logprob, record["weight"] = sample["bits_per_byte"]
        scores["bits_per_byte"] = -logprob / (record["weight"] * math.log(2))
    else:  # choices, each with its log-probability
        record["choices"] = [arguments[1] for arguments in sample["arguments"]]
        record["logprobs"] = [round(float(response[0][0]), 4) for response in sample["resps"]]
        record["target"] = _plain(sample["target"])
    record["scores"] = {name: float(score) for name, score in scores.items()}
    return {key: results.shortened(value) if isinstance(value, str) else value for key, value in record.items()}


def _id_of(sample: Mapping[str, Any]) -> str:
    return str(sample["doc"].get("item_id", sample["doc_hash"][:16]))


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))
