"""What stands in the place of a side that a stage leaves out (`only: rollouts`, `only: training`). No torch here."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nanodag.rl.rollouts.batch import RolloutBatch
from nanodag.rl.rollouts.prompts import Prompt, PromptCursor
from nanodag.rl.rollouts.rollout import Rollout, groups_of, read_rollouts
from nanodag.rl.rollouts.saved import check_steps, saved_steps


class NoTrainer:
    """In the place of the trainer's ranks, where nothing is trained: its weights stay those of `model`."""

    num_ranks = 0

    def __init__(self, model: Path) -> None:
        self._model = model

    def accept(self, *, timeout_s: float, check: Callable[[], None]) -> None:
        """There is nobody to wait for."""

    async def exchange(self, do: str, **arguments: Any) -> list[dict[str, Any]]:
        """What a rank that made no update would say; `export` copies the model."""
        if do == "export":
            shutil.copytree(self._model, arguments["folder"], dirs_exist_ok=True)
        return [{"num_updates": 0}]

    def close(self) -> None:
        """There is nobody to end."""


class SavedRollouts:
    """In the place of a RolloutGenerator, where nothing is sampled: what another stage trained, step by step. folder:
    `rollouts` among that stage's records."""

    def __init__(self, folder: Path, *, num_steps: int) -> None:
        self._files = saved_steps(folder)
        check_steps(self._files, folder, num_steps=num_steps)

    async def step(self, cursor: PromptCursor, step: int) -> RolloutBatch:
        """The groups of one step, in the order in which they were trained."""
        groups = groups_of(list(read_rollouts(self._files[step]))).values()
        answers = self._answers(step)
        return RolloutBatch(kept=[(_prompt_of(group[0], answers), group) for group in groups])

    async def judged_again(
        self, cursor: PromptCursor, step: int, waiting: Sequence[RolloutBatch]
    ) -> tuple[RolloutBatch, ...]:
        """The rollout batches of a checkpoint, as they are."""
        return tuple(waiting)

    async def answers(self, prompts: Sequence[Prompt]) -> list[Rollout]:
        """Never asked: nobody could answer."""
        raise AssertionError("an evaluation without samplers")

    def _answers(self, step: int) -> dict[str, str]:
        path = self._files[step].with_suffix(".answers.jsonl")
        if not path.exists():
            return {}
        lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        return {line["prompt_id"]: line["answer"] for line in lines}


def _prompt_of(rollout: Rollout, answers: dict[str, str]) -> Prompt:
    epoch = rollout.group_id.rpartition("@")[2]
    record = {"prompt_id": rollout.prompt_id, "answer": answers.get(rollout.prompt_id, "")}
    return Prompt(epoch=int(epoch) if epoch.isdigit() else 0, record=record, token_ids=tuple(rollout.prompt_token_ids))
