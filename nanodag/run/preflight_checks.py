"""`python -m nanodag.run.preflight_checks ANSWER DOING`: looks at what a pipeline on stdin names, and writes what is
wrong with it into the file ANSWER; the file DOING says what is being looked at. No torch, unless a user's own module
has it.
"""

import inspect
import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable
from functools import lru_cache, partial
from math import ceil
from pathlib import Path
from typing import Any

from nanodag import registry
from nanodag.config import AnyStage, Pipeline
from nanodag.config.derive import BUNDLE
from nanodag.config.kinds import find_kind, vouch_for
from nanodag.config.kinds.evaluation import BenchmarkConfig, EndpointConfig
from nanodag.config.model_size import began_at
from nanodag.config.pipeline import SERVICES
from nanodag.config.rl_checks import check_lora
from nanodag.config.rl_parts import EntryConfig
from nanodag.config.rl_sections import PolicyBenchmarkConfig
from nanodag.config.section import found_in
from nanodag.config.stage_base import ExternalInput
from nanodag.data.adapters import kind_of, open_adapter
from nanodag.data.config import SourceConfig, mixes_by_epochs
from nanodag.data.core_tasks import find_files
from nanodag.data.files import FileSource
from nanodag.data.opening import open_part, open_source
from nanodag.data.question_form import asking, check_effect, with_names
from nanodag.data.records import Kind
from nanodag.data.urls import WEB, parse_url
from nanodag.errors import ConfigError, NanodagError
from nanodag.errors.words import listed
from nanodag.evaluation.benchmark import asked_form
from nanodag.evaluation.forms import FORMS, check_likelihood, check_served, find_form, form_files, read_form
from nanodag.external_envs.verifiers_process import module_file
from nanodag.inference.engine_install import TITLES, find_python
from nanodag.model.model_source import local_files, model_commit
from nanodag.own_code.find import file_of, required_file, search_last
from nanodag.own_code.functions import function_at
from nanodag.own_code.user_frame import with_place
from nanodag.registry import CALLED_WITH
from nanodag.rewards import sandbox
from nanodag.rewards.judge import read_judge
from nanodag.rl.rollouts.saved import check_steps, read_saved, saved_files
from nanodag.run.build_stage import server_identity
from nanodag.run.preflight import state_of
from nanodag.store import write_json

NUM_ROWS = 3
ROWS_FOR_A_SHARE = 20  # none of so many times 1 / held_out rows is held out with a chance of e-20


class Checks:
    """Looks at one stage after the other and collects faults, each said once with its settings. relied_on: files that
    what passed depends on. only_names: the hub is not asked, and it does not matter which tools this machine has."""

    def __init__(self, pipeline: Pipeline, doing: Path, *, only_names: bool = False) -> None:
        self._noted: list[tuple[str, str]] = []  # a setting, and its fault
        self.relied_on: set[str] = set()
        self._pipeline = pipeline
        self._mirror = None if pipeline.mirror == "none" else Path(pipeline.mirror)
        self._doing = doing
        self._only_names = only_names
        self._seen: set[str] = set()
        self._open = lru_cache(None)(partial(open_source, mirror=self._mirror))  # some are parsed as a whole for a row

    @property
    def faults(self) -> list[str]:
        """A line for each fault, behind the settings that have it."""
        settings_of = {why: [where for where, other in self._noted if other == why] for _, why in self._noted}
        return [f"{listed(settings)}: {why}" for why, settings in settings_of.items()]

    def trackers(self) -> None:
        """Look whether the pipeline's trackers are installed."""
        for name in self._pipeline.tracking.trackers:
            if name in SERVICES and not self._only_names and file_of(name) is None:
                why = f"{name} is not installed; run: pip install 'nanodag[{name}]'"
                self._noted.append(("tracking.trackers", why))

    def stage(self, name: str) -> None:
        stage = self._pipeline.stages[name]
        if stage.machines:
            hostfile = os.path.expandvars(self._pipeline.cluster.hostfile)
            if "$" not in hostfile:  # else it is known where the stage runs, and not here
                self._try("cluster.hostfile", hostfile, lambda: self._need_file(hostfile))
        code = self._pipeline.stages[began_at(self._pipeline, name)].known_code
        if getattr(stage, "precision", "") == "fp8":
            if code:
                self._noted.append((f"{name}.precision", f"fp8 is of our decoder, not of {code}; set it to bf16"))
            if not self._only_names and file_of("torchao") is None:
                self._noted.append((f"{name}.precision", "torchao is not installed; run: pip install 'nanodag[fp8]'"))
        takes_names = stage.guest is not None and stage.guest.engine == "sglang"
        if code and takes_names and getattr(getattr(stage, "weights", None), "lora_sync", "") == "adapter":
            self._noted.append((f"{name}.weights.lora_sync", f"SGLang takes no adapters of {code}; set it to merged"))
        if ":" in stage.kind:
            for module in (stage.kind.partition(":")[0], find_kind(stage.kind).module):
                self._try(f"{name}.kind", f"module {module}", partial(self._module, module))
        for label, sources in stage.mixtures():
            num_faults = len(self._noted)
            self._try(f"{name}.{label}", f"mixture {sources}", partial(mixes_by_epochs, sources))
            for number, source in enumerate(sources):
                if self._can_read(source.url):
                    self._source(f"{name}.{label}.{number}", source, stage)
            if len(self._noted) == num_faults and all(self._can_read(source.url) for source in sources):
                self._try(f"{name}.{label}", f"held out of {sources}", partial(self._held_out, stage, sources))
        for where, endpoint in found_in(stage, EndpointConfig):
            if endpoint.model and not self._only_names:
                self._try(f"{name}.{where}", f"endpoint {endpoint}", partial(server_identity, endpoint.url, endpoint))
        for where, benchmark in found_in(stage, BenchmarkConfig):
            if stage.is_served:
                self._try(f"{name}.{where}", f"served {benchmark}", partial(check_served, benchmark))
            self._benchmark(f"{name}.{where}", benchmark, is_chat=stage.asks_in_chat)
        if stage.guest is not None and not self._only_names:
            python, device, engine = stage.guest.python, stage.resources.device, stage.guest.engine
            assert device != "auto" and engine in TITLES  # derived
            self._try(f"{name}.sampler.python", f"{engine} {python}", partial(find_python, python, device, engine))
        for external in stage.external_inputs():
            self._external(f"{name}.{external.setting}", external)
        for where, entry in found_in(stage, EntryConfig):
            self._entry(f"{name}.{where}", stage, entry)
        if stage.lora_rank:
            self._try(f"{name}.optimizer.lora_rank", f"lora {name}", partial(self._lora, name, stage.lora_rank))

    def _try(self, where: str, what: str, look: Callable[[], object], hint: str = "") -> None:
        """Note the fault that looking raises, with what else to do; what is named twice is looked at once."""
        if what in self._seen:
            return
        self._doing.write_text(f"{where}: {what}")
        self._seen.add(what)
        try:
            look()
        except NanodagError as error:
            self._noted.append((where, f"{' '.join(str(error).split())}{hint}"))

    def _need_file(self, path: str) -> None:
        if not Path(path).is_file():
            raise ConfigError(f"there is no file {path}")
        self.relied_on.add(path)

    def _can_read(self, url: str) -> bool:
        """False for what is made by then, and for what another machine or a guest has, where only names are looked
        at."""
        kind, far = parse_url(url).kind, ("hub", *WEB) if self._mirror is None else ()
        return kind != "input" and not (self._only_names and kind in ("verifiers", *far))

    def _source(self, where: str, source: SourceConfig, stage: AnyStage) -> None:
        kind = None if stage.record_kind is None else kind_of(source.adapter, source.url, stage.record_kind)
        read = source.model_dump(exclude={"url", "weight", "epochs", "held_out"}, exclude_defaults=True)
        rewards = [entry.name for _, entry in found_in(stage, EntryConfig) if entry.kind == "reward"]
        what = f"{source.url} {read} as {kind} for {rewards}"
        self._try(where, what, lambda: _check_metadata(self._rows(source, kind), rewards, source.url))

    def _held_out(self, stage: AnyStage, sources: tuple[SourceConfig, ...]) -> None:
        """A share of few rows may be none of them; as many are read as hold one with near certainty."""
        record_kind, held_out = stage.record_kind, [source for source in sources if source.held_out]
        if not stage.measures_held_out or record_kind is None or not held_out:
            return
        if any(isinstance(s.held_out, str) or s.url.startswith(("hub:", "input:")) for s in held_out):
            return  # a whole file, or rows that are many, or not there yet
        counts = []
        for source in held_out:
            kind = kind_of(source.adapter, source.url, record_kind)
            record_of = open_adapter(source.adapter, source.url, kind, source.options, source.columns)
            _, belongs = open_part(source, "held_out", self._mirror)
            num_rows = ceil(ROWS_FOR_A_SHARE / float(source.held_out))
            rows = list(itertools.islice(self._open(source.url).rows(), num_rows))
            if any(belongs(record_of(number, row)) for number, row in rows):
                return
            counts.append(f"{100 * float(source.held_out):g} % of the {len(rows):,} rows of {source.url}")
        raise ConfigError(
            f"held_out: {', '.join(counts)} is none, so nothing would be measured. Raise the share, e.g. to 0.1, or "
            "leave held_out away"
        )

    def _rows(self, source: SourceConfig, kind: Kind | None) -> list[dict[str, Any]]:
        """The first rows, as records of a kind, or as they are; the source is not empty."""
        url = parse_url(source.url)
        if url.kind == "python":
            self._module(url.path)
        if ":" in source.adapter:
            self._import(source.adapter)
        try:
            opened = self._open(source.url)
            rows = list(itertools.islice(opened.rows(), NUM_ROWS))
        except NanodagError:
            raise
        except Exception as error:  # a user's function, or a file's content, may raise whatever it likes
            raise ConfigError(f"{source.url} cannot be read: {with_place(error)}") from error
        inner = getattr(opened, "_source", opened)
        if isinstance(inner, FileSource):
            self.relied_on.update(str(path) for path in inner.paths)
        if not rows:
            raise ConfigError(f"{source.url} is empty: it has no rows")
        if kind is None:
            return [row for _, row in rows]
        record_of = open_adapter(source.adapter, source.url, kind, source.options, source.columns)
        ask = asking(source, kind)
        try:
            records = [ask(record_of(index, row)) for index, row in rows]
        except NanodagError:
            raise
        except Exception as error:  # a user's adapter
            what = f"adapter {source.adapter} fails at a row of {source.url}"
            raise ConfigError(f"{what}: {with_place(error)}") from error
        return records

    def _benchmark(self, where: str, benchmark: BenchmarkConfig, *, is_chat: bool) -> None:
        if benchmark.is_core:
            assert benchmark.source is not None  # derived
            self._core(f"{where}.source", benchmark.source.url)
            self._try(where, f"benchmark {benchmark}", partial(check_likelihood, benchmark))
            return

        def look() -> None:
            form, _ = find_form(benchmark, chat=is_chat)
            self.relied_on.update(map(str, [form, *form_files(benchmark)]))
            if isinstance(benchmark, PolicyBenchmarkConfig) or benchmark.judge != "none":
                asked_form(benchmark)
            if benchmark.judge != "none":
                read_judge(benchmark.judge, compares=True)
            reader = str(read_form(form).get("custom_dataset", ""))  # empty where lm-eval has data of its own
            if reader == _RUNS_PROGRAMS and not self._only_names:
                sandbox.walls()
            kind = _KIND_OF_READER.get(reader)
            for source in (benchmark.source, benchmark.fewshot):
                if source is not None and self._can_read(source.url):
                    rows = self._rows(source, kind)
                    if kind is None:
                        check_effect(source, "row")
                        _check_columns(form, with_names(rows[0], source), source.url)

        self._try(where, f"benchmark {benchmark} chat {is_chat}", look)

    def _core(self, where: str, url: str) -> None:
        hint = f" Set core_bundle to {BUNDLE}, or a folder with its files, or core_bundle=none to leave CORE out"

        def look() -> None:
            if self._can_read(url):
                self.relied_on.update(map(str, find_files(url, self._mirror).values()))

        self._try(where, f"core {url}", look, hint)

    def _model(self, model: str) -> None:
        files = local_files(model, self._mirror)
        if files is None:
            if not self._only_names:
                model_commit(model)
            return
        self.relied_on.update(str(path) for path in files)

    def _external(self, where: str, external: ExternalInput) -> None:
        """Look at what a stage reads besides its data; a server is asked when the stage's key is made."""
        _, what, name, num_steps = external
        if what == "core":
            self._core(where, name)
        elif what == "rollouts":
            self._try(where, name, lambda: self._rollouts(name, num_steps))
        elif what == "model":
            self._try(where, name, partial(self._model, f"file:{name}" if name.startswith("/") else name))

    def _entry(self, where: str, stage: AnyStage, entry: EntryConfig) -> None:
        """Look at what of the user's own an entry names."""
        if entry.name.startswith("model:/"):
            self._external(where, ExternalInput(where, "model", entry.name.removeprefix("model:")))
        if entry.own_function:
            self._try(where, f"{entry.kind} {entry}", partial(self._function, stage, entry))
        if file := entry.own("file"):
            self._try(where, file, partial(read_judge, file))
        if module := entry.own("module"):
            self._try(where, entry.name, lambda: self.relied_on.add(str(module_file(module))))

    def _rollouts(self, source: str, num_steps: int) -> None:
        saved = saved_files(source)
        check_steps(saved, num_steps=num_steps)
        next(read_saved(saved.files[0]), None)
        self.relied_on.update(map(str, saved.files))

    def _lora(self, name: str, rank: int) -> None:
        """Compare the rank with the width of the model that a stage begins at, where that is imported from a folder."""
        model = self._pipeline.stages[began_at(self._pipeline, name)].known_model
        files = local_files(model, self._mirror) if model else None
        path = next((path for path in files or () if path.name == "config.json"), None)
        if path is None:
            return
        try:
            width = int(json.loads(path.read_text())["hidden_size"])
        except (ValueError, KeyError, TypeError):
            return
        check_lora(name, rank, width)

    def _function(self, stage: AnyStage, entry: EntryConfig) -> None:
        path, traits = entry.own_function, entry.traits
        passes_on = traits is not None and traits.passes_on
        # It is run by an interpreter that may have other packages.
        if entry.kind == "generate" and path != entry.name and not passes_on:
            self._module(path)
            python = str(entry.options.get("python", "auto"))
            if python != "auto" and shutil.which(python) is None:
                raise ConfigError(f"the agent's python {python} is no program; give an interpreter's path, or auto")
            return
        function = self._import(path)
        if (loaded := stage.load_entry(entry)) is None:
            return
        prefix = entry.name.partition(":")[0] if path != entry.name else ""
        arguments = CALLED_WITH[prefix or entry.kind]
        own = traits.options if traits is not None and passes_on else ()
        options = {name: value for name, value in entry.options.items() if name not in own}
        try:
            if prefix:
                inspect.signature(function).bind(*arguments, **options)
            else:
                inspect.signature(loaded).bind(*arguments)
        except TypeError as error:
            raise ConfigError(f"{path} is called with ({', '.join(arguments)}): {error}") from error
        except ValueError:  # written in C: it does not say
            return

    def _module(self, path: str) -> Path:
        file = required_file(path.partition(":")[0], path)
        self.relied_on.add(str(file))
        return file

    def _import(self, path: str) -> Callable[..., Any]:
        file = self._module(path)
        try:
            target = function_at(path)
        except AttributeError as error:
            raise ConfigError(f"{path}: {file} has no function {path.partition(':')[2]}") from error
        except Exception as error:  # a user's module may raise whatever it likes
            raise ConfigError(f"{path} cannot be imported: {with_place(error)}") from error
        if not callable(target):
            raise ConfigError(f"{path} is no function: {file} has it as {target!r:.60}")
        return target


def _check_metadata(records: list[dict[str, Any]], rewards: list[str], url: str) -> None:
    """Raise ConfigError where a reward of ours reads what a prompt does not have: it would fail for every answer."""
    for number, record in enumerate(records if rewards else ()):
        for name in (record["reward"] if reward == "auto" else reward for reward in rewards):
            entry = registry.find("reward", name)
            missing = [key for key in (entry.reads_metadata if entry else ()) if not record["metadata"].get(key)]
            if missing:
                raise ConfigError(
                    f"the reward {name} reads metadata.{missing[0]} of a prompt, and row {number} of {url} has none; "
                    "give it with an adapter or in the rows, or name another reward"
                )


_RUNS_PROGRAMS = "nanodag.evaluation.benchmark_functions.programs"
_KIND_OF_READER: dict[str, Kind] = {
    "nanodag.evaluation.items.problems": "prompt",
    _RUNS_PROGRAMS: "prompt",
    "nanodag.evaluation.items.documents": "document",
    "nanodag.evaluation.items.continuations": "document",
}


def _check_columns(form: Path, row: dict[str, Any], url: str) -> None:
    """Raise ConfigError where a form speaks of a column that the row lacks: lm-eval would take it as empty."""
    from jinja2 import Environment, TemplateSyntaxError, meta

    read = read_form(form)
    if "process_docs" in read:  # which makes columns of its own
        return
    columns: set[str] = set()
    for field in ("doc_to_text", "doc_to_target", "doc_to_choice"):
        text = read.get(field)
        if isinstance(text, str) and text.isidentifier() and form.parent == FORMS:
            columns.add(text)  # of ours it is always a column; elsewhere it may be text
        elif isinstance(text, str) and "{{" in text:
            try:
                columns |= meta.find_undeclared_variables(Environment().parse(text))
            except TemplateSyntaxError as error:
                raise ConfigError(f"{form.name}: {field} is no template: {error}") from error
    if missing := sorted(columns - row.keys()):
        raise ConfigError(f"{url} has no column {missing[0]!r}, which {form.name} asks for; it has {', '.join(row)}")


def main() -> None:
    answer, doing = Path(sys.argv[1]), Path(sys.argv[2])
    request = json.loads(sys.stdin.read())
    search_last(Path(request["file"]).parent)  # as in a worker
    vouch_for(Path(request["file"]), request["pipeline"]["trusted_modules"])
    checks = Checks(Pipeline.model_validate(request["pipeline"]), doing, only_names=request["only_names"])
    checks.trackers()
    for name in request["stages"]:
        checks.stage(name)
    states = {path: state_of(path) for path in sorted(checks.relied_on)}
    write_json(answer, {"faults": checks.faults, "relied_on": states})
    sys.stdout.flush()
    os._exit(0)  # whatever threads a user's module has started


if __name__ == "__main__":
    main()
