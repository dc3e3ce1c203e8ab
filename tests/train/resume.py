"""Is a stage that was interrupted as good as one that was not? `python -m tests.train.resume [--precision fp32]`.

Every combination of what a checkpoint depends on, in real processes. A stage runs undisturbed; another one with the
same config is ended in its middle and started again: what both publish must be the same to the byte. Then stages go on
under another ZeRO stage (every loss within 1e-5), or by another number of ranks (refused). Printed: every case, and how
many held.
"""

import argparse
import itertools
import json
import math
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

from nanodag.errors.words import counted
from nanodag.tokenizer.bpe import save_tokenizer, train_bpe
from nanodag.worker.job import read_job, write_job
from tests.train import forks, stages

STEPS, CHECKPOINT_EVERY = 9, 2
SIGNALS = {"stopped": signal.SIGTERM, "killed": signal.SIGKILL}
VALUES = ((0, 1, 2, 3), (1, 2, 3), ("muon", "adamw"), tuple(SIGNALS), (0.0, 0.1), (False, True), ("fp32", "bf16"))
ATTEMPTS = 5  # a tiny stage may be through before the signal comes


@dataclass(frozen=True)
class Case:
    """One stage, and how it is interrupted. keeps_best: with patience, the best weights are published."""

    zero_stage: int
    num_ranks: int
    optimizer: str
    ended: str
    weight_decay: float
    keeps_best: bool
    precision: str = "fp32"
    sequence_parallel: int = 1

    def __str__(self) -> str:
        return "-".join(map(str, astuple(self)))

    @property
    def config(self) -> dict[str, Any]:
        """What is trained, without how it is ended. With keeps_best the rate becomes far too high: the best weights
        are not the last."""
        return {
            "zero_stage": self.zero_stage,
            "precision": self.precision,
            "sequence_parallel": self.sequence_parallel,
            "patience": 100 if self.keeps_best else 0,
            "resources": {**stages.RESOURCES, "num_ranks": self.num_ranks},
            "optimizer": {
                "name": self.optimizer,
                "learning_rate": 0.1 if self.keeps_best else 0.01,
                "matrix_lr": 0.5 if self.keeps_best else 0.01,
                "weight_decay": self.weight_decay,
            },
        }


ALL = [Case(*values) for values in itertools.product(*VALUES)]


def pairs() -> Iterator[Case]:
    """Few cases in which every two values of two settings meet."""
    met = {case: set(itertools.combinations(enumerate(astuple(case)), 2)) for case in ALL}
    missing = set().union(*met.values())
    while missing:
        best = max(ALL, key=lambda case: len(missing & met[case]))
        missing -= met[best]
        yield best


def write_inputs(folder: Path) -> None:
    """Documents of made-up words, and a tokenizer of 1,024 tokens."""
    draw = random.Random(1)
    syllables = [a + b for a in "bdfgklmnprst" for b in "aeiou"]
    words = ["".join(draw.choices(syllables, k=draw.randint(1, 4))) for _ in range(2000)]
    documents = [" ".join(draw.choices(words, k=draw.randint(5, 60))) for _ in range(400)]
    (folder / "prose.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    save_tokenizer(train_bpe(iter(documents), 1024), folder / "tokenizer")


def make_job(folder: Path, name: str, changes: dict[str, Any]) -> Path:
    """A pretrain stage whose rate rises all the time."""
    config = stages.pretrain(
        folder,
        horizon_tokens=STEPS * 768,
        batch_tokens=768,  # for 1, 2 and 3 ranks
        micro_batch_tokens=128,
        checkpoint_every=CHECKPOINT_EVERY,
        validation_every=1,
        schedule={"warmup_fraction": 1.0, "decay_fraction": 0.0},
        sample_prompts=[],
        **changes,
    )
    config["shape"] |= {"width": 64, "head_width": 32, "mlp_width": 256}  # of two ranks the first has matrices only
    shutil.rmtree(folder / name, ignore_errors=True)
    return stages.make_job(folder / name, config, {"tokenizer": folder / "tokenizer"})


class Stages:
    """Runs stages in a folder; an undisturbed one is run once for all cases that share it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._undisturbed: dict[str, Path] = {}
        write_inputs(folder)

    def undisturbed(self, case: Case) -> Path:
        key = json.dumps(case.config)
        if key not in self._undisturbed:
            workspace = make_job(self._folder, f"{case}-undisturbed", case.config)
            self.finish(workspace, case.num_ranks)
            self._undisturbed[key] = workspace
        return self._undisturbed[key]

    def interrupted(self, case: Case, *, after_step: int | None = None) -> Path:
        """The workspace of one that was ended after a step: without one, in the middle, after its first checkpoint."""
        for attempt in range(ATTEMPTS):
            workspace = make_job(self._folder, str(case), case.config)
            step = after_step or random.Random(f"{case}-{attempt}").randint(CHECKPOINT_EVERY + 1, STEPS - 4)
            with_signal, num_ranks = SIGNALS[case.ended], case.num_ranks
            forks.interrupt(workspace, after_step=step, with_signal=with_signal, num_ranks=num_ranks)
            if not (workspace / "result.json").exists():
                has_checkpoint = any((workspace / "checkpoints").glob("step-????????"))
                assert has_checkpoint or step <= CHECKPOINT_EVERY, f"{case} has no checkpoint"
                return workspace
        raise AssertionError(f"{case} was through {ATTEMPTS} times before the signal came")

    def finish(self, workspace: Path, num_ranks: int) -> None:
        forks.end(forks.start(workspace, num_ranks=num_ranks))
        assert (workspace / "result.json").exists(), (workspace / "worker.log").read_text()[-6000:]

    def differences(self, case: Case, *, after_step: int | None = None) -> list[str]:
        """What an interrupted stage that went on has other than an undisturbed one: nothing, if all is well."""
        wanted, found = self.undisturbed(case), self.interrupted(case, after_step=after_step)
        self.finish(found, case.num_ranks)
        differing = [
            f"output/{name}"
            for name, content in stages.content(wanted / "output").items()
            if stages.content(found / "output").get(name) != content
        ]
        results = [json.loads((one / "result.json").read_text())["metrics"] for one in (wanted, found)]
        differing += [f"result: {name}" for name in results[0] if results[1].get(name) != results[0][name]]
        if losses(found) != losses(wanted):
            differing.append("metrics.jsonl: a loss, or a step more or less")
        shutil.rmtree(found)
        return differing

    def moved(self, case: Case, zero_stage: int) -> float:
        """By how much a stage that went on under another ZeRO stage is off one that was never interrupted, in nats: the
        largest of all training and validation losses, of which there must be as many. Infinity when documents differ.
        """
        wanted, found = self.undisturbed(case), self.interrupted(case)
        change_job(found, zero_stage=zero_stage)
        self.finish(found, case.num_ranks)
        results = [json.loads((one / "result.json").read_text())["metrics"] for one in (wanted, found)]
        if any(results[0][name] != results[1][name] for name in ("records", "tokens", "label_tokens", "cut_documents")):
            return math.inf
        pairs = zip(losses(found), losses(wanted), strict=True)
        return max(abs(one - other) if step == same else math.inf for (*step, one), (*same, other) in pairs)

    def refusal(self, case: Case, num_ranks: int) -> str:
        """The last words of a stage that is to go on by another number of ranks."""
        workspace = self.interrupted(case)
        change_job(workspace, resources={**stages.RESOURCES, "num_ranks": num_ranks})
        before = stages.content(workspace / "checkpoints")
        codes = forks.end(forks.start(workspace, num_ranks=num_ranks))
        assert not (workspace / "result.json").exists() and 0 not in codes
        assert stages.content(workspace / "checkpoints") == before
        return next(line for line in (workspace / "worker.log").read_text().splitlines()[::-1] if "ConfigError" in line)


def change_job(workspace: Path, **changes: Any) -> None:
    job = read_job(workspace / "job.json")
    config = type(job.config).model_validate(job.config.model_dump(mode="json") | changes)
    write_job(replace(job, config=config))


def losses(workspace: Path) -> list[tuple[str, int, float]]:
    """Every training and validation loss in the order of the steps."""
    lines = [line for line in stages.metrics(workspace) if line["event"] in ("step", "eval")]
    return [(line["event"], line["step"], line.get("loss", line.get("validation_loss"))) for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--only", default="", help="cases whose name this pattern is found in")
    parser.add_argument("--moved", action="store_true", help="other ZeRO stages and numbers of ranks alone")
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        runs = Stages(Path(folder))
        if options.moved:
            sys.exit(not all_moved(runs))
        cases = [case for case in ALL if case.precision == options.precision and re.search(options.only, str(case))]
        num_held = 0
        for case in cases:
            differing = runs.differences(case)
            num_held += not differing
            print(f"{case}: {', '.join(differing) or 'the same bytes'}", flush=True)
    print(f"{num_held} of {len(cases)} cases ended on the same bytes, in {time.monotonic() - began:.0f} s")
    sys.exit(num_held < len(cases))


def all_moved(runs: Stages) -> bool:
    """Every ZeRO stage to every other, every number of ranks to every other; whether all was as it should be."""
    good = True
    for optimizer, before, after in itertools.product(("muon", "adamw"), range(4), range(4)):
        case = Case(before, 2, optimizer, "killed", weight_decay=0.1, keeps_best=False)
        if before != after:
            off = runs.moved(case, after)
            good &= off < 1e-5
            print(f"2 ranks, {optimizer}, ZeRO {before} -> {after}: off by {off:.1e} nats", flush=True)
    for before, after in itertools.permutations((1, 2, 3), 2):
        case = Case(1, before, "muon", "stopped", weight_decay=0.0, keeps_best=True)
        said = runs.refusal(case, after)
        good &= f"written by {counted(before, 'rank')}; this stage runs on {after}" in said
        print(f"{before} -> {after} ranks: {said}", flush=True)
    return good


if __name__ == "__main__":
    main()
