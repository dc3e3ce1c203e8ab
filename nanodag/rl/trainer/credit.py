"""Credit of each token: advantages of a step's tokens, by group, by a critic, from a teacher."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanodag.config.kinds.rl import RLStage
from nanodag.rl.advantages import distilled, process_grpo, reward_of_last, step_rewards
from nanodag.rl.rollouts.rollout import Rollout, places_of_samples
from nanodag.rl.trainer.critic import Critic
from nanodag.rl.trainer.policy import ByRow, Parts, Reference, Rows, check_beside
from nanodag.rl.trainer.teacher_server import ServedTeacher, TeacherServer
from nanodag.rl.trainer.update import DeviceSums, Scored, kl_of_rollouts, sum_where
from nanodag.train.deepspeed_engine import TrainEngine
from nanodag.train.sequence_parallel import SequenceGroup


class Credit:
    """The advantage, critic and teacher that a config names, on this rank. engine, group: the policy's. inputs: folders
    of models, the policy's as `model`."""

    def __init__(
        self, config: RLStage, inputs: Mapping[str, Path], *, engine: TrainEngine, group: SequenceGroup, device: str
    ) -> None:
        self._config, self._engine, self._group, self._kl = config, engine, group, config.algorithm.kl_kind.load()
        teacher = config.algorithm.teacher
        self.critic: Critic | None = None
        if config.algorithm.has_critic:
            self.critic = Critic(config, folder_beside(config, "critic", inputs), device=device, group=group)
        else:
            self._advantage: Callable[..., Tensor] = lambda rewards, *_: torch.ones_like(rewards)
            if not config.rollout.clone.best:  # else those that are imitated are chosen, and count alike
                self._advantage = config.algorithm.load(config.algorithm.advantage)
        self.teacher: Reference | TeacherServer | None = None
        if teacher.url != "none":
            server = ServedTeacher if "#" in teacher.url else TeacherServer
            self.teacher = server(teacher.url, inputs["model"], context=int(config.sampler.context))
        elif teacher.model != "none":
            folder = folder_beside(config, "teacher", inputs)
            self.teacher = Reference(folder, temperature=config.rollout.temperature, engine=engine, group=group)

    def assign(
        self, step: int, parts: Parts, rows: Rows, old: ByRow | None, reference: ByRow | None
    ) -> tuple[ByRow, dict[str, Any]]:
        """Advantages of the tokens of each row, float32, over all rollouts of the step; and what is reported of the
        critic, which learns from it. old, reference: logprobs, needed with `kl_in: reward`. Every rank must call it."""
        rewards = [torch.tensor([rollout.reward for rollout in part], dtype=torch.float32) for part in parts]
        kl: ByRow | None = None  # that is taken off the rewards
        if self._config.algorithm.kl_in == "reward":
            assert old is not None and reference is not None
            kl = [
                [self._kl(*of_row) for of_row in zip(*of_part, strict=True)]
                for of_part in zip(old, reference, strict=True)
            ]
        if self.critic is not None:
            counts = [sum(rollout.num_trained for rollout in part) for part in parts]
            return self.critic.step(step, rows, self._token_rewards(parts, rows, rewards, kl), counts)
        if self._config.has_process_reward and not self._config.rollout.clone.best:
            return self._by_step(parts, rows), {}
        rollouts, taken = [rollout for part in parts for rollout in part], self._taken_by_kl(parts, rows, kl)
        advantages = advantages_of(rollouts, torch.cat(rewards), taken, self._advantage).to(self._engine.device)
        by_part = zip(advantages.split([len(part) for part in parts]), rows, strict=True)
        return [[own[row.rollouts][row.sequence_ids] for row in part] for own, part in by_part], {}

    @torch.no_grad()
    def teacher_logprobs(self, parts: Parts, rows: Rows) -> ByRow | None:
        """The teacher's log-probabilities of the tokens of each row, float32; None without one."""
        if isinstance(self.teacher, Reference):
            return [[self.teacher(row)[0] for row in part] for part in rows]
        if self.teacher is None:
            return None
        rows_to_score = rows if self._group.is_first else [[] for _ in rows]
        logprobs = self.teacher.logprobs(parts, rows_to_score)
        if self._group.is_first:
            return [[self._group.of_first(row_logprobs) for row_logprobs in part] for part in logprobs]
        return [[self._group.of_first(torch.zeros_like(row.sampler_logprobs)) for row in part] for part in rows]

    def distilled(self, scored: Scored, teacher_logprobs: Tensor) -> tuple[Scored, DeviceSums]:
        """A row with the teacher's share in its advantages. teacher_logprobs: (N,)."""
        advantages, reverse_kl = distilled(
            scored.advantages,
            scored.old_logprobs,
            teacher_logprobs,
            coefficient=self._config.algorithm.teacher.coefficient,
        )
        share = DeviceSums({"teacher_kl": sum_where(scored.row.mask, reverse_kl)})
        return replace(scored, advantages=advantages), share

    def _by_step(self, parts: Parts, rows: Rows) -> ByRow:
        """Advantages by the scores of steps. A row's tokens are those of its rollouts, one after the other."""
        rollouts = [rollout for part in parts for rollout in part]
        steps = [rollout.steps or () for rollout in rollouts]
        sizes = [len(rollout.response_token_ids) for rollout in rollouts]
        advantages = iter(process_grpo(steps, _numbered_groups(rollouts), sizes))
        by_part = [[next(advantages) for _ in part] for part in parts]
        return [
            [torch.cat([values[index] for index in row.rollouts.tolist()]).to(self._engine.device) for row in part]
            for values, part in zip(by_part, rows, strict=True)
        ]

    def _token_rewards(self, parts: Parts, rows: Rows, rewards: Sequence[Tensor], kl: ByRow | None) -> ByRow:
        """The reward of each token, float64: its response's at the last trained one, or those of steps, less the KL."""
        token_rewards: ByRow = []
        for number, part in enumerate(rows):
            part_rewards = rewards[number].double().to(self._engine.device)
            token_rewards.append([])
            for place, row in enumerate(part):
                if self._config.has_process_reward:
                    steps = [parts[number][index].steps or () for index in row.rollouts.tolist()]
                    of_tokens = step_rewards(steps, row.mask, row.sequence_ids)
                else:
                    of_tokens = reward_of_last(part_rewards[row.rollouts], row.mask, row.sequence_ids)
                if kl is not None:
                    of_tokens = of_tokens - self._config.algorithm.kl_coefficient * kl[number][place]
                token_rewards[-1].append(of_tokens)
        return token_rewards

    def _taken_by_kl(self, parts: Parts, rows: Rows, kl: ByRow | None) -> Tensor | None:
        """Share of KL that is taken off the reward of each rollout, (B,) float32; None where it takes nothing."""
        if kl is None:
            return None
        penalties = []
        for part, part_rows, part_kl in zip(parts, rows, kl, strict=True):
            kl_by_rollout = torch.zeros(len(part), dtype=torch.float64, device=self._engine.device)
            for row, row_kl in zip(part_rows, part_kl, strict=True):
                kl_by_rollout += kl_of_rollouts(row_kl, row, len(part))
            # Each rank has its rows, and all need the same rewards.
            summed = self._engine.summed(*self._group.counted(*kl_by_rollout.tolist()))
            penalties.append(self._config.algorithm.kl_coefficient * torch.tensor(summed, dtype=torch.float32))
        return torch.cat(penalties)


def folder_beside(config: RLStage, section: str, inputs: Mapping[str, Path]) -> Path:
    """Folder of a section's model: `policy`, `input` or a path. Raises ConfigError if it cannot read the rollouts."""
    model = getattr(config.algorithm, section).model
    if model == "policy":
        return inputs["model"]
    folder = inputs[section] if model == "input" else Path(model)
    check_beside(f"{section}.model", folder, inputs["model"], context=int(config.sampler.context))
    return folder


def advantages_of(
    rollouts: Sequence[Rollout], rewards: Tensor, taken: Tensor | None, advantage: Callable[..., Tensor]
) -> Tensor:
    """An advantage for each rollout, (B,) float32: every sequence of a sample gets its sample's.

    rewards: (B,) float32. taken: what is taken off the reward of each, (B,) float32; a sample's is the sum over its
    sequences. advantage: an entry, which sees each sample once, with the trained tokens of all its sequences.
    """
    heads, sample = torch.tensor(places_of_samples(rollouts)).unique(return_inverse=True)
    counts = torch.zeros_like(heads).index_add_(0, sample, torch.tensor([rollout.num_trained for rollout in rollouts]))
    of_samples = rewards[heads]
    if taken is not None:
        of_samples = of_samples - torch.zeros_like(of_samples).index_add_(0, sample, taken)
    return advantage(of_samples, _numbered_groups([rollouts[place] for place in heads.tolist()]), counts)[sample]


def _numbered_groups(rollouts: Sequence[Rollout]) -> Tensor:
    """(B,) int64: the number of each rollout's group, of its role in it."""
    number: dict[tuple[str, str], int] = {}
    keys = [(rollout.group_id, rollout.role) for rollout in rollouts]
    return torch.tensor([number.setdefault(key, len(number)) for key in keys])
