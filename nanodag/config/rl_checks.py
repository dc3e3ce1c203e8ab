"""Settings of an RL stage that do not fit together: when a sentence of `rl_checks.yaml` is true, by its name.

`[name]` in a sentence stands for a setting's name and value, `{name}` for the value alone. A name may be short, as in
a pipeline file.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from nanodag import registry
from nanodag.config.rl_parts import OF_POLICY_LOSSES, CriticConfig, ReferenceConfig, TeacherConfig
from nanodag.config.rl_sections import HELD_OUT
from nanodag.config.section import full_name
from nanodag.data.config import mixes_by_epochs
from nanodag.errors import ConfigError
from nanodag.errors.words import listed
from nanodag.host.beside import table_beside
from nanodag.inference.addresses import parse_address
from nanodag.inference.protocol import MAX_SAMPLES

if TYPE_CHECKING:
    from nanodag.config.kinds.rl import RLStage

_NAMED = re.compile(r"([\[{])([\w.]+)(:g)?[\]}]")
_URLS = ("http://", "https://")
_WORDS: Mapping[str, object] = {"MAX_SAMPLES": MAX_SAMPLES, "HELD_OUT": HELD_OUT}


@cache
def sentences() -> dict[str, str]:
    """Sentences by the names of their checks, read when one is needed."""
    return table_beside(__file__)


def check(stage: "RLStage") -> None:
    """Raise ValueError for the first settings that do not fit together; asked again when nothing is `auto`."""
    for name, is_so in CHECKS.items():
        if is_so(stage):
            raise ValueError(_said(stage, name))
    for is_so, names, why in UNUSED:
        if is_so(stage):
            _refuse_unused(stage, names, why)
    for label in ("policy_loss", "correction"):  # what a function of the user's own takes is seen when it is loaded
        chosen = getattr(stage.algorithm, label)
        if chosen.traits is not None:
            unseen = [name for option, name in chosen.settings.items() if option not in chosen.traits.options]
            _refuse_unused(stage, unseen, f"{label} {chosen.name}")
    for sentence in chain(_of_models(stage), _of_samplers(stage), _of_rewards(stage)):
        raise ValueError(sentence)


def check_lora(stage_name: str, rank: int, width: int) -> None:
    """Raise ConfigError for adapters of a higher rank than the matrices that they are added to."""
    if rank > width:
        raise ConfigError(
            f"{stage_name}.optimizer.lora_rank: {rank} is above {width}, the width of the model, so adapters would be "
            "larger than what they adapt; lower it."
        )


def _value(stage: "RLStage", name: str) -> Any:
    return attrgetter(full_name(type(stage), name))(stage)


def _said(stage: "RLStage", name: str, **words: object) -> str:
    """The sentence of a name. words: what stands for its words in capitals, filled in together with the rest."""
    return _filled(stage, sentences()[name], {**_WORDS, **words})


def _filled(stage: "RLStage", sentence: str, words: Mapping[str, object] = _WORDS) -> str:
    """The sentence with settings, values and words in their places."""

    def text(match: re.Match[str]) -> str:
        if match[0] in words:
            return str(words[match[0]])
        value = _value(stage, match[2])
        value = list(value) if isinstance(value, tuple) else listed(value) if isinstance(value, list) else value
        shown = str(value).lower() if isinstance(value, bool) else f"{value:g}" if match[3] else f"{value}"
        return f"{match[2]} {shown}" if match[1] == "[" else shown

    return re.sub("|".join([*words, _NAMED.pattern]), text, sentence)


def _refuse_unused(stage: "RLStage", names: Collection[str], why: str) -> None:
    """Raise ValueError for a setting, other than its default, that nothing would look at."""
    for name in sorted(names):
        section, _, setting = full_name(type(stage), name).partition(".")
        default = attrgetter(setting)(type(stage).model_fields[section].default)
        if (value := _value(stage, name)) != default:
            why = _filled(stage, why)
            raise ValueError(f"{name} {value} means nothing with {why}; leave it out, or change the latter")


def _is_alone(s: "RLStage") -> bool:
    return s.rollout.samples_per_prompt == 1 and s.rollout.generate.is_one_turn


# fmt: off
CHECKS: Mapping[str, Callable[["RLStage"], object]] = {
    # rollouts
    "samples": lambda s: s.rollout.generate.is_one_turn and s.rollout.is_sampled
        and s.rollout.samples_per_prompt > MAX_SAMPLES,
    "samples_evaluated": lambda s: s.rollout.generate.is_one_turn and s.evaluation.eval_samples > MAX_SAMPLES,
    "over_sampling": lambda s: s.rollout.over_sampling and s.rollout.over_sampling < s.rollout.prompts_per_step,
    "curriculum_skip": lambda s: s.rollout.curriculum_skip and s.rollout.samples_per_prompt == 1,
    "nonzero_spread": lambda s: _is_alone(s) and any(entry.name == "nonzero_spread" for entry in s.rollout.filters),
    "overlong_buffer": lambda s: s.rollout.overlong_buffer > s.rollout.max_new_tokens,
    "stop_in_segments": lambda s: s.rollout.stop and s.rollout.partial_rollout_tokens,
    "arrival_over_sampling": lambda s: s.rollout.order == "arrival" and s.rollout.over_sampling,
    "arrival_segments": lambda s: s.rollout.order == "arrival" and s.rollout.partial_rollout_tokens,
    "segments_over_sampling": lambda s: s.rollout.partial_rollout_tokens and not s.rollout.over_sampling,
    "segments_of_turns": lambda s: s.rollout.partial_rollout_tokens and not s.rollout.generate.is_one_turn,
    "segments_corrected": lambda s: s.rollout.partial_rollouts == "correct"
        and not (s.rollout.partial_rollout_tokens and s.rollout.max_staleness),
    "clone_sampled": lambda s: s.rollout.is_sampled and s.rollout.clone.best,
    "routes_of_turns": lambda s: s.rollout.router_replay and not s.rollout.generate.is_one_turn,
    "routes_twice": lambda s: s.rollout.router_replay
        and (s.rollout.partial_rollout_tokens or s.weights.sync_mode == "retract"),
    "routes_vllm": lambda s: s.rollout.router_replay and s.sampler.engine == "vllm",
    "routes_sequence_parallel": lambda s: s.rollout.router_replay and s.optimizer.sequence_parallel > 1,
    # the algorithm
    "dual_clip": lambda s: 0 < s.algorithm.dual_clip <= 1,
    "kl_in_reward": lambda s: s.algorithm.kl_in == "reward" and not s.algorithm.kl_coefficient,
    "reference_every": lambda s: s.algorithm.reference_every and not s.algorithm.has_reference,
    "reference_unasked": lambda s: s.algorithm.reference != ReferenceConfig() and not s.algorithm.has_reference,
    "reference_replaced": lambda s: s.algorithm.reference != ReferenceConfig() and s.algorithm.reference_every,
    "kl_unbiased": lambda s: s.algorithm.kl_in == "reward" and s.algorithm.kl_unbiased,
    "correction_bounds": lambda s: s.algorithm.correction_floor >= s.algorithm.correction_cap,
    "critic_unasked": lambda s: not s.algorithm.has_critic and s.algorithm.critic != CriticConfig(),
    "teacher_model_is_url": lambda s: s.algorithm.teacher.model.startswith(_URLS),
    "teacher_twice": lambda s: s.algorithm.teacher.url != "none" and s.algorithm.teacher.model != "none",
    "teacher_url": lambda s: s.algorithm.teacher.url != "none" and not s.algorithm.teacher.url.startswith(_URLS),
    "teacher_coefficient": lambda s: s.algorithm.teacher.model == s.algorithm.teacher.url == "none"
        and s.algorithm.teacher != TeacherConfig(),
    "teacher_temperature": lambda s: s.algorithm.teacher.url != "none" and s.rollout.temperature != 1.0,
    "critic_warmup": lambda s: s.algorithm.has_critic and not s.num_epochs
        and s.algorithm.critic.warmup_steps >= s.num_steps,
    "value_clip": lambda s: s.algorithm.has_critic and s.optimizer.updates_per_step * s.algorithm.critic.epochs == 1
        and s.algorithm.critic.value_clip != CriticConfig.model_fields["value_clip"].default,
    "nothing_to_compare": lambda s: _is_alone(s) and not s.rollout.clone.best
        and s.algorithm.advantage.traits is not None and s.algorithm.advantage.traits.compares_groups,
    # the optimizer; with num_epochs the stage looks when it has counted its prompts
    "learning_rate_minimum": lambda s: s.optimizer.learning_rate_minimum > s.optimizer.learning_rate,
    "updates_per_step": lambda s: s.optimizer.updates_per_step > s.rollout.prompts_per_step,
    "warmup_steps": lambda s: not s.num_epochs and s.optimizer.warmup_steps > s.num_steps,
    "profile_steps": lambda s: not s.num_epochs and max(s.profile_steps, default=0) > s.num_steps,
    "sequence_parallel": lambda s: s.resources.num_ranks != "auto"
        and s.resources.num_ranks % s.optimizer.sequence_parallel,
    # how long the stage is, and what it leaves
    "epochs_and_steps": lambda s: s.num_epochs and s.num_steps != type(s).model_fields["num_steps"].default,
    "epochs_of_saved": lambda s: s.num_epochs and not s.rollout.is_sampled,
    "epochs_by_weights": lambda s: s.num_epochs and not mixes_by_epochs(s.data),
    "rollouts_keep_best": lambda s: s.only == "rollouts" and s.best_metric,
    "rollouts_saved": lambda s: s.only == "rollouts" and not s.rollout.is_sampled,
    "clone_advantages": lambda s: s.rollout.clone.best
        and (s.algorithm.kl_in == "reward" or s.algorithm.teacher != TeacherConfig()),
    "patience": lambda s: s.evaluation.patience and not s.best_metric,
    "keep_unevaluated": lambda s: s.best_metric and not s.evaluated,
    "keep_unknown": lambda s: s.best_metric and s.best_metric not in s.evaluated,
    "eval_samples": lambda s: s.evaluation.eval_samples > 1 and not s.evaluation.eval_temperature,
    # what a sampler holds
    "context": lambda s: s.sampler.context != "auto" and s.sampler.context <= s.rollout.max_new_tokens,
    "micro_batch": lambda s: "auto" not in (s.sampler.context, s.optimizer.micro_batch_tokens)
        and int(s.optimizer.micro_batch_tokens) < int(s.sampler.context),
    "judge": lambda s: any(benchmark.judge != "none" for benchmark in s.evaluation.benchmarks),
    "combine_auto": lambda s: s.combine_rewards == "min" and len(s.reward) > 1
        and any(r.weight for r in s.reward if r.name == "auto"),
    # weights that come while rollouts are in flight
    "arrival_finish": lambda s: s.weights.sync_mode == "finish" and s.rollout.order == "arrival",
    "sync_mode": lambda s: s.weights.sync_mode != "finish"
        and (s.sampler.deterministic is True or not s.rollout.max_staleness),
    "sync_mode_segments": lambda s: s.weights.sync_mode != "finish" and s.rollout.partial_rollout_tokens
        and (s.rollout.partial_rollouts == "mask" or s.rollout.max_staleness < 2),
    # where samplers lie
    "shared_staleness": lambda s: s.placement == "shared" and s.rollout.is_sampled and s.rollout.max_staleness,
    "shared_vllm": lambda s: s.placement == "shared" and s.sampler.engine == "vllm",
    "shared_others": lambda s: s.placement == "shared" and s.sampler.has_others,
    "lends_states": lambda s: s.placement not in ("shared", "auto") and s.lends_states is True,
    "gpus_placement": lambda s: s.placement in ("beside", "shared") and s.sampler.gpus not in ("auto", ()),
    "nodes_placement": lambda s: s.placement in ("beside", "shared") and s.sampler.nodes,
    "nodes_and_gpus": lambda s: s.sampler.nodes and s.sampler.gpus not in ("auto", ()),
    "separate_cpu": lambda s: s.placement == "separate" and s.resources.device == "cpu" and not s.sampler.nodes,
    "deterministic_gpu": lambda s: s.sampler.deterministic is True and s.resources.device == "cuda",
    # how weights reach them
    "lora_sync": lambda s: s.weights.lora_sync == "adapter" and s.sampler.has_others,
    "lora_sync_guest": lambda s: s.weights.lora_sync == "adapter" and s.guest is not None
        and (s.weights.sync not in ("auto", "disk") or s.weights.sync_mode != "finish" or s.placement == "shared"),
    "lora_sync_cpu": lambda s: s.weights.lora_sync == "adapter" and s.sampler.engine == "sglang"
        and s.resources.device == "cpu",
    "nccl_cpu": lambda s: s.weights.sync_backend == "nccl" and s.resources.device == "cpu",
    "nccl_placement": lambda s: s.weights.sync_backend == "nccl" and s.placement in ("beside", "shared")
        and not s.sampler.has_others,
    "rollouts_sync": lambda s: s.only == "rollouts" and s.sampler.has_others and s.weights.sync not in ("disk", "auto"),
    "check_tensor_parallel": lambda s: s.weights.sync_check_every not in ("auto", 0) and s.sampler.tensor_parallel > 1,
    "check_guest": lambda s: s.weights.sync_check_every not in ("auto", 0) and s.guest is not None
        and (s.resources.device == "cuda" or s.sampler.engine == "vllm"),
}
UNUSED: tuple[tuple[Callable[["RLStage"], object], tuple[str, ...], str], ...] = (
    (lambda s: not s.rollout.overlong_buffer, ("overlong_penalty",), "[overlong_buffer]"),
    (lambda s: not s.rollout.clone.best, ("clone.lowest_reward",), "[clone.best]"),
    (lambda s: s.only == "rollouts", ("router_replay", "lora_sync"), "only: {only}"),
    (lambda s: s.rollout.clone.best, OF_POLICY_LOSSES, "[rollout.clone.best]"),
    (lambda s: s.rollout.clone.best and s.rollout.filters, ("filters",), "[rollout.clone.best]"),
    (lambda s: not s.algorithm.kl_coefficient, ("kl_unbiased",), "[kl_coefficient:g]"),
    (lambda s: not s.algorithm.has_reference, ("kl_kind",), "[kl_coefficient:g]"),
    (lambda s: not s.optimizer.lora_rank, ("lora_alpha", "lora_save", "lora_sync"), "[lora_rank]"),
    (lambda s: s.optimizer.learning_rate_decay == "none", ("learning_rate_minimum",), "[learning_rate_decay]"),
    (lambda s: s.weights.sync != "distributed", ("sync_address", "sync_backend"), "sync: {sync}"),
    (lambda s: s.weights.sync == "disk", ("sync_bucket_bytes", "sync_timeout_s"), "sync: disk"),
)
REWARDS: Mapping[str, Callable[["RLStage", registry.Entry], object]] = {
    "reward_of_generate": lambda s, traits: traits.is_of_generate and s.rollout.generate.is_one_turn,
    "steps_of_agent": lambda s, traits: traits.scores_steps
        and s.rollout.generate.name.partition(":")[0] in ("agent", "verifiers"),
    "steps_added": lambda s, traits: traits.scores_steps and (len(s.reward) > 1 or s.reward[0].weight != 1.0),
    "steps_of_responses": lambda s, traits: traits.scores_steps
        and not getattr(s.algorithm.advantage.traits, "takes_steps", False),
    "steps_overlong": lambda s, traits: traits.scores_steps and s.rollout.overlong_buffer,
    "steps_kl": lambda s, traits: traits.scores_steps and s.algorithm.kl_in == "reward" and not s.algorithm.has_critic,
    "reward_timeout": lambda s, traits: s.rollout.reward_timeout_s < traits.least_timeout_s,
}
# fmt: on


def _of_models(stage: "RLStage") -> Iterator[str]:
    """Models that are inputs, and inputs that are models."""
    for label, word in {"critic": "policy", "reference": "policy", "teacher": "none"}.items():
        model = getattr(stage.algorithm, label).model
        if model not in (word, "input") and not model.startswith("/"):
            yield f"{label}.model {model} is neither {word}, input nor the absolute path of a folder"
        if (model == "input") != (label in stage.inputs):
            way = f"name a stage as inputs.{label}" if model == "input" else f"set {label}.model to input"
            yield f"algorithm.{label}.model {model!r} and inputs ({listed(stage.inputs)}) do not fit together; {way}"


def _of_samplers(stage: "RLStage") -> Iterator[str]:
    """A benchmark's answers in the sampler's context, and memory that samplers share with rank 0."""
    sampler, context = stage.sampler, stage.sampler.context
    for benchmark in stage.evaluation.benchmarks:
        if "auto" not in (context, benchmark.max_new_tokens) and int(context) <= int(benchmark.max_new_tokens):
            yield _said(stage, "benchmark_context", TOKENS=benchmark.max_new_tokens, NAME=benchmark.name)
    if stage.weights.sync != "ipc":
        return
    ranks, replicas, is_on_gpu = stage.resources.num_ranks, sampler.replicas, stage.resources.device == "cuda"
    here = 0 if "auto" in (ranks, replicas) else int(ranks) // stage.resources.num_nodes
    if is_on_gpu and here and (gpus := int(replicas) * sampler.tensor_parallel) > here:
        yield _said(stage, "ipc_ranks", THEIRS=gpus, HERE=here)
    if is_on_gpu and here > 1 and sampler.has_others:
        yield _said(stage, "ipc_others", HERE=here)
    away = [f"sampler.urls {url.url}, a sampler of another machine" for url in map(parse_address, sampler.urls)
            if not url.is_here]  # fmt: skip
    if sampler.nodes:
        away = [f"sampler.nodes {sampler.nodes}, samplers of other machines"]
    elif stage.placement == "separate" and stage.resources.device == "cuda":
        away = ["placement: separate, samplers on other GPUs"]
    if away:
        yield _said(stage, "ipc_away", AWAY=away[0])


def _of_rewards(stage: "RLStage") -> Iterator[str]:
    """Rewards that do not go together, or not with what is made of them."""
    if not stage.reward or not any(reward.weight for reward in stage.reward):
        weights = listed(f"{reward.name} {reward.weight:g}" for reward in stage.reward)
        yield f"reward ({weights}) has nothing to add up, or weights of 0 alone; give one a weight"
    names = [reward.name for reward in stage.reward]
    for source in (*stage.data, *stage.evaluation.validation):
        if source.reward != "auto" and "auto" not in names:
            yield _said(stage, "reward_unused", NAMES=listed(names), OTHER=source.reward, SOURCE=source.url)
    if twice := sorted({name for name in names if names.count(name) > 1}):
        yield f"reward {twice[0]} stands twice; name it once, with the sum of the weights"
    fitting = sorted((n for n, entry in registry.entries_of("advantage").items() if entry.takes_steps), reverse=True)
    for reward in stage.reward:
        if (traits := reward.traits) is None:
            continue
        for name, is_so in REWARDS.items():
            if is_so(stage, traits):
                least = f"{traits.least_timeout_s:g}"
                yield _said(stage, name, LEAST=least, FITTING=" or ".join(fitting), REWARD=reward.name)
