"""Rollouts of an RL stage, finished or under way: where they lie, how they are read, and which are asked for."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nanodag.config.kind import MODEL
from nanodag.config.kinds import recorded_kind
from nanodag.errors import ArtifactNotFound
from nanodag.rl.rollouts.metrics import Timed
from nanodag.rl.rollouts.rollout import GENERATE_FAILED, REWARD_FAILED, Rollout, read_lines, read_rollouts
from nanodag.store import Artifact, Store
from nanodag.store.run_record import RunRecord, StageRecord

TRAINED = "trained"
NOT_TRAINED = "not_trained"  # the sequence of a role that learns nothing, in a sample that was trained
FAILURES = (GENERATE_FAILED, REWARD_FAILED)
FAILED = "failed"  # asks for both of these fates
GROUP_FAILED = "group_failed"  # a sample with a reward, of a group in which too many others have none
HELD_OUT = "held_out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """A rollout and what became of it. fate: `trained`, `not_trained`, `held_out`, `reward_failed`, `generate_failed`,
    `group_failed`, or a filter's reason. answer, messages: the right answer and the prompt's; empty where none were
    kept. advantages, differences: of a trained one, an entry for each token after the prompt, None where it was not
    trained: the advantage, and the trainer's log-probability less the sampler's, in nats; both are empty where the
    trainer wrote none."""

    rollout: Rollout
    fate: str
    answer: str = ""
    messages: tuple[Mapping[str, Any], ...] = ()
    advantages: tuple[float | None, ...] = ()
    differences: tuple[float | None, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Rollouts to show. lowest, highest: of the reward; fate: empty for any, `failed` for whatever has failed;
    prompt: part of a prompt's id; sample: its index, None for any."""

    lowest: float | None = None
    highest: float | None = None
    fate: str = ""
    finish: str = ""
    role: str = ""
    prompt: str = ""
    sample: int | None = None

    def is_met_by(self, read: Read) -> bool:
        rollout = read.rollout
        if self.lowest is not None and (rollout.reward is None or rollout.reward < self.lowest):
            return False
        if self.highest is not None and (rollout.reward is None or rollout.reward > self.highest):
            return False
        if self.finish not in ("", rollout.finish_reason) or self.role not in ("", rollout.role):
            return False
        if self.sample not in (None, rollout.sample_index) or self.prompt not in rollout.prompt_id:
            return False
        return self.fate in ("", read.fate) or (self.fate == FAILED and read.fate in FAILURES)


@dataclass(frozen=True, kw_only=True)
class Shelf:
    """One RL stage's records. records: the folder with rollouts/, ledger.jsonl and timeline.jsonl; metrics: the file of
    its metrics; model: a folder with the tokenizer."""

    run: str
    stage: str
    records: Path
    metrics: Path
    model: Path

    def steps(self) -> list[dict[str, Any]]:
        """The metrics of each step that was trained, in order."""
        return [line for line in read_lines(self.metrics) if line.get("event", "step") == "step" and line["step"] > 0]

    def evaluations(self) -> list[int]:
        """The steps after which held-out prompts were answered."""
        paths = (self.records / "rollouts").glob("eval-*.jsonl")
        return sorted(_step_of(path) for path in paths if not path.name.endswith(".answers.jsonl"))

    def read(self, step: int, *, held_out: bool = False) -> list[Read]:
        """The rollouts of a step, those that were trained first; with held_out those of its evaluation. Raises
        ArtifactNotFound when there are none, SourceError when a line is no rollout."""
        path = self.records / "rollouts" / f"{'eval' if held_out else 'step'}-{step:08d}.jsonl"
        reads = [Read(rollout=r, fate=HELD_OUT) for r in _of(path)] if held_out else self._read_training(step, path)
        prompts = {line["prompt_id"]: line for line in read_lines(path.with_suffix(".answers.jsonl"))}
        lines = [prompts.get(read.rollout.prompt_id, {}) for read in reads]
        return [
            replace(read, answer=line.get("answer", ""), messages=tuple(line.get("messages", ())))
            for read, line in zip(reads, lines, strict=True)
        ]

    def _read_training(self, step: int, path: Path) -> list[Read]:
        paths = sorted(path.parent.glob(f"step-{step:08d}.scores-*.jsonl"))
        lines = [line for scores_path in paths for line in read_lines(scores_path)]
        scores = {(line["group_id"], line["sample_index"], line.get("branch", 0)): line for line in lines}
        reasons = {
            f"{line['prompt_id']}@{line['epoch']}": line["reason"]
            for line in read_lines(self.records / "ledger.jsonl")
            if line["step"] == step and line["outcome"] == "dropped"
        }
        dropped = path.with_suffix(".dropped.jsonl")
        left = list(read_rollouts(dropped)) if dropped.exists() else []
        return [
            *(_with_scores(rollout, scores) for rollout in _of(path)),
            *(Read(rollout=r, fate=_why_left(r, reasons.get(r.group_id, ""))) for r in left),
        ]

    def timeline(self, step: int) -> list[Timed]:
        """Spans that ended between the step before and this one: name, begin, end in seconds since 1970."""
        lines = read_lines(self.records / "timeline.jsonl")
        spans = next((line["spans"] for line in lines if line["step"] == step), ())
        return [(name, begin, end) for name, begin, end in spans]

    def steps_with_rollouts(self) -> list[int]:
        """The steps whose rollouts are kept, in order."""
        return sorted(set(map(_step_of, (self.records / "rollouts").glob("step-*.jsonl"))))


def shelf_of(store: Store, record: RunRecord, stage: str = "") -> Shelf:
    """The shelf of a run's RL stage; of its last one that has begun, unless named. Raises ArtifactNotFound when the run
    has none."""
    entries = record.stages.items()
    begun = [s for s, e in entries if recorded_kind(e.kind).config.makes_rollouts and _has_begun(e)]
    if not begun or (stage and stage not in begun):
        label = f"stage {stage!r}" if stage else "stage"
        raise ArtifactNotFound(
            f"Run {record.run} has no RL {label} that has begun; it has {', '.join(begun) or 'none'}."
        )
    name = stage or begun[-1]
    entry = record.stages[name]
    if entry.artifact is not None:
        artifact = store.attempt(*entry.artifact)
        records, model = store.verified(artifact, "records"), store.verified(_model_of(store, artifact), "files")
        metrics = records / "metrics.jsonl"
    else:
        workspace = Path(entry.workspace)
        records, metrics = workspace / "records", workspace / "metrics.jsonl"
        model = Path(json.loads((workspace / "job.json").read_text(encoding="utf-8"))["inputs"]["model"])
    return Shelf(run=record.run, stage=name, records=records, metrics=metrics, model=model)


def _model_of(store: Store, artifact: Artifact) -> Artifact:
    """Model whose tokenizer the rollouts have: the stage's own product, or, where that is no model, its input."""
    if recorded_kind(artifact.kind).makes == MODEL:
        return artifact
    source = artifact.lineage["model"]
    return store.attempt(str(source["key"]), str(source["attempt"]))


def _has_begun(entry: StageRecord) -> bool:
    return entry.made is not None or (entry.workspace != "" and (Path(entry.workspace) / "records").is_dir())


def _with_scores(rollout: Rollout, scores: Mapping[tuple[str, int, int], Mapping[str, Any]]) -> Read:
    entry = scores.get((rollout.group_id, rollout.sample_index, rollout.branch))
    if entry is None:
        return Read(rollout=rollout, fate=TRAINED if rollout.num_trained else NOT_TRAINED)
    advantages, differences = tuple(entry["advantages"]), tuple(entry["differences"])
    return Read(rollout=rollout, fate=TRAINED, advantages=advantages, differences=differences)


def _why_left(rollout: Rollout, reason: str) -> str:
    """The fate of what was not trained. A sample without a reward has failed, whatever became of its group. reason:
    why its group was dropped; empty where the ledger does not say."""
    if rollout.reward is None:
        return GENERATE_FAILED if rollout.finish_reason == "error" else REWARD_FAILED
    return GROUP_FAILED if reason in ("", *FAILURES) else reason


def _of(path: Path) -> list[Rollout]:
    if not path.exists():
        raise ArtifactNotFound(f"There is no {path.name} in {path.parent}; that step was not reached.")
    return list(read_rollouts(path))


def _step_of(path: Path) -> int:
    return int(path.name.split(".")[0].rpartition("-")[2])
