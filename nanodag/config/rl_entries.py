"""Functions that an RL stage names: an entry of nanodag.registry or the user's own, with options."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, model_validator

from nanodag import registry
from nanodag.config.section import Seconds, Section, found_in

MAX_CALLS = 256  # of functions that generate, at once: each holds a thread and three file descriptors
# After _bare_name a table is no JSON any more, in which a list would stand for a tuple.
_Texts = Annotated[tuple[str, ...], BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)]
PROGRAM_OPTIONS = ("command", "folder", "library", "python")


class EntryConfig(Section):
    """A function with its options. A bare name means no options.

    kind: of the entry. special: a name that stands for no function. settings: of its options those that are fields of
    their own, and where they stand in the algorithm section.
    """

    kind: ClassVar[str]
    special: ClassVar[str] = ""
    settings: ClassVar[Mapping[str, str]] = {}

    name: str
    """A name of those that nanodag ships, or a function of the user's own as package.module:function."""
    options: dict[str, bool | int | float | str] = {}
    """Keyword arguments of the function."""

    @model_validator(mode="before")
    @classmethod
    def _bare_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _exists(self) -> "EntryConfig":
        if self.name != self.special:
            registry.check_options(self.kind, self.name, self.options, self.settings)
        elif self.options:
            raise ValueError(f"options mean nothing to {self.kind} {self.name}; leave them out, or name a function")
        return self

    def __str__(self) -> str:
        """Name with options, for messages."""
        return f"{self.name} with {self.options}" if self.options else self.name

    @property
    def traits(self) -> registry.Entry | None:
        """Traits known without importing it; None of a user's own function."""
        return None if self.name == self.special else registry.find(self.kind, self.name)

    @property
    def own_function(self) -> str:
        """`module:function` of the user's own that it names; empty for ours."""
        return "" if self.name == self.special else registry.own_function(self.kind, self.name)

    @property
    def own_file(self) -> str:
        """The user's own file that it names, as `judge:` does; empty where there is none."""
        return "" if self.name == self.special else registry.own_argument(self.kind, self.name, "file")

    @property
    def own_folder(self) -> str:
        """A folder of the user's own whose files decide what it does; empty where there is none."""
        return ""

    @property
    def own_library(self) -> str:
        """The folder of a Python environment whose packages it runs with; empty where there is none."""
        return ""

    @property
    def own_module(self) -> str:
        """The module that a guest loads for it, as `verifiers:` does; empty where there is none."""
        if self.name == self.special:
            return ""
        return registry.own_argument(self.kind, self.name, "module").replace("-", "_")

    def load(self) -> Callable[..., Any]:
        """The function with its options set."""
        return registry.load(self.kind, self.name, self.options)


class AdvantageConfig(EntryConfig):
    """The advantage estimator."""

    kind = "advantage"
    settings = {"gamma": "critic.gamma", "gae_lambda": "critic.gae_lambda"}


class PolicyLossConfig(EntryConfig):
    """The policy loss."""

    kind = "policy_loss"
    settings = {name: name for name in ("clip_low", "clip_high", "dual_clip", "sapo_positive", "sapo_negative")}


class AggregationConfig(EntryConfig):
    """Mean over token losses."""

    kind = "aggregation"


class KLConfig(EntryConfig):
    """The estimator of a token's KL to the reference model."""

    kind = "kl"


class CorrectionConfig(EntryConfig):
    """Importance correction for rollouts of older weights or of another engine."""

    kind = "correction"
    settings = {"floor": "correction_floor", "cap": "correction_cap"}


class RewardConfig(EntryConfig):
    """One reward; `auto` is what each prompt names."""

    kind = "reward"
    special = "auto"

    weight: float = Field(1.0, ge=-1_000_000, le=1_000_000)
    """Factor of the reward in the sum."""


class FilterConfig(EntryConfig):
    """A filter of groups."""

    kind = "filter"

    @model_validator(mode="after")
    def _lets_some_pass(self) -> "FilterConfig":
        lowest, highest = self.options.get("lowest", -math.inf), self.options.get("highest", math.inf)
        if self.traits is not None and float(lowest) > float(highest):
            raise ValueError(
                f"filter {self.name}: lowest {lowest:g} is above highest {highest:g}, so every group would be dropped; "
                "swap them"
            )
        return self


class GenerateConfig(EntryConfig):
    """A way to a response: `one_turn` of the sampler, or an async function with turns of its own."""

    kind = "generate"
    special = "one_turn"

    name: str = "one_turn"
    """How a response is made: `one_turn`, a shipped tool (`calculator`, `python`), an async function as
    package.module:function, or an agent: `agent:package.module:function`, or `agent` with the option `command`."""
    options: dict[str, bool | int | float | str | _Texts] = {}  # type: ignore[assignment]
    """Keyword arguments of the function; a program's `command` is a list of texts."""
    timeout_s: Seconds = 300.0
    """Seconds that the function may take without asking the sampler."""

    @model_validator(mode="after")
    def _has_a_function_to_end(self) -> "GenerateConfig":
        if self.is_one_turn and self.timeout_s != type(self).model_fields["timeout_s"].default:
            raise ValueError("generate.timeout_s means nothing to one_turn; leave it out, or name a function")
        return self

    @property
    def own_folder(self) -> str:
        """The user's folder that an agent's program runs in; empty where there is none."""
        return str(self.options.get("folder", "")) if self.name == "agent" else ""

    @property
    def own_library(self) -> str:
        """The Python environment of an agent's program; empty where there is none."""
        return str(self.options.get("library", "")) if self.name == "agent" else ""

    @property
    def programs(self) -> dict[str, Any]:
        """Options of an agent that say which program runs, and where."""
        is_agent = self.name.partition(":")[0] in ("agent", "verifiers")
        return {name: self.options[name] for name in PROGRAM_OPTIONS if is_agent and name in self.options}

    @property
    def is_one_turn(self) -> bool:
        """True where the sampler's answer to the prompt is the response."""
        return self.name == self.special


def entries_in(value: Any) -> Iterator[tuple[str, EntryConfig]]:
    """Functions that a config names, each with its dotted place."""
    return found_in(value, EntryConfig)
