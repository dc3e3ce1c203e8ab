"""Parts of an RL stage: its sampler, filter, generation, critic and teacher."""

import math
from typing import Any, Literal

from pydantic import Field, model_validator

from nanodag import registry as entries
from nanodag.config.section import Auto, Positive, Precision, Section, later, operational
from nanodag.inference.sglang_options import OWN_OPTIONS, ROUTERS_OWN_OPTIONS, check_options


class SamplerConfig(Section):
    """The servers that rollouts come from. max_batch: requests decoded at once, by all of them together. context:
    longest prompt plus answer. replicas: how many servers; `auto` for one, or as many as there are threads (4 at most)
    when they are deterministic. start_timeout_s: how long one may start without a sign of progress. health_timeout_s:
    one that does not answer for so long is killed and started again; max_restarts: how often in a row one may be lost.

    engine: `embedded`, or `sglang`, which is never deterministic and lives in an environment of its own. For sglang
    alone: python: its interpreter, `auto` for what `nanodag sampler install` made; tensor_parallel: GPUs a server;
    memory_fraction: of a device's memory, for weights and cache; options: any other option of its server, by name;
    router: put sglang-router before several servers, router_options: any option of its, by name, as `policy`.
    """

    engine: Literal["embedded", "sglang"] = "embedded"
    precision: Precision | Auto = "fp32"
    max_batch: int = Field(64, ge=1)
    context: int = Field(1024, ge=8)
    deterministic: bool = True
    replicas: Positive | Auto = operational("auto")
    start_timeout_s: float = operational(120.0, gt=0)
    request_timeout_s: float = operational(600.0, gt=0)
    health_timeout_s: float = operational(60.0, gt=0)
    max_restarts: int = operational(3, ge=0)
    python: str = operational("auto", min_length=1)
    tensor_parallel: int = operational(1, ge=1)
    memory_fraction: float = operational(0.3, gt=0, lt=1)
    options: dict[str, bool | int | float | str] = {}
    router: bool = operational(True)
    router_options: dict[str, bool | int | float | str] = operational({})

    @model_validator(mode="before")
    @classmethod
    def _sglang_is_not_deterministic(cls, found: Any) -> Any:
        if isinstance(found, dict) and found.get("engine") == "sglang":
            return {"deterministic": False, "start_timeout_s": 900.0, **found}
        return found

    @model_validator(mode="after")
    def _fits_its_engine(self) -> "SamplerConfig":
        if self.engine == "sglang":
            if self.deterministic:
                raise ValueError(
                    "sampler.deterministic: true needs engine embedded; SGLang's samples depend on what runs beside "
                    "them. Set it to false, or leave it out"
                )
            check_options("options", self.options, OWN_OPTIONS)
            check_options("router_options", self.router_options, ROUTERS_OWN_OPTIONS)
            if self.router_options and not self.router:
                raise ValueError("sampler.router_options mean nothing with sampler.router: false; leave them out")
            return self
        for name in ("python", "tensor_parallel", "memory_fraction", "options", "router", "router_options"):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"sampler.{name} means something to engine sglang only; leave it out")
        return self


class FilterConfig(Section):
    """A filter of groups: a name of nanodag.registry or a function of one's own. A bare name means no options."""

    name: str
    options: dict[str, float] = {}

    @model_validator(mode="before")
    @classmethod
    def _bare_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _exists(self) -> "FilterConfig":
        entries.import_path("filter", self.name)
        if self.name in entries.names("filter"):
            entries.load_filter(self.name, self.options)
            if self.options.get("lowest", -math.inf) > self.options.get("highest", math.inf):
                raise ValueError(
                    f"filter {self.name}: lowest {self.options['lowest']:g} is above highest "
                    f"{self.options['highest']:g}, so every group would be dropped; swap them"
                )
        return self


class GenerateConfig(Section):
    """How a response comes about. name: `one_turn`, a name of nanodag.registry (`calculator`, `python`) or a function
    of one's own; a bare name means no options. timeout_s: how long it may take without asking the sampler."""

    name: str = "one_turn"
    options: dict[str, bool | int | float | str] = {}
    timeout_s: float = Field(300.0, gt=0)

    @model_validator(mode="before")
    @classmethod
    def _bare_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _exists(self) -> "GenerateConfig":
        if self.name == "one_turn":
            for name in ("options", "timeout_s"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"generate.{name} means nothing to one_turn; leave it out, or name a function")
        else:
            entries.import_path("generate", self.name)
            if self.name in entries.names("generate"):
                entries.load_generate(self.name, self.options)
        return self

    @property
    def is_one_turn(self) -> bool:
        """Whether the sampler's answer to the prompt is the response."""
        return self.name == "one_turn"


class CriticConfig(Section):
    """PPO's critic. model: what it begins as, `policy` for the policy's own weights, `input` for the stage's input
    `critic`, or the absolute path of a Hugging Face directory; with the same tokenizer. warmup_steps: at the beginning,
    in which only the critic is trained. epochs: passes over each step's rollouts, of updates_per_step updates each.
    value_clip: how far a value may go from that at the step's start, 0 for none. gamma, gae_lambda: of the
    advantage."""

    model: str = "policy"
    learning_rate: float = Field(1e-5, gt=0)
    warmup_steps: int = Field(0, ge=0)
    epochs: int = Field(1, ge=1)
    value_clip: float = Field(0.2, ge=0)
    gamma: float = Field(1.0, gt=0, le=1)
    gae_lambda: float = Field(1.0, ge=0, le=1)

    @model_validator(mode="after")
    def _model_is_a_folder(self) -> "CriticConfig":
        if self.model not in ("policy", "input") and not self.model.startswith("/"):
            raise ValueError(f"critic.model {self.model!r} is neither policy, input nor the absolute path of a folder")
        return self


class TeacherConfig(Section):
    """On-policy distillation. model: `none`, `input` for the stage's input `teacher`, or the absolute path of a Hugging
    Face directory; with the same tokenizer. url: of a server in its place (nanodag.rl.trainer.teacher_server), or
    `none`. coefficient: by which each token's log-probability there, less the policy's, is added to its advantage."""

    model: str = "none"
    url: str = later("none")
    coefficient: float = Field(1.0, gt=0)

    @model_validator(mode="after")
    def _model_is_a_folder(self) -> "TeacherConfig":
        if self.model.startswith(("http://", "https://")):
            raise ValueError(f"teacher.model {self.model} is a folder's setting; name a server as teacher.url")
        if self.model not in ("none", "input") and not self.model.startswith("/"):
            raise ValueError(f"teacher.model {self.model!r} is neither none, input nor the absolute path of a folder")
        if self.url != "none" and self.model != "none":
            raise ValueError(f"teacher.model {self.model} and teacher.url {self.url} are two teachers; leave one out")
        if self.url != "none" and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"teacher.url {self.url!r} must begin with http:// or https://, or be none")
        if self.model == self.url == "none" and self.coefficient != type(self).model_fields["coefficient"].default:
            raise ValueError(f"teacher.coefficient {self.coefficient} means nothing without teacher.model or .url")
        return self
