"""Results of a benchmark: written answers, a record for each item, scores with intervals, and counts. No torch here."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from nanodag.config.kinds.evaluation import BenchmarkConfig, ThinkingConfig
from nanodag.errors import ConfigError
from nanodag.errors.words import counted
from nanodag.evaluation.intervals import Score, score_of
from nanodag.store.atomic import write_bytes

MAX_RECORDED_CHARACTERS = 20_000
INVALID = "[invalid]"
"""What filters of lm-eval make of an answer in which they find nothing."""
COUNTS = ("too_long", "unparsed", "truncated")
"""Items that an evaluation counts by themselves: prompts without room, answers in which nothing was parsed, answers cut
at their limit."""
Ending = Literal["stop", "length", "too_long"]


class Answer(str):
    """The text that is scored. It is a `str`, so that lm-eval passes it on with what is known of it.

    ending: `stop` (by itself or at a stop string), `length` (it reached its limit: truncated) or `too_long` (the prompt
    left it no room, so it is empty and was not asked for). thinking: what was left out.
    """

    ending: Ending
    thinking: str

    def __new__(cls, text: Any = "", *, ending: Ending = "stop", thinking: str = "") -> "Answer":
        made = super().__new__(cls, text)
        made.ending, made.thinking = ending, thinking
        return made


def answer_of(
    text: str, *, ending: Ending, tags: ThinkingConfig | None, is_open: bool = False, stops: Sequence[str] = ()
) -> Answer:
    """The answer in a text before the first stop string, without its thinking where tags are given.

    The answer is what stands behind the last end tag, blanks in front left out. Text that begins to think and does not
    end it is all thinking, and the answer empty. is_open: the prompt itself ends with the begin tag.
    """
    text = text[: min((place for stop in stops if (place := text.find(stop)) >= 0), default=len(text))]
    if tags is None:
        return Answer(text, ending=ending)
    thinking, end, answer = text.rpartition(tags.end)
    if not end and (is_open or tags.begin in text):
        thinking, answer = text, ""
    elif not end:
        return Answer(text, ending=ending)
    _, begin, inner = thinking.partition(tags.begin)
    return Answer(answer.lstrip(), ending=ending, thinking=inner if begin else thinking)


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One answer, judged. scores: by metric of the form. parsed: the answer in it, in a form in which equal answers are
    equal strings; empty where none could be parsed. details: what else the record shows."""

    scores: Mapping[str, float]
    parsed: str
    details: Mapping[str, Any] = field(default_factory=dict)


def plain(returned: Mapping[str, Any]) -> dict[str, Any]:
    """Convert what a form's `process_results` returned to JSON: numbers of numpy become Python's.

    Raises ConfigError for what JSON cannot hold, such as a score that is not finite.
    """
    try:
        content: dict[str, Any] = json.loads(json.dumps(returned, allow_nan=False, default=lambda value: value.item()))
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"A form's process_results returned {str(returned)[:200]}, which is no JSON: {error}."
        ) from error
    return content


def judged_from(returned: Mapping[str, Any], text: str, metrics: Sequence[str]) -> Judged:
    """Verdict from what a form's `process_results` returned: its metrics, and maybe `parsed` and `details`.

    text: as lm-eval's filters left it; it is the parsed answer where the function does not name one. metrics: of the
    form, the main one first. Raises ConfigError for a metric that the function did not return.
    """
    if missing := [name for name in metrics if name not in returned]:
        raise ConfigError(f"A form's process_results returned {sorted(returned)} without its metric {missing[0]!r}.")
    parsed = returned.get("parsed", text)
    return Judged(
        scores={name: float(returned[name]) for name in metrics},
        parsed="" if parsed in (None, INVALID) else str(parsed).strip(),
        details=returned.get("details") or {},
    )


@dataclass(frozen=True, kw_only=True)
class BenchmarkResult:
    """base_metric: the form's, of each answer; metrics over samples are made of it. scores: by metric, the main one
    first. records: one an item; `too_long` where its prompt had no room: a written answer is then wrong, a likelihood
    that of a context without its beginning. `unparsed`, `truncated`: how many answers of the item.
    """

    config: BenchmarkConfig
    form: str
    is_chat: bool
    scores: Mapping[str, Score]
    records: list[dict[str, Any]]
    base_metric: str
    higher_is_better: bool = True

    @property
    def metric(self) -> str:
        """The main metric."""
        return next(iter(self.scores))

    @property
    def counts(self) -> dict[str, int]:
        """Items whose prompt is too long, answers that could not be parsed, answers that reached their limit. Each is
        counted by itself: a truncated answer is often unparsed, too."""
        return {name: sum(int(record.get(name, 0)) for record in self.records) for name in COUNTS}

    def as_json(self) -> dict[str, Any]:
        """Everything but the records."""
        return {
            "metric": self.metric,
            "base_metric": self.base_metric,
            "higher_is_better": self.higher_is_better,
            "form": self.form,
            "chat": self.is_chat,
            **{name: getattr(self.config, name) for name in ("num_fewshot", "num_samples", "sampling")},
            **self.counts,
            **asdict(self.scores[self.metric]),
            "metrics": {name: asdict(score) for name, score in self.scores.items()},
        }

    def write_records(self, path: Path) -> None:
        """Write a line of JSON for each item, as nanodag.evaluation.paired reads them."""
        lines = [json.dumps(record, sort_keys=True, ensure_ascii=False, allow_nan=False) for record in self.records]
        write_bytes(path, "".join(line + "\n" for line in lines).encode("utf-8", "surrogatepass"))

    def __str__(self) -> str:
        """`gsm8k exact_match 0.412 +- 0.025, 95 % interval 0.364 to 0.461, 400 items, 3 answers unparsed`."""
        score, counts = self.scores[self.metric], self.counts
        parts = [
            f"{self.config.name} {self.metric} {score.value:.3f} +- {score.stderr:.3f}",
            f"95 % interval {score.low:.3f} to {score.high:.3f}",
            counted(score.num_items, "item"),
        ]
        if counts["too_long"]:
            parts.append(f"{counted(counts['too_long'], 'prompt')} too long")
        parts += [f"{counted(counts[name], 'answer')} {name}" for name in ("unparsed", "truncated") if counts[name]]
        return ", ".join(parts)


def result_of(config: BenchmarkConfig, *, records: list[dict[str, Any]], **how: Any) -> BenchmarkResult:
    """The result of a benchmark's records. Their first score is the main metric. how: the other fields.

    Standard errors are over items, not answers: the samples of an item are not independent. With as many samples for
    each item that is the error of a mean of clusters.

    Source: Miller, arXiv:2411.00640 (clustered standard errors).
    """
    weights = [record["weight"] for record in records] if "weight" in records[0] else None
    scores = {n: score_of([record["scores"][n] for record in records], weights) for n in records[0]["scores"]}
    return BenchmarkResult(config=config, scores=scores, records=records, **how)


def written_record(
    config: BenchmarkConfig,
    *,
    item_id: str,
    prompt: str,
    target: Any,
    answers: Sequence[Answer],
    judged: Sequence[Judged],
) -> dict[str, Any]:
    """An item's record. answers, judged: of each of its samples, in order.

    One sample stands in the record itself: `output`, and where they say something `parsed`, `thinking`, `details`.
    Several stand in `samples`, each with its `scores`.
    """
    record: dict[str, Any] = {"id": item_id, "scores": _scores(config, judged), "prompt": prompt, "target": target}
    if answers[0].ending == "too_long":
        record["too_long"] = True
    else:
        num_unparsed = sum(not verdict.parsed for verdict in judged)
        num_truncated = sum(answer.ending == "length" for answer in answers)
        record |= {name: n for name, n in (("unparsed", num_unparsed), ("truncated", num_truncated)) if n}
    samples = [_sample(answer, verdict) for answer, verdict in zip(answers, judged, strict=True)]
    if config.num_samples == 1:
        return shortened({**record, **samples[0]})
    listed = [{**sample, "scores": dict(verdict.scores)} for sample, verdict in zip(samples, judged, strict=True)]
    return shortened({**record, "samples": listed})


def _scores(config: BenchmarkConfig, judged: Sequence[Judged]) -> dict[str, float]:
    """Scores of an item: the metrics over samples that the benchmark asks for, made of the form's first one, and the
    means of the form's others; of a single sample that asks for none, the form's as they are."""
    means = {name: math.fsum(verdict.scores[name] for verdict in judged) / len(judged) for name in judged[0].scores}
    if not config.metrics_over_samples:
        return means
    first = next(iter(means))
    base, parsed = [verdict.scores[first] for verdict in judged], [verdict.parsed for verdict in judged]
    over = {metric: _over_samples(metric, base, parsed) for metric in config.metrics_over_samples}
    return over | {name: value for name, value in means.items() if name != first}


def _sample(answer: Answer, judged: Judged) -> dict[str, Any]:
    sample: dict[str, Any] = {"output": str(answer)}
    if judged.parsed != str(answer).strip():
        sample["parsed"] = judged.parsed
    if answer.thinking:
        sample["thinking"] = answer.thinking
    if judged.details:
        sample["details"] = dict(judged.details)
    return sample


def shortened(value: Any) -> Any:
    """The value with each text in it cut to what a record holds."""
    if isinstance(value, str):
        return value[:MAX_RECORDED_CHARACTERS]
    if isinstance(value, dict):
        return {key: shortened(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [shortened(inner) for inner in value]
    return value


def _over_samples(metric: str, scores: Sequence[float], parsed: Sequence[str]) -> float:
    """An item's value of `avg@n`, `pass@k` or `maj@n`. scores, parsed: of its n samples; parsed is
    empty where no answer could be parsed."""
    kind, count = metric.split("@")
    if kind == "pass":
        return pass_at(int(count), len(scores), sum(score >= 1.0 for score in scores))
    return math.fsum(scores) / len(scores) if kind == "avg" else majority(scores, parsed)


def pass_at(k: int, num_samples: int, num_right: int) -> float:
    """The chance that one of k samples is right, drawn without putting back from num_samples of which num_right are.

    Unbiased: its mean over draws of num_samples answers is 1 - (1 - p)^k. Raises ValueError for a k above num_samples.

    Source: Chen et al., arXiv:2107.03374, eq. 1.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} needs {k} samples; there are {num_samples}")
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def majority(scores: Sequence[float], parsed: Sequence[str]) -> float:
    """The score of the answer that most samples gave, as parsed. Samples without one have no vote; without any vote it
    is 0. Answers with equally many votes share: the mean of their scores, as if one of them were drawn.

    Source: self-consistency, Wang et al., arXiv:2203.11171.
    """
    votes = Counter(answer for answer in parsed if answer)
    if not votes:
        return 0.0
    most = max(votes.values())
    leading = {answer for answer, count in votes.items() if count == most}
    # All leading answers have equally many samples, so the mean over samples is the mean over answers.
    return math.fsum(s for s, answer in zip(scores, parsed, strict=True) if answer in leading) / (most * len(leading))
