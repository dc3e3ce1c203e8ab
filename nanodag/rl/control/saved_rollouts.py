"""Rollouts of files in place of a sampler's (`rollout.source`). No torch here."""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from nanodag.config.kinds.rl import RLStage
from nanodag.data.shuffle import permutation
from nanodag.errors import ConfigError, SourceError
from nanodag.errors.words import counted
from nanodag.rewards.reward import Reward
from nanodag.rl.control.model_facts import ModelFacts
from nanodag.rl.rollouts.batch import Dropped, RolloutBatch
from nanodag.rl.rollouts.prompts import Prompt, PromptCursor
from nanodag.rl.rollouts.rollout import GREEDY, Rollout, main_sequences
from nanodag.rl.rollouts.saved import Saved, check_steps, group_at, groups_in, places_of_groups, read_saved, saved_files

log = logging.getLogger(__name__)

NO_REWARD, TOO_LONG, NONE_GOOD = "no_reward", "too_long", "none_good_enough"


class SavedRollouts:
    """In the place of a RolloutGenerator, where rollouts exist: the groups of the files that `rollout.source` names.

    A step follows from its number alone. The folder of a stage's records gives each step what that stage trained in it.
    Of other files each pass has all groups once, in an order of its own that the stage's seed decides.
    """

    def __init__(self, config: RLStage, model: ModelFacts) -> None:
        self._config, self._vocabulary = config, model.vocab_size
        self._longest = min(model.max_positions, int(config.optimizer.micro_batch_tokens))
        self._filters = [entry.load() for entry in config.rollout.filters]
        saved = saved_files(config.rollout.source)
        check_steps(saved, num_steps=config.num_steps)
        self._files, self._states = saved, saved.states()
        self.identity = saved.identity()
        self._places: list[tuple[Path, list[int]]] = []  # of each group that is worth training, as `group_at` has them
        if not saved.steps:
            self._find_groups()

    async def step(self, cursor: PromptCursor, step: int) -> RolloutBatch:
        """The groups of one step. Raises SourceError for a file that has changed."""
        for path, seen, state in zip(self._files.files, self._states, self._files.states(), strict=True):
            if state != seen:
                raise SourceError(f"{path} has changed since the stage began. Leave it as it was, and run it again.")
        if self._files.steps:
            return self._as_it_was(self._files.steps[step])
        size, total = self._config.rollout.prompts_per_step, len(self._places)
        turns = [divmod(place, total) for place in range(size * (step - 1), size * step)]
        orders = {turn: permutation(total, int(self._config.seed), turn) for turn, _ in turns}
        return RolloutBatch(kept=[self._of_pass(turn, int(orders[turn][place])) for turn, place in turns])

    async def judged_again(
        self, cursor: PromptCursor, step: int, waiting: Sequence[RolloutBatch]
    ) -> tuple[RolloutBatch, ...]:
        """The rollout batches of a checkpoint, as they are."""
        return tuple(waiting)

    def _of_pass(self, turn: int, number: int) -> tuple[Prompt, list[Rollout]]:
        path, begins = self._places[number]
        group, files = group_at(path, begins), self._files.files
        if len(files) > 1:  # of several runs, whose prompts and groups may share names
            prompt_id = f"{files.index(path)}:{group[0].rollout.prompt_id}"
            group = [replace(saved, rollout=replace(saved.rollout, prompt_id=prompt_id)) for saved in group]
        name = f"{number}:{group[0].rollout.prompt_id}@{turn}"
        chosen, _ = self._choose([replace(saved.rollout, group_id=name) for saved in group])
        return _prompt_of(group[0], turn), chosen

    def _as_it_was(self, path: Path) -> RolloutBatch:
        batch = RolloutBatch()
        for group in groups_in(read_saved(path), kept=lambda saved: saved):
            rollouts = [saved.rollout for saved in group]
            epoch = rollouts[0].group_id.rpartition("@")[2]
            prompt = _prompt_of(group[0], int(epoch) if epoch.isdigit() else 0)
            chosen, reason = self._choose(rollouts)
            if reason:
                batch.dropped.append(Dropped(prompt, rollouts, reason, len(batch.kept)))
            else:
                batch.kept.append((prompt, chosen))
        return batch

    def _choose(self, group: Sequence[Rollout]) -> tuple[list[Rollout], str]:
        for rollout in group:
            self._check(rollout)
        sizes = [sum(len(span.token_ids) for span in rollout.spans) for rollout in group]
        too_long = {rollout.sample_index for rollout, size in zip(group, sizes, strict=True) if size > self._longest}
        fitting = [rollout for rollout in group if rollout.sample_index not in too_long]
        scored = [rollout for rollout in fitting if rollout.reward is not None and rollout.num_sampled]
        samples = main_sequences(scored)
        if not samples:
            return [], NO_REWARD if fitting else TOO_LONG
        if (clone := self._config.rollout.clone).best:
            best = best_of(scored, count=clone.best, lowest=clone.lowest_reward)
            return best, "" if best else NONE_GOOD
        return scored, next((reason for judge in self._filters if (reason := judge(samples)) is not None), "")

    def _check(self, rollout: Rollout) -> None:
        where = f"rollout.source {self._config.rollout.source}: group {rollout.group_id}"
        largest = max(max(span.token_ids, default=0) for span in rollout.spans)
        if largest >= self._vocabulary:
            raise SourceError(
                f"{where} has the token id {largest}, and the model has {self._vocabulary}: another tokenizer made it."
            )
        try:
            Reward(rollout.reward or 0.0, steps=rollout.steps)
        except (ValueError, TypeError) as error:
            raise SourceError(f"{where}: {error}.") from error
        if self._config.rollout.clone.best:
            return
        if self._config.has_process_reward and rollout.steps is None:
            raise ConfigError(
                f"{where} has no scores of steps, and advantage {self._config.algorithm.advantage} is made of them. "
                "Name the records of a stage with a process reward, or another reward."
            )
        if not rollout.has_logprobs or GREEDY in rollout.metadata:
            fault = "no log-probabilities" if not rollout.has_logprobs else "greedy answers, which were not drawn"
            raise ConfigError(
                f"{where} has {fault}, and policy_loss {self._config.algorithm.policy_loss} needs those of the policy "
                "that drew them. Set rollout.clone.best to imitate the best answers instead."
            )

    def _find_groups(self) -> None:
        """Find the groups that are worth training, and say what there is. Raises ConfigError where that is nothing."""
        reasons = Counter[str]()
        for path in self._files.files:
            for begins in places_of_groups(path):
                _, reason = self._choose([saved.rollout for saved in group_at(path, begins)])
                if reason:
                    reasons[reason] += 1
                else:
                    self._places.append((path, begins))
        left_out = ", ".join(f"{count} {reason}" for reason, count in reasons.items()) or "none"
        if not self._places:
            raise ConfigError(
                f"rollout.source {self._config.rollout.source} has no group to train on; left out: {left_out}. Change "
                "rollout.filters or rollout.clone, or name other files."
            )
        passes = self._config.num_steps * self._config.rollout.prompts_per_step / len(self._places)
        what = f"{counted(len(self._places), 'group')} of {counted(len(self._files.files), 'file')}"
        log.info("Trained: %s, in %.3g passes; left out: %s.", what, passes, left_out)


def best_of(group: Sequence[Rollout], *, count: int, lowest: float) -> list[Rollout]:
    """The finished answers of a group with the highest rewards, `lowest` at least, each answer once; of equal rewards
    the earlier ones. An answer comes with its further sequences, but not with those of other roles."""
    samples = main_sequences(group)
    finished = [
        sample for sample in samples if sample.finish_reason in ("stop", "text") and (sample.reward or 0.0) >= lowest
    ]
    different = {sample.response_token_ids: sample for sample in reversed(finished)}
    ranked = sorted(different.values(), key=lambda one: (-(one.reward or 0.0), one.sample_index))
    chosen = {(sample.sample_index, sample.role) for sample in ranked[:count]}
    return [rollout for rollout in group if (rollout.sample_index, rollout.role) in chosen]


def _prompt_of(saved: Saved, number: int) -> Prompt:
    """Prompt of a pass, with what was kept of it."""
    record = {"answer": "", **saved.asked, "prompt_id": saved.rollout.prompt_id}
    return Prompt(epoch=number, record=record, token_ids=saved.rollout.prompt_token_ids)
