"""Prompts in the order of the data, and the ledger of what became of each. No torch here.

The cursor is what was used up, not what was drawn: prompts that were generated but neither trained nor dropped are
given back and come first in the next step. So over a pass of the data each prompt is trained exactly once, or dropped
once with its reason, and the ledger shows it.
"""

import hashlib
import logging
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nanodag.config.kinds.rl import RLStage
from nanodag.data.mixture import Drawn, Mixture
from nanodag.errors import ConfigError
from nanodag.errors.words import counted
from nanodag.rl.rollouts.rollout import FinishReason, Rollout, Span, from_json, to_json
from nanodag.tokenizer.chat import NO_SWITCHES, ChatRenderer, Switches, Tools

log = logging.getLogger(__name__)

OVERLONG = "prompt_too_long"
NO_SPREAD_BEFORE = "no_spread_before"
OVERLONG_IN_A_ROW = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt of one pass over the data. record: canonical (nanodag.data.records). token_ids: what is sent. begun:
    its rollouts, when some of them go on in a later step (nanodag.rl.rollouts.segments)."""

    epoch: int
    record: Mapping[str, Any]
    token_ids: tuple[int, ...]
    begun: tuple[Rollout, ...] = ()

    @property
    def prompt_id(self) -> str:
        return self.record["prompt_id"]

    @property
    def group_id(self) -> str:
        """Names the rollouts of this prompt in this pass."""
        return f"{self.prompt_id}@{self.epoch}"

    def rollout(self, index: int, spans: tuple[Span, ...], finish_reason: FinishReason, **values: Any) -> Rollout:
        """A rollout of this prompt: that of the sample `index`. values: further fields."""
        names: dict[str, Any] = {"group_id": self.group_id, "prompt_id": self.prompt_id, "sample_index": index}
        return Rollout(**names, spans=spans, finish_reason=finish_reason, **values)


@dataclass(frozen=True)
class PolicyFormat:
    """The form of a stage's prompts: the model's chat format, with switches of its template and declared tools."""

    renderer: ChatRenderer
    switches: Switches
    tools: Tools

    def prompt(self, epoch: int, record: Mapping[str, Any]) -> Prompt:
        """The prompt of a record, whose ids end where the policy begins to speak. Switches of the prompt's source go
        before the stage's."""
        switches = {**self.switches, **record.get("template_options", NO_SWITCHES)}
        ids = self.renderer.prompt(record["messages"], switches, tools=self.tools)
        return Prompt(epoch=epoch, record=record, token_ids=tuple(ids))


class PromptCursor:
    """Gives prompts in the order of the mixture, those given back first.

    longest: prompts of more tokens are passed over. skip_share: a pass leaves out this share of the prompts whose
    rewards had no spread at the last try (always or never solved). Seed, prompt and pass alone decide which.
    `passed_over` returns them for the ledger. The mixture must be endless.
    """

    def __init__(
        self, mixture: Mixture, policy_format: PolicyFormat, *, longest: int, skip_share: float = 0.0, seed: int = 0
    ) -> None:
        self._mixture, self._format, self._longest = mixture, policy_format, longest
        self._skip_share, self._seed = skip_share, seed
        self._waiting: deque[Prompt] = deque()
        self._passed_over: list[tuple[Prompt, str]] = []
        self._without_spread: set[str] = set()  # prompt ids

    def take(self, count: int) -> list[Prompt]:
        """The next prompts. Raises ConfigError when there are only overlong ones."""
        return [self._waiting.popleft() if self._waiting else self._draw() for _ in range(count)]

    def note(self, prompt_id: str, *, has_spread: bool) -> None:
        """Remember whether the rewards of a prompt's group differed."""
        if self._skip_share:
            (self._without_spread.discard if has_spread else self._without_spread.add)(prompt_id)

    def give_back(self, prompts: Iterable[Prompt]) -> None:
        """Put back what was taken and not used up: it comes next, in the order given."""
        self._waiting.extendleft(reversed(list(prompts)))

    def passed_over(self) -> list[tuple[Prompt, str]]:
        """Prompts that were passed over since this was called last, with the reason."""
        prompts, self._passed_over = self._passed_over, []
        return prompts

    def state_dict(self, *, unused: Sequence[Prompt] = ()) -> dict[str, Any]:
        """JSON values: the position in the data, and the prompts given back, with what was begun of them. unused: that
        are saved as if they had been given back, first."""
        waiting = [
            {"epoch": prompt.epoch, "record": dict(prompt.record), "begun": [to_json(r) for r in prompt.begun]}
            for prompt in (*unused, *self._waiting)
        ]
        mixture = self._mixture.state_dict()
        return {"mixture": mixture, "waiting": waiting, "without_spread": sorted(self._without_spread)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where `state_dict` was called."""
        self._mixture.load_state_dict(state["mixture"])
        self._waiting = deque(
            replace(self._format.prompt(saved["epoch"], saved["record"]), begun=tuple(map(from_json, saved["begun"])))
            for saved in state["waiting"]
        )
        self._without_spread = set(state["without_spread"])

    def _draw(self) -> Prompt:
        num_overlong = 0
        while num_overlong < OVERLONG_IN_A_ROW:
            drawn = next(self._mixture)
            prompt = self._format.prompt(drawn.epoch, drawn.record)
            if len(prompt.token_ids) > self._longest:
                self._passed_over.append((prompt, OVERLONG))
                num_overlong += 1
            elif prompt.prompt_id in self._without_spread and self._is_skipped(prompt):
                self._passed_over.append((prompt, NO_SPREAD_BEFORE))
            else:
                return prompt
        raise ConfigError(
            f"{OVERLONG_IN_A_ROW} prompts in a row have more than {self._longest} tokens, what sampler.context leaves "
            "beside max_new_tokens. Raise sampler.context or lower max_new_tokens."
        )

    def _is_skipped(self, prompt: Prompt) -> bool:
        digest = hashlib.sha256(f"{self._seed} {prompt.group_id}".encode()).digest()
        return int.from_bytes(digest[:8], "big") < self._skip_share * 2**64


def first_prompts(
    mixture: Iterable[Drawn], policy_format: PolicyFormat, *, count: int, longest: int
) -> tuple[list[Prompt], int]:
    """The first prompts of a finite mixture that are not too long: the fixed set that a stage is evaluated on; and how
    many among them were too long."""
    prompts: list[Prompt] = []
    num_overlong = 0
    for drawn in mixture:
        if len(prompts) == count:
            break
        prompt = policy_format.prompt(drawn.epoch, drawn.record)
        if len(prompt.token_ids) <= longest:
            prompts.append(prompt)
        else:
            num_overlong += 1
    if num_overlong:
        log.warning(
            "Not evaluated: %s of more than %d tokens, what sampler.context leaves beside max_new_tokens. Raise it.",
            counted(num_overlong, "held-out prompt"),
            longest,
        )
    return prompts, num_overlong


def with_num_steps(config: RLStage, mirror: Path | None = None) -> RLStage:
    """The stage with num_steps in the place of num_epochs: num_epochs times the training prompts, divided by those that
    a step generates, rounded up.

    Each prompt counts once, also one that is too long. With over_sampling a step may use up more prompts than it trains
    on, so the data are then passed over more often. Every prompt is read once for it. Raises ConfigError for a mixture
    by weights, which has no end, and for settings that do not fit the steps.
    """
    if not config.num_epochs:
        return config
    num_prompts = sum(1 for _ in Mixture(config.data, kind="prompt", seed=int(config.seed), mirror=mirror))
    num_steps = max(1, math.ceil(config.num_epochs * num_prompts / config.rollout.prompts_per_step))
    log.info("%s make %g epochs of %s.", counted(num_steps, "step"), config.num_epochs, counted(num_prompts, "prompt"))
    try:
        return type(config).model_validate({**config.model_dump(), "num_steps": num_steps, "num_epochs": 0.0})
    except ValueError as error:
        raise ConfigError(f"num_epochs {config.num_epochs:g} of {num_prompts} prompts: {error}") from error
