"""A benchmark without torch and lm-eval: its items as chat messages, and scores of what is written to them.

    benchmark = open_benchmark(config, seed=0, mirror="")
    for item in benchmark.items:
        item.messages                              # for the chat template of a model
        benchmark.params(item, 0, max_new_tokens=256)        # of sample 0
    benchmark.result({item.id: [benchmark.answer(text, ending="stop")], ...})      # scores, intervals, counts, records

RL's own evaluation asks its samplers so. An eval stage goes through lm-eval (nanodag.evaluation.harness); both make the
same records of the same answers, but that `prompt` is here the question's turn alone. Only forms whose answers are
written and scored by a `process_results` function can be asked here; lm-eval's filters and metrics are its own.
"""

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from nanodag.config.kinds.evaluation import BenchmarkConfig
from nanodag.errors import ConfigError
from nanodag.evaluation import results
from nanodag.evaluation.forms import WRITTEN, FunctionName, find_form, read_form
from nanodag.evaluation.items import item_options
from nanodag.evaluation.results import Answer, BenchmarkResult, Ending, Judged, plain
from nanodag.inference.protocol import SamplingParams
from nanodag.inference.seeds import derived_seed
from nanodag.own_code.functions import function_at, function_in

_TEMPLATES = Environment(undefined=StrictUndefined, keep_trailing_newline=True)  # as lm-eval's
_TEMPLATES.filters["regex_replace"] = lambda text, pattern, by, count=0: re.sub(pattern, by, text, count=count)

Message = dict[str, str]


def sampling_params(
    config: BenchmarkConfig,
    *,
    item_id: str,
    sample: int,
    seed: int,
    max_new_tokens: int,
    until: Sequence[str],
    stop_token_ids: Sequence[int] = (),
) -> SamplingParams:
    """Sampling of one answer. seed, max_new_tokens: of the stage, where the benchmark has none. until: the form's stop
    strings. The answer's seed follows from (seed, item, sample), not from what else is asked or how many samplers."""
    own_seed = seed if config.seed == "auto" else config.seed
    return SamplingParams(
        max_new_tokens=max_new_tokens if config.max_new_tokens == "auto" else config.max_new_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k or -1,
        stop=tuple(dict.fromkeys((*until, *config.stop))) or None,
        stop_token_ids=tuple(stop_token_ids),
        sampling_seed=derived_seed(own_seed, "benchmark", item_id, sample) if config.temperature else None,
    )


@dataclass(frozen=True, kw_only=True)
class AskedItem:
    """An item of a benchmark. id: a hash of its row. messages: up to the question, the last one the user's. target: the
    right answer, as records show it. doc: what the form's functions get."""

    id: str
    messages: list[Message]
    target: Any
    doc: Mapping[str, Any]


def open_benchmark(config: BenchmarkConfig, *, seed: int, mirror: str = "") -> "Benchmark":
    """The benchmark, asked as a chat. mirror: a folder, empty for the hub.

    seed: of the stage: it draws the items, and samples where the benchmark has no seed. Raises ConfigError for a form
    that does not exist or needs lm-eval itself, SourceError for items that cannot be read.
    """
    return Benchmark(config, *asked_form(config), seed=seed, mirror=mirror)


def asked_form(config: BenchmarkConfig) -> tuple[Path, Mapping[str, Any]]:
    """The form that open_benchmark asks, its file and what it says. Raises ConfigError as that does; reads no items."""
    path, is_chat = find_form(config, chat=True)
    form = read_form(path)
    why = ""
    if form.get("output_type", WRITTEN) != WRITTEN:
        why = "is scored by likelihood"
    elif not is_chat:
        why = f"has no chat form ({path.stem}_chat.yaml)"
    elif "process_results" not in form or "filter_list" in form:
        why = "is scored by lm-eval's own filters or metrics"
    elif "custom_dataset" not in form or config.source is None:
        why = "has no `source:`"
    if why:
        raise ConfigError(
            f"Benchmark {config.name!r} (form {path.stem}) {why}; only an eval stage without a `judge` can ask it."
        )
    return path, form


class Benchmark:
    """See open_benchmark. metrics: of each answer, by the form, the main one first."""

    def __init__(self, config: BenchmarkConfig, path: Path, form: Mapping[str, Any], *, seed: int, mirror: str) -> None:
        self.config = config
        self.metrics: list[str] = [metric["metric"] for metric in form["metric_list"]]
        self._form, self._path = form, path
        self.higher_is_better = bool(form["metric_list"][0].get("higher_is_better", True))
        self._seed = seed
        self._process_results = _function(form["process_results"])
        options = {**(form.get("metadata") or {}), **item_options(config, seed=seed, mirror=mirror)}
        self._docs = _function(form["custom_dataset"])(**options)

    @cached_property
    def items(self) -> list[AskedItem]:
        """Every item, in the order of the source."""
        examples = [message for doc in self._rows("fewshot") for message in self._turn(doc, answered=True)]
        return [
            AskedItem(
                id=str(doc["item_id"]),
                messages=[*self._system(doc), *examples, *self._turn(doc, answered=False)],
                target=self._value("doc_to_target", doc),
                doc=doc,
            )
            for doc in self._rows("test")
        ]

    def params(
        self, item: AskedItem, sample: int, *, max_new_tokens: int, stop_token_ids: Sequence[int] = ()
    ) -> SamplingParams:
        """Sampling parameters of an item's sample. max_new_tokens: where the benchmark does not say."""
        return sampling_params(
            self.config,
            item_id=item.id,
            sample=sample,
            seed=self._seed,
            max_new_tokens=max_new_tokens,
            until=(self._form.get("generation_kwargs") or {}).get("until") or (),
            stop_token_ids=stop_token_ids,
        )

    def answer(self, text: str, *, ending: Ending, is_open: bool = False, stops: Sequence[str] = ()) -> Answer:
        """Answer that a model wrote, as `answer_of` has it."""
        return results.answer_of(text, ending=ending, tags=self.config.thinking, is_open=is_open, stops=stops)

    def judge(self, item: AskedItem, answer: Answer) -> Judged:
        """The scores of one answer. It runs the form's own function, which may take long: a program in the sandbox."""
        return results.judged_from(plain(self._process_results(item.doc, [str(answer)])), str(answer), self.metrics)

    def result(self, answers: Mapping[str, Sequence[Answer]]) -> BenchmarkResult:
        """The scores of all items. answers: num_samples of each item, by its id. Raises KeyError for an item without
        answers, ValueError for another number of them."""
        records = []
        for item in self.items:
            item_answers = answers[item.id]
            if len(item_answers) != self.config.num_samples:
                raise ValueError(f"item {item.id} has {len(item_answers)} answers, not {self.config.num_samples}")
            records.append(
                results.written_record(
                    self.config,
                    item_id=item.id,
                    prompt=item.messages[-1]["content"],
                    target=item.target,
                    answers=item_answers,
                    judged=[self.judge(item, answer) for answer in item_answers],
                )
            )
        return results.result_of(
            self.config,
            form=self._path.stem,
            is_chat=True,
            base_metric=self.metrics[0],
            higher_is_better=self.higher_is_better,
            records=records,
        )

    def _rows(self, split: str) -> list[dict[str, Any]]:
        docs = self._docs.get(split, ())
        if docs and "process_docs" in self._form:
            docs = _function(self._form["process_docs"])(docs)
        return [dict(row) for row in docs]

    def _system(self, doc: Mapping[str, Any]) -> list[Message]:
        """The system prompt of the benchmark and that of the item, joined as lm-eval joins them."""
        own = self._value("description", doc) if self._form.get("description") else ""
        first, between = self.config.system, self._form.get("fewshot_delimiter", "\n\n")
        if first and own and (first[-1].isspace() or own[0].isspace()):
            between = ""
        text = f"{first}{between}{own}" if first and own else first or own
        return [{"role": "system", "content": text}] if text else []

    def _turn(self, doc: Mapping[str, Any], *, answered: bool) -> list[Message]:
        turn = [{"role": "user", "content": str(self._value("doc_to_text", doc))}]
        if answered:
            target = self._value("doc_to_target", doc)
            turn.append({"role": "assistant", "content": str(target[0] if isinstance(target, list) else target)})
        return turn

    def _value(self, field: str, doc: Mapping[str, Any]) -> Any:
        """A field of the form for a row: a function of it, a column, or a template; a list where it is written so."""
        definition = self._form[field]
        if isinstance(definition, FunctionName):
            return _function(definition)(doc)
        if not isinstance(definition, str):
            return definition
        if definition in doc:
            return doc[definition]
        text = _TEMPLATES.from_string(definition).render(**doc)
        if field == "doc_to_target" and text.startswith("[") and text.endswith("]"):
            try:
                return ast.literal_eval(text)
            except (SyntaxError, ValueError):
                return text
        return text


def _function(name: FunctionName) -> Callable[..., Any]:
    """A form's function, of a module beside the form or else of one that can be imported, as lm-eval does it."""
    module, _, function = name.rpartition(".")
    file = name.module_beside
    try:
        member: Callable[..., Any] = function_in(file, function) if file else function_at(f"{module}:{function}")
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"A form names the function {name}, which cannot be imported: {error}.") from error
    return member
