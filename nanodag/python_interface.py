"""Runs, stages and results as Python objects: names that `import nanodag` offers. Errors are those of the commands."""

import json
from pathlib import Path
from typing import Any

from pandas import DataFrame

from nanodag.cli.plan import planned as plan  # noqa: F401 - offered as it is
from nanodag.cli.run import run_pipeline
from nanodag.cli.show import find_run
from nanodag.config.kind import MODEL, REWARD_MODEL, SCORES
from nanodag.config.kinds import recorded_kind
from nanodag.errors import ArtifactNotFound, StageFailed
from nanodag.evaluation.paired import read_records
from nanodag.rl.rollouts.export import rollout_rows
from nanodag.rl.rollouts.rollout import read_lines
from nanodag.rl.rollouts.rollout_files import shelf_of
from nanodag.run.record import served_store
from nanodag.store import Store
from nanodag.store.run_record import RunRecord


def open_store(url: str | Path = "", *, file: str = "") -> "StoreView":
    """The store at a path or URL, else of NANODAG_STORE, else of the pipeline file. Raises ConfigError, StoreError."""
    store = served_store(file, str(url))
    return StoreView(store.url, local=store.local)


def run(preset: str = "auto", *overrides: str, file: str = "", name: str = "", stale: bool = False) -> "RunView":
    """Run a pipeline as `nanodag run` does; a `name` there is resumes. Raises ConfigError, StageFailed at a bad end."""
    store, name, code = run_pipeline(overrides, preset=preset, file=file, name=name, detach=False, stale=stale)
    if code:
        raise StageFailed(f"Run {name} in {store.url} has not completed; resume it with nanodag.run(name={name!r}).")
    return RunView(store, store.read_run(name))


class StoreView(Store):
    """The store, with its runs."""

    def run(self, name: str = "") -> "RunView":
        """The run whose name begins so; else the newest one. Raises ArtifactNotFound when none or several do."""
        return RunView(self, find_run(self, name))


class RunView(dict[str, "StageView"]):
    """A run's stages by name, as they were when it was read. record: state, preset, overrides, times."""

    def __init__(self, store: Store, record: RunRecord) -> None:
        super().__init__({name: StageView(store, record, name) for name in record.stages})
        self.record = record

    def __missing__(self, stage: str) -> "StageView":
        raise ArtifactNotFound(f"Run {self.record.run} has no stage {stage!r:.100}; it has {', '.join(self)}.")

    def scores(self) -> DataFrame:
        """Scores of every finished eval stage, as the stages have them."""
        evals = (s for s in self.values() if s.makes == SCORES and s.record.has_ended_well)
        return DataFrame(row for stage in evals for row in stage.scores().to_dict("records"))


class StageView:
    """A stage of a run. A result that it does not have, or not yet, raises ArtifactNotFound."""

    def __init__(self, store: Store, run: RunRecord, name: str) -> None:
        self.store, self.run, self.name, self.record = store, run, name, run.stages[name]
        self.makes = recorded_kind(self.record.kind).makes

    def __repr__(self) -> str:
        return f"<{self.record.kind}: {self.record.state}>"

    @property
    def path(self) -> Path:
        """Local folder with the stage's files, each verified."""
        return self.store.materialize(self.store.get(f"{self.run.run}:{self.name}"))

    def metrics(self) -> DataFrame:
        """Lines of metrics.jsonl; of a stage under way those so far."""
        if self.record.made is None and self.record.workspace:
            return DataFrame(read_lines(Path(self.record.workspace) / "metrics.jsonl"))
        records = self.store.verified(self.store.get(f"{self.run.run}:{self.name}"), "records")
        return DataFrame(read_lines(records / "metrics.jsonl", is_whole=True))

    def scores(self) -> DataFrame:
        """Scores of an eval stage, a row each: stage, model, benchmark, metric, value, low, high (95 %), ..."""
        if self.makes != SCORES:
            raise ArtifactNotFound(f"Stage {self.name} makes {self.makes}; name a stage that makes scores.")
        found = json.loads((self.path / "results.json").read_text(encoding="utf-8"))["benchmarks"]
        return DataFrame({"stage": self.name, **self.record.inputs, "benchmark": n, **one} for n, one in found.items())

    def samples(self) -> DataFrame:
        """Answers of an eval stage, a row an item: benchmark, id, scores, prompt, target, output, ..."""
        names, folder = self.scores()["benchmark"], self.path / "samples"
        return DataFrame({"benchmark": n, **line} for n in names for line in read_records(folder / f"{n}.jsonl"))

    def rollouts(self, step: int | None = None) -> DataFrame:
        """Samples of an RL step, the newest unless given, in the columns of `nanodag rollouts --export`."""
        shelf = shelf_of(self.store, self.run, self.name)
        step = max(shelf.steps_with_rollouts(), default=0) if step is None else step
        return DataFrame(rollout_rows(shelf, step=step))

    def load_model(self, **options: Any) -> tuple[Any, Any]:
        """Model and tokenizer by transformers; of a reward model's stage a classifier. options: of from_pretrained."""
        if self.makes not in (MODEL, REWARD_MODEL):
            raise ArtifactNotFound(f"Stage {self.name} makes {self.makes}; name a stage that makes a model.")
        from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

        auto, folder = AutoModelForCausalLM if self.makes == MODEL else AutoModelForSequenceClassification, self.path
        model = auto.from_pretrained(folder, **options, use_safetensors=True, trust_remote_code=False)
        return model, AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
