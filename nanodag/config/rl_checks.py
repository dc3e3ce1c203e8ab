"""Settings of an RL stage that do not fit together: one table of sentences, each with when it is true.

`[name]` in a sentence stands for a setting's name and value, `{name}` for the value alone. A name may be short, as in
a pipeline file. Strings of several lines say what is wrong and the way out.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import chain
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from nanodag import registry
from nanodag.config.rl_parts import OF_POLICY_LOSSES, CriticConfig, ReferenceConfig, RewardConfig, TeacherConfig
from nanodag.config.rl_sections import HELD_OUT
from nanodag.config.section import full_name
from nanodag.data.config import mixes_by_epochs
from nanodag.errors import ConfigError
from nanodag.errors.words import listed
from nanodag.inference.addresses import parse_address
from nanodag.inference.protocol import MAX_SAMPLES

if TYPE_CHECKING:
    from nanodag.config.kinds.rl import RLStage

_NAMED = re.compile(r"([\[{])([\w.]+)(:g)?[\]}]")
_URLS = ("http://", "https://")


def check(stage: "RLStage") -> None:
    """Raise ValueError for the first settings that do not fit together; asked again when nothing is `auto`."""
    for is_so, sentence in CHECKS:
        if is_so(stage):
            raise ValueError(_filled(stage, sentence))
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


def _filled(stage: "RLStage", sentence: str, words: Mapping[str, str] = MappingProxyType({})) -> str:
    """words: what stands for the sentence's words in capitals, filled in together with the rest."""

    def text(match: re.Match[str]) -> str:
        if match[0] in words:
            return words[match[0]]
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


def _is_folder_or(model: str, *words: str) -> bool:
    return model in words or model.startswith("/")


def _is_alone(s: "RLStage") -> bool:
    return s.rollout.samples_per_prompt == 1 and s.rollout.generate.is_one_turn


# fmt: off
CHECKS: tuple[tuple[Callable[["RLStage"], object], str], ...] = (
    # rollouts
    (lambda s: s.rollout.generate.is_one_turn and s.rollout.is_sampled and s.rollout.samples_per_prompt > MAX_SAMPLES,
     f"[samples_per_prompt] is above {MAX_SAMPLES}, the most that a sampler takes of one prompt; lower it"),
    (lambda s: s.rollout.generate.is_one_turn and s.evaluation.eval_samples > MAX_SAMPLES,
     f"[eval_samples] is above {MAX_SAMPLES}, the most that a sampler takes of one prompt; lower it"),
    (lambda s: s.rollout.over_sampling and s.rollout.over_sampling < s.rollout.num_fresh,
     "[over_sampling] is below the {rollout.num_fresh} new groups of [prompts_per_step]; raise it, or set it to 0 to "
     "generate just what is trained"),
    (lambda s: s.rollout.curriculum_skip and s.rollout.samples_per_prompt == 1,
     "[curriculum_skip] compares a prompt's samples, and samples_per_prompt is 1; raise the latter"),
    (lambda s: _is_alone(s) and any(entry.name == "nonzero_spread" for entry in s.rollout.filters),
     "[samples_per_prompt]: the filter nonzero_spread drops every group of one; set filters to []"),
    (lambda s: s.rollout.overlong_buffer > s.rollout.max_new_tokens,
     "[overlong_buffer] is above [max_new_tokens]; lower it"),
    (lambda s: s.rollout.stop and s.rollout.partial_rollout_tokens,
     "[stop] with [partial_rollout_tokens]: a text that begins in one segment and ends in the next would be missed; "
     "leave one of them out, or use stop_token_ids"),
    (lambda s: s.rollout.order == "arrival" and s.rollout.over_sampling,
     "[over_sampling] chooses groups in the order of their prompts, and order is arrival, which keeps groups in flight "
     "by itself; leave one of them out"),
    (lambda s: s.rollout.order == "arrival" and s.rollout.partial_rollout_tokens,
     "[partial_rollout_tokens] chooses groups in the order of their prompts, and order is arrival, which keeps groups "
     "in flight by itself; leave one of them out"),
    (lambda s: s.rollout.partial_rollout_tokens and not s.rollout.over_sampling,
     "[partial_rollout_tokens] needs over_sampling: the groups that are under way at once, more than "
     "[prompts_per_step]"),
    (lambda s: s.rollout.partial_rollout_tokens and not s.rollout.generate.is_one_turn,
     "[partial_rollout_tokens] cuts one turn into segments, and [generate] has turns of its own; leave one of them "
     "out"),
    (lambda s: s.rollout.partial_rollouts == "correct"
     and not (s.rollout.partial_rollout_tokens and s.rollout.max_staleness),
     "partial_rollouts: correct trains tokens of earlier steps: it needs partial_rollout_tokens (found "
     "{partial_rollout_tokens}) and max_staleness (found {max_staleness}) above 0"),
    (lambda s: not s.rollout.is_sampled and s.rollout.replay.share,
     "[replay.share:g] keeps what samplers made, and source is {source}; leave it out"),
    (lambda s: s.rollout.is_sampled and s.rollout.clone.best,
     "[clone.best] chooses from files, and source is {source}; name a file"),
    (lambda s: s.rollout.replay.share and not 0 < s.rollout.num_replayed < s.rollout.prompts_per_step,
     "[replay.share:g] of [prompts_per_step] is {rollout.num_replayed} groups, and a step needs replayed and fresh "
     "ones; change one of them"),
    (lambda s: s.rollout.replay.share and s.rollout.replay.max_staleness <= s.rollout.max_staleness,
     "[replay.max_staleness] is not above [max_staleness]: what is trained once would be too old to be trained again; "
     "raise it"),
    (lambda s: s.rollout.router_replay and not s.rollout.generate.is_one_turn,
     "router_replay: true keeps the experts of one turn, and [generate] has turns of its own; leave one of them out"),
    (lambda s: s.rollout.router_replay
     and (s.rollout.partial_rollout_tokens or s.weights.sync_mode in ("abort", "retract")),
     "router_replay: true with [partial_rollout_tokens] and [sync_mode]: samplers would run tokens again that others "
     "chose experts for; use 0, and finish or in_place"),
    (lambda s: s.rollout.router_replay and s.optimizer.sequence_parallel > 1,
     "router_replay: true with [optimizer.sequence_parallel], which no mixture of experts has; leave one of them out"),
    # the algorithm
    (lambda s: 0 < s.algorithm.dual_clip <= 1, "[dual_clip] must be above 1 (usually 3), or 0 for none"),
    (lambda s: s.algorithm.kl_in == "reward" and not s.algorithm.kl_coefficient,
     "kl_in: reward takes nothing off while kl_coefficient is 0; raise it, or leave kl_in out"),
    (lambda s: s.algorithm.reference_every and not s.algorithm.has_reference,
     "reference_every refreshes nothing while kl_coefficient is 0; raise it, set kl_metric, or leave it out"),
    (lambda s: s.algorithm.reference != ReferenceConfig() and not s.algorithm.has_reference,
     "[reference.model] is asked nothing while kl_coefficient is 0; raise it, set kl_metric, or leave reference out"),
    (lambda s: s.algorithm.reference != ReferenceConfig() and s.algorithm.reference_every,
     "[reference_every] would put the policy's weights in the place of [reference.model]; leave one of them out"),
    (lambda s: s.algorithm.kl_in == "reward" and s.algorithm.kl_unbiased,
     "kl_unbiased mends the gradient of a KL in the loss; kl_in: reward needs no mending"),
    (lambda s: s.algorithm.correction_floor >= s.algorithm.correction_cap,
     "[correction_floor] is not below [correction_cap]"),
    (lambda s: not s.algorithm.has_critic and s.algorithm.critic != CriticConfig(),
     "critic means nothing to [advantage]; leave it out, or use gae"),
    (lambda s: not _is_folder_or(s.algorithm.critic.model, "policy", "input"),
     "[critic.model] is neither policy, input nor the absolute path of a folder"),
    (lambda s: not _is_folder_or(s.algorithm.reference.model, "policy", "input"),
     "[reference.model] is neither policy, input nor the absolute path of a folder"),
    (lambda s: s.algorithm.teacher.model.startswith(_URLS),
     "[teacher.model] is a folder's setting; name a server as teacher.url"),
    (lambda s: not _is_folder_or(s.algorithm.teacher.model, "none", "input"),
     "[teacher.model] is neither none, input nor the absolute path of a folder"),
    (lambda s: s.algorithm.teacher.url != "none" and s.algorithm.teacher.model != "none",
     "[teacher.model] and [teacher.url] are two teachers; leave one out"),
    (lambda s: s.algorithm.teacher.url != "none" and not s.algorithm.teacher.url.startswith(_URLS),
     "[teacher.url] must begin with http:// or https://, or be none"),
    (lambda s: s.algorithm.teacher.model == s.algorithm.teacher.url == "none"
     and s.algorithm.teacher != TeacherConfig(),
     "[teacher.coefficient] means nothing without teacher.model or .url"),
    (lambda s: s.algorithm.teacher.url != "none" and s.rollout.temperature != 1.0,
     "algorithm.teacher.url with [rollout.temperature]: servers score a prompt at temperature 1; set it to 1.0, or use "
     "teacher.model"),
    (lambda s: s.algorithm.has_critic and not s.num_epochs and s.algorithm.critic.warmup_steps >= s.num_steps,
     "[algorithm.critic.warmup_steps] leaves the policy untrained in all [num_steps]; lower it"),
    (lambda s: s.algorithm.has_critic and s.optimizer.updates_per_step * s.algorithm.critic.epochs == 1
     and s.algorithm.critic.value_clip != CriticConfig.model_fields["value_clip"].default,
     "[algorithm.critic.value_clip] bounds nothing while a step updates the critic once; raise critic.epochs or "
     "optimizer.updates_per_step, or leave it out"),
    (lambda s: _is_alone(s) and not s.rollout.clone.best
     and s.algorithm.advantage.traits is not None and s.algorithm.advantage.traits.compares_groups,
     "[rollout.samples_per_prompt] leaves [advantage] nothing to compare; raise it, or use gae or reinforce_pp"),
    # the optimizer; with num_epochs the stage looks when it has counted its prompts
    (lambda s: s.optimizer.learning_rate_minimum > s.optimizer.learning_rate,
     "[learning_rate_minimum:g] is above [learning_rate:g]; lower it"),
    (lambda s: s.optimizer.updates_per_step > s.rollout.prompts_per_step,
     "[optimizer.updates_per_step] is above [rollout.prompts_per_step]; each update trains at least one prompt's "
     "group"),
    (lambda s: not s.num_epochs and s.optimizer.warmup_steps > s.num_steps,
     "[optimizer.warmup_steps] is above [num_steps], so that step never comes; lower it, or raise num_steps"),
    (lambda s: not s.num_epochs and max(s.profile_steps, default=0) > s.num_steps,
     "[profile_steps] has a step above [num_steps], which never comes; lower it, or raise num_steps"),
    (lambda s: s.resources.num_ranks != "auto" and s.resources.num_ranks % s.optimizer.sequence_parallel,
     "[optimizer.sequence_parallel] ranks share each row, and [resources.num_ranks] is not a multiple of it; change "
     "one of them"),
    # how long the stage is, and what it leaves
    (lambda s: s.num_epochs and s.num_steps != type(s).model_fields["num_steps"].default,
     "[num_epochs:g] and [num_steps] both say how long the stage is; leave one of them out"),
    (lambda s: s.num_epochs and not s.rollout.is_sampled,
     "[num_epochs:g] with [rollout.source]: it counts passes over prompts that are sampled; set num_steps, and the "
     "stage's log says how many passes these are"),
    (lambda s: s.num_epochs and not mixes_by_epochs(s.data),
     "[num_epochs:g]: passes over a mixture by weights have no meaning, as it has no end; set num_steps, or leave out "
     "the weights"),
    (lambda s: s.only == "rollouts" and s.best_metric,
     "[keep] with only: rollouts, where nothing changes the weights; use keep: last"),
    (lambda s: s.only == "rollouts" and not s.rollout.is_sampled,
     "only: rollouts with [rollout.source]: nothing would be generated or trained; leave one of them out"),
    (lambda s: s.only == "rollouts" and s.rollout.replay.share,
     "[rollout.replay.share:g] with only: rollouts; leave it out"),
    (lambda s: s.rollout.replay.share and s.algorithm.correction.name == "none",
     "[rollout.replay.share:g] trains what older weights sampled, and algorithm.correction is none; choose one, as tis "
     "or mis_geometric"),
    (lambda s: s.rollout.clone.best and (s.algorithm.kl_in == "reward" or s.algorithm.teacher != TeacherConfig()),
     "[rollout.clone.best] has no advantages, which kl_in: reward and a teacher change; leave them out"),
    (lambda s: s.evaluation.patience and not s.best_metric,
     f"[evaluation.patience] waits for a better score, and keep is {{keep}}; set keep to best:{HELD_OUT} or to "
     "best:NAME of a benchmark"),
    (lambda s: s.best_metric and not s.evaluated,
     "[keep]: nothing is evaluated; add {best_metric} to evaluation.benchmarks"),
    (lambda s: s.best_metric and s.best_metric not in s.evaluated,
     "[keep]: what is evaluated is {evaluated}; name one of these, or add {best_metric} to evaluation.benchmarks"),
    (lambda s: s.evaluation.eval_samples > 1 and not s.evaluation.eval_temperature,
     "[eval_samples] would all be the same answer at eval_temperature 0; raise the latter, or set eval_samples to 1"),
    # what a sampler holds
    (lambda s: s.sampler.context != "auto" and s.sampler.context <= s.rollout.max_new_tokens,
     "[sampler.context] leaves no room for a prompt beside [rollout.max_new_tokens]; raise the one or lower the other"),
    (lambda s: "auto" not in (s.sampler.context, s.optimizer.micro_batch_tokens)
     and int(s.optimizer.micro_batch_tokens) < int(s.sampler.context),
     "[optimizer.micro_batch_tokens] cannot hold one rollout of [sampler.context] tokens; raise the one or lower the "
     "other"),
    (lambda s: any(benchmark.judge != "none" for benchmark in s.evaluation.benchmarks),
     "a `judge` of evaluation.benchmarks compares with a baseline, which an eval stage has; leave it out"),
    (lambda s: s.combine_rewards == "min" and len(s.reward) > 1 and any(r.weight for r in s.reward if r.name == "auto"),
     "[combine_rewards] min with `auto`, which may be one of the other rewards; name rewards alone"),
    # weights that come while rollouts are in flight
    (lambda s: s.weights.sync_mode == "finish" and s.rollout.order == "arrival",
     "rollout.order: arrival keeps groups in flight while weights change, and weights.sync_mode: finish waits for "
     "them; set sync_mode to retract, in_place or abort, or leave order out"),
    (lambda s: s.weights.sync_mode != "finish" and (s.sampler.deterministic is True or not s.rollout.max_staleness),
     "[weights.sync_mode] is for weights that come while rollouts are in flight: it needs rollout.max_staleness above "
     "0 (found {rollout.max_staleness}) and sampler.deterministic: false (found {sampler.deterministic}); use finish"),
    (lambda s: s.weights.sync_mode == "abort" and s.rollout.stop,
     "weights.sync_mode abort ends answers and asks for the rest: a text of [rollout.stop] that stands across that "
     "place would be missed; use retract or in_place, or rollout.stop_token_ids"),
    (lambda s: s.weights.sync_mode != "finish" and s.rollout.partial_rollout_tokens
     and (s.rollout.partial_rollouts == "mask" or s.rollout.max_staleness < 2),
     "[weights.sync_mode] with [rollout.partial_rollout_tokens] needs partial_rollouts: correct (found "
     "{rollout.partial_rollouts}; mask would leave out whatever the newest weights did not sample) and max_staleness 2 "
     "at least (found {rollout.max_staleness}); use finish"),
    # where samplers lie
    (lambda s: s.placement == "shared" and s.rollout.is_sampled and s.rollout.max_staleness,
     "placement: shared with [rollout.max_staleness]: samplers that generate ahead of the trainer need memory while it "
     "works; use beside or separate, or set max_staleness to 0"),
    (lambda s: s.placement == "shared" and s.sampler.has_others,
     "placement: shared with sampler.urls or urls_file: servers of others have memory of their own; use beside, or "
     "separate"),
    (lambda s: s.placement not in ("shared", "auto") and s.lends_states is True,
     "lends_states: true with placement: {placement}, where nobody takes turns; leave it out"),
    (lambda s: s.placement in ("beside", "shared") and s.sampler.gpus not in ("auto", ()),
     "[sampler.gpus] with placement: {placement}; set placement to separate"),
    (lambda s: s.placement in ("beside", "shared") and s.sampler.nodes,
     "[sampler.nodes] with placement: {placement}; set placement to separate"),
    (lambda s: s.sampler.nodes and s.sampler.gpus not in ("auto", ()),
     "[sampler.nodes] and [sampler.gpus]: samplers have whole nodes, or GPUs of the trainer's; leave one of them out"),
    (lambda s: s.placement == "separate" and s.resources.device == "cpu" and not s.sampler.nodes,
     "placement: separate on CPUs without sampler.nodes: processes of one machine share its cores; use beside, or give "
     "samplers nodes"),
    (lambda s: s.sampler.deterministic is True and s.resources.device == "cuda",
     "sampler.deterministic: true on a GPU, whose sums have another order with each batch; set it to false, or leave "
     "it out"),
    # how weights reach them
    (lambda s: s.weights.lora_sync == "adapter" and (s.sampler.engine == "sglang" or s.sampler.has_others),
     "[weights.lora_sync] needs embedded samplers of the stage's own: SGLang is not given adapters yet, and servers of "
     "others began with a model of their own; use merged, or sampler.engine embedded without urls and urls_file"),
    (lambda s: s.weights.sync_backend == "nccl" and s.resources.device == "cpu",
     "weights.sync_backend: nccl needs GPUs, and resources.device is cpu; use gloo"),
    (lambda s: s.weights.sync_backend == "nccl" and s.placement in ("beside", "shared") and not s.sampler.has_others,
     "weights.sync_backend: nccl with placement: {placement}, and NCCL refuses two processes on one GPU; use gloo, or "
     "placement: separate"),
    (lambda s: s.only == "rollouts" and s.sampler.has_others and s.weights.sync not in ("disk", "auto"),
     "weights.sync: {weights.sync} with only: rollouts and servers of others: they take the input model from its "
     "folder, as there is no trainer to give it; use disk"),
    (lambda s: s.weights.sync_check_every not in ("auto", 0) and s.sampler.tensor_parallel > 1,
     "[weights.sync_check_every]: weights cannot be verified yet where they are split over GPUs "
     "([sampler.tensor_parallel]); leave it out"),
    (lambda s: s.weights.sync_check_every not in ("auto", 0)
     and s.sampler.engine == "sglang" and s.resources.device == "cuda",
     "[weights.sync_check_every]: SGLang fingerprints weights in another way on a GPU, which is not verified yet; "
     "leave it out. The difference of log-probabilities is still looked at in each step"),
)
UNUSED: tuple[tuple[Callable[["RLStage"], object], tuple[str, ...], str], ...] = (
    (lambda s: not s.rollout.overlong_buffer, ("overlong_penalty",), "[overlong_buffer]"),
    (lambda s: not s.rollout.clone.best, ("clone.lowest_reward",), "[clone.best]"),
    (lambda s: s.only == "rollouts", ("router_replay",), "only: {only}"),
    (lambda s: not s.rollout.replay.share, ("replay.max_staleness",), "[replay.share:g]"),
    (lambda s: s.rollout.clone.best, OF_POLICY_LOSSES, "[rollout.clone.best]"),
    (lambda s: s.rollout.clone.best and s.rollout.filters, ("filters",), "[rollout.clone.best]"),
    (lambda s: not s.algorithm.kl_coefficient, ("kl_unbiased",), "[kl_coefficient:g]"),
    (lambda s: not s.algorithm.has_reference, ("kl_kind",), "[kl_coefficient:g]"),
    (lambda s: not s.optimizer.lora_rank, ("lora_alpha", "lora_save", "lora_sync"), "[lora_rank]"),
    (lambda s: s.optimizer.learning_rate_decay == "none", ("learning_rate_minimum",), "[learning_rate_decay]"),
    (lambda s: s.weights.sync != "distributed", ("sync_address", "sync_backend"), "sync: {sync}"),
    (lambda s: s.weights.sync == "disk", ("sync_bucket_bytes", "sync_timeout_s"), "sync: disk"),
)
# For each reward: REWARD is its name, LEAST its shortest time limit, FITTING the advantages that take steps.
REWARDS: tuple[tuple[Callable[["RLStage", RewardConfig, registry.Entry], object], str], ...] = (
    (lambda s, r, traits: traits.is_of_generate and s.rollout.generate.is_one_turn,
     "reward REWARD is what a function that generates says, and generate one_turn says none; name another reward, or a "
     "function as rollout.generate"),
    (lambda s, r, traits: traits.scores_steps and s.rollout.generate.name.partition(":")[0] in ("agent", "verifiers"),
     "reward REWARD scores the steps of a response, and what generate {rollout.generate.name} answers has no place in "
     "the tokens; name a reward of whole answers"),
    (lambda s, r, traits: traits.scores_steps and (len(s.reward) > 1 or r.weight != 1.0),
     "reward REWARD scores steps, which cannot be added to other rewards; name it alone, without a weight, and let it "
     "score what the others would as steps"),
    (lambda s, r, traits: traits.scores_steps and not getattr(s.algorithm.advantage.traits, "takes_steps", False),
     "algorithm.advantage {algorithm.advantage} is of whole responses, and the reward REWARD scores their steps; use "
     "FITTING"),
    (lambda s, r, traits: traits.scores_steps and s.rollout.overlong_buffer,
     "[rollout.overlong_buffer] takes off a response's reward, and with REWARD its steps are trained; set it to 0, and "
     "let the function score the length as a step"),
    (lambda s, r, traits: traits.scores_steps and s.algorithm.kl_in == "reward" and not s.algorithm.has_critic,
     "algorithm.kl_in: reward takes a sum off a response's reward, and with REWARD its steps are trained; use kl_in: "
     "loss, or advantage gae"),
    (lambda s, r, traits: s.rollout.reward_timeout_s < traits.least_timeout_s,
     "[rollout.reward_timeout_s:g] is below LEAST, what the reward REWARD takes, so a program that hangs would fail "
     "instead of being wrong; raise it"),
)
# fmt: on


def _of_models(stage: "RLStage") -> Iterator[str]:
    """Models that are inputs, and inputs that are models."""
    for label in ("critic", "reference", "teacher"):
        model = getattr(stage.algorithm, label).model
        if (model == "input") != (label in stage.inputs):
            way = f"name a stage as inputs.{label}" if model == "input" else f"set {label}.model to input"
            yield f"algorithm.{label}.model {model!r} and inputs ({listed(stage.inputs)}) do not fit together; {way}"


def _of_samplers(stage: "RLStage") -> Iterator[str]:
    """A benchmark's answers in the sampler's context, and memory that samplers share with rank 0."""
    sampler, context = stage.sampler, stage.sampler.context
    for benchmark in stage.evaluation.benchmarks:
        if "auto" not in (context, benchmark.max_new_tokens) and int(context) <= int(benchmark.max_new_tokens):
            yield (
                f"sampler.context {context} leaves no room for a prompt beside max_new_tokens "
                f"{benchmark.max_new_tokens} of benchmark {benchmark.name}; raise the one or lower the other"
            )
    if stage.weights.sync != "ipc":
        return
    ranks, replicas, is_on_gpu = stage.resources.num_ranks, sampler.replicas, stage.resources.device == "cuda"
    here = 0 if "auto" in (ranks, replicas) else int(ranks) // stage.resources.num_nodes
    if is_on_gpu and here and (gpus := int(replicas) * sampler.tensor_parallel) > here:
        yield (
            f"weights.sync: ipc with samplers on {gpus} GPUs and ranks on {here}: each rank shares memory of its own "
            "GPU, which samplers on others cannot open; lower sampler.replicas, or use disk"
        )
    if is_on_gpu and here > 1 and sampler.has_others:
        yield (
            f"weights.sync: ipc with {here} ranks and servers of others, of which nobody knows on which GPU they are; "
            "use disk or distributed"
        )
    away = [f"sampler.urls {url.url}, a sampler of another machine" for url in map(parse_address, sampler.urls)
            if not url.is_here]  # fmt: skip
    if sampler.nodes:
        away = [f"sampler.nodes {sampler.nodes}, samplers of other machines"]
    elif stage.placement == "separate" and stage.resources.device == "cuda":
        away = ["placement: separate, samplers on other GPUs"]
    if away:
        yield (
            f"weights.sync: ipc with {away[0]}, which cannot open the memory that rank 0 shares; use disk or "
            "distributed"
        )


def _of_rewards(stage: "RLStage") -> Iterator[str]:
    """Rewards that do not go together, or not with what is made of them."""
    if not stage.reward or not any(reward.weight for reward in stage.reward):
        weights = listed(f"{reward.name} {reward.weight:g}" for reward in stage.reward)
        yield f"reward ({weights}) has nothing to add up, or weights of 0 alone; give one a weight"
    names = [reward.name for reward in stage.reward]
    for source in (*stage.data, *stage.evaluation.validation):
        if source.reward != "auto" and "auto" not in names:
            yield (
                f"reward {listed(names)} judges every prompt, so the reward {source.reward} of {source.url} means "
                "nothing; leave out one of them"
            )
    if twice := sorted({name for name in names if names.count(name) > 1}):
        yield f"reward {twice[0]} stands twice; name it once, with the sum of the weights"
    fitting = sorted((n for n, entry in registry.entries_of("advantage").items() if entry.takes_steps), reverse=True)
    for reward in stage.reward:
        if (traits := reward.traits) is None:
            continue
        for is_so, sentence in REWARDS:
            if is_so(stage, reward, traits):
                least = f"{traits.least_timeout_s:g}"
                words = {"LEAST": least, "FITTING": " or ".join(fitting), "REWARD": reward.name}
                yield _filled(stage, sentence, words)
