"""Parts of an RL stage: its sampler, critic and teacher."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from nanodag.config.section import Auto, Fraction, Natural, Positive, Precision, Seconds, Section, Share, operational
from nanodag.inference.addresses import parse_address
from nanodag.inference.sglang_options import check_options

SGLANG_ONLY = ("python", "tensor_parallel", "options")


class EngineConfig(Section):
    """The engine of samplers. All but `engine` is for `sglang` alone; `engine: auto` leaves it out where it takes the
    embedded one."""

    engine: Literal["embedded", "sglang"] | Auto = "auto"
    """`embedded`: the sampler of this package; `sglang`: SGLang in an environment of its own, never deterministic.
    `auto`: SGLang on GPUs where it is installed."""
    python: str = operational("auto", min_length=1)
    """SGLang's Python interpreter; `auto` for what `nanodag sampler install` made."""
    tensor_parallel: int = operational(1, ge=1, le=1024)
    """GPUs of one SGLang server. Above 1 it is refused where `engine: auto` takes the embedded one."""
    options: dict[str, bool | int | float | str] = {}
    """Other options of SGLang's server, by name."""

    @model_validator(mode="after")
    def _fits_its_engine(self) -> Self:
        for name in SGLANG_ONLY if self.engine == "embedded" else ():
            if getattr(self, name) != type(self).model_fields[name].get_default(call_default_factory=True):
                raise ValueError(f"sampler.{name} means something to engine sglang only; leave it out")
        check_options(self.options)
        return self


class SamplerConfig(EngineConfig):
    """The servers that rollouts come from."""

    precision: Precision | Auto = "auto"
    """Number format of the sampler's weights and products, on a GPU also of its cache. `auto`: the trainer's."""
    max_batch: Annotated[int, Field(ge=1, le=1_000_000)] | Auto = "auto"
    """Requests decoded at once, by all replicas together. `auto`: a step's samples, as far as the cache holds them."""
    context: Annotated[int, Field(ge=8, le=100_000_000)] | Auto = "auto"
    """Longest prompt plus response, in tokens. `auto`: rollout.max_new_tokens and 1,024 for the prompt."""
    deterministic: bool | Auto = "auto"
    """Whether a request returns the same bits alone, among others, or admitted late. `auto`: where that is possible,
    with the embedded engine on a CPU."""
    replicas: Annotated[int, Field(ge=0, le=1024)] | Auto = operational("auto")
    """Sampler processes of the stage's own. `auto`: one a GPU; on a CPU one, or a process a thread (4 at most) where
    they are deterministic. With `urls` or `urls_file`: none."""
    urls: tuple[str, ...] = operational(())
    """Samplers that somebody else runs, as `http://node2:30000`, or `http://node2:30000 /path/of/its/key`. They are
    checked, given the stage's weights, and never stopped; `nanodag sampler serve` starts one. `deterministic: true`
    holds for them too: each must be a deterministic one on a processor of the same kind."""
    urls_file: str = operational("none", min_length=1)
    """A file of further ones, one a line, which may grow and shrink while the stage runs; `none` for none. It may name
    environment variables as `$NAME`."""
    gpus: Positive | tuple[Natural, ...] | Auto = operational("auto")
    """With `placement: separate`, GPUs of this node that samplers have to themselves: how many, the last ones, or their
    numbers from 0. `auto`: half of them, none with sampler.nodes."""
    nodes: int = operational(0, ge=0, le=10_000)
    """With `placement: separate`, nodes of cluster.hostfile that samplers have to themselves, after the trainer's."""
    memory_fraction: Fraction | Auto = operational("auto")
    """Share of a device's whole memory that a sampler takes for weights and cache, whatever else is there. `auto`, of a
    GPU: 0.4 beside the trainer, 0.8 in turns with it, 0.9 alone; 0.25 of a CPU's memory for all replicas."""
    cache_bytes: Positive | Auto = operational("auto")
    """Bytes of one replica's keys and values. `auto`: what max_batch samples of `context` tokens take, as far as
    memory_fraction allows."""
    start_timeout_s: Seconds | Auto = operational("auto")
    """Seconds without a sign of progress after which a sampler's start has failed. `auto`: 900 for SGLang, else
    120."""
    request_timeout_s: Seconds = operational(600.0)
    """Seconds that a request may take."""
    health_timeout_s: Seconds = operational(60.0)
    """Seconds without an answer after which a sampler is asked again; after as many again it is killed and started
    anew."""
    max_restarts: int = operational(3, ge=0)
    """How often in a row one sampler may be restarted."""

    @model_validator(mode="after")
    def _has_servers(self) -> "SamplerConfig":
        if self.engine == "sglang" and self.deterministic is True:
            raise ValueError(
                "sampler.deterministic: true needs engine embedded; SGLang's samples depend on what runs beside "
                "them. Set it to false, or leave it out"
            )
        urls = [parse_address(text).url for text in self.urls]
        if twice := [url for number, url in enumerate(urls) if url in urls[:number]]:
            raise ValueError(f"sampler.urls names {twice[0]} twice; name each server once")
        if self.replicas == 0 and not self.has_others:
            raise ValueError("sampler.replicas 0 needs servers of others: name some in sampler.urls or urls_file")
        return self

    @property
    def has_others(self) -> bool:
        """True where samplers are used that somebody else runs."""
        return bool(self.urls) or self.urls_file != "none"


OF_POLICY_LOSSES = (
    "advantage", "policy_loss", "clip_low", "clip_high", "dual_clip", "sapo_positive", "sapo_negative", "correction",
    "correction_cap", "correction_floor", "correction_veto", "opsm_limit",
)  # fmt: skip
"""Settings of the algorithm section that mean nothing where answers are imitated."""


class CloneConfig(Section):
    """Imitation of the best answers in files: the mean of their tokens' negative log-likelihood, as in SFT, takes the
    place of advantages, policy loss, correction and filters. Only this can train records without log-probabilities."""

    best: int = Field(0, ge=0)
    """Different finished answers of each group that are imitated, those with the highest rewards; 0 for none."""
    lowest_reward: float = 1.0
    """The least reward of an answer that is imitated."""


class ReplayConfig(Section):
    """Groups of earlier steps that are trained again, beside fresh ones. It needs a correction."""

    share: Share = 0.0
    """Share of a step's groups that earlier steps have trained. So many fewer are generated; the first steps, with too
    few to replay, are smaller. 0 for none."""
    max_staleness: int = Field(8, ge=1, le=100_000_000)
    """Most steps between the weights that sampled a replayed group's oldest token and its step."""


class CriticConfig(Section):
    """PPO's critic."""

    model: str = "policy"
    """What the critic begins as: `policy`, `input` for the stage's input `critic`, or the path of a Hugging Face folder
    with the same tokenizer."""
    learning_rate: float = Field(1e-5, gt=0, le=1)
    """AdamW's learning rate."""
    warmup_steps: int = Field(0, ge=0)
    """First steps, in which only the critic is trained."""
    epochs: int = Field(1, ge=1, le=1_000_000)
    """Passes over each step's rollouts, of updates_per_step updates each."""
    value_clip: float = Field(0.2, ge=0, le=1000)
    """How far a value may move from that at the step's start; 0 for no clip."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount of later rewards."""
    gae_lambda: float = Field(1.0, ge=0, le=1)
    """GAE's mix of short and long estimates of the advantage."""


class ReferenceConfig(Section):
    """The frozen model that the KL is measured from."""

    model: str = "policy"
    """The reference: `policy` for the model that the stage begins with, `input` for the stage's input `reference`, or
    the path of a Hugging Face folder with the same tokenizer."""


class TeacherConfig(Section):
    """A teacher of on-policy distillation."""

    model: str = "none"
    """The teacher: `none`, `input` for the stage's input `teacher`, or the path of a Hugging Face folder with the same
    tokenizer."""
    url: str = "none"
    """A teacher server's address (nanodag.rl.trainer.teacher_server), in place of model; `none` for none."""
    coefficient: float = Field(1.0, gt=0, le=1000)
    """Factor of the teacher's log-probability less the policy's, added to each token's advantage."""
