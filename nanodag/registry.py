"""Named entries: what a config may choose for each part of the algorithm. Imports nothing before it is used.

An entry is a function. A config names one of ours (`grpo`), a user's own by import path (`my_package.module:function`),
or one made from an argument (`remote:http://...`). The same contract holds for all; tests/rl/test_contracts.py spells
it out and runs over every entry of ours.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from nanodag.errors import ConfigError
from nanodag.errors.words import listed, nearest
from nanodag.own_code.blame import with_place
from nanodag.own_code.functions import function_at

ENTRIES: dict[str, dict[str, str]] = {
    "advantage": {
        "grpo": "nanodag.rl.advantages.grpo:grpo",
        "dr_grpo": "nanodag.rl.advantages.dr_grpo:dr_grpo",
        "rloo": "nanodag.rl.advantages.rloo:rloo",
        "reinforce_pp": "nanodag.rl.advantages.reinforce_pp:reinforce_pp",
        "reinforce_pp_baseline": "nanodag.rl.advantages.reinforce_pp_baseline:reinforce_pp_baseline",
        "gae": "nanodag.rl.advantages.gae:gae",
    },
    "policy_loss": {
        "ppo_clip": "nanodag.rl.losses.ppo_clip:ppo_clip",
        "gspo": "nanodag.rl.losses.gspo:gspo",
        "cispo": "nanodag.rl.losses.cispo:cispo",
        "sapo": "nanodag.rl.losses.sapo:sapo",
        "reinforce": "nanodag.rl.losses.reinforce:reinforce",
    },
    "aggregation": {
        "token": "nanodag.rl.losses.aggregation:by_token",
        "sequence": "nanodag.rl.losses.aggregation:by_sequence",
        "constant": "nanodag.rl.losses.aggregation:by_constant",
    },
    "kl": {
        "k1": "nanodag.rl.losses.kl:k1",
        "k2": "nanodag.rl.losses.kl:k2",
        "k3": "nanodag.rl.losses.kl:k3",
        "low_var": "nanodag.rl.losses.kl:low_var",
    },
    "correction": {
        "none": "nanodag.rl.losses.corrections:none",
        "tis": "nanodag.rl.losses.corrections:truncated",
        "tis_sequence": "nanodag.rl.losses.corrections:sequence_truncated",
        "icepop": "nanodag.rl.losses.corrections:token_masked",
        "mis": "nanodag.rl.losses.corrections:sequence_masked",
    },
    "reward": {
        "exact": "nanodag.rewards.exact:exact",
        "math": "nanodag.rewards.math_answer:math_answer",
        "gsm8k": "nanodag.rewards.gsm8k:gsm8k",
        "multiple_choice": "nanodag.rewards.multiple_choice:multiple_choice",
        "reasoning_gym": "nanodag.rewards.reasoning_gym_answer:reasoning_gym_answer",
        "f1": "nanodag.rewards.f1:f1",
        "instruction_following": "nanodag.rewards.instruction_following:instruction_following",
        "code": "nanodag.rewards.code:code",
    },
    "generate": {
        "calculator": "nanodag.rl.rollouts.turns.calculator:calculator",
        "python": "nanodag.rl.rollouts.turns.interpreter:interpreter",
    },
    "filter": {
        "nonzero_spread": "nanodag.rl.rollouts.filters:nonzero_spread",
        "mean_reward": "nanodag.rl.rollouts.filters:mean_reward",
        "length": "nanodag.rl.rollouts.filters:length",
        "diversity": "nanodag.rl.rollouts.filters:diversity",
    },
}

# `prefix:argument` names an object made with the argument.
WITH_ARGUMENT: dict[str, dict[str, str]] = {
    "reward": {
        "remote": "nanodag.rewards.remote:Remote",
        "model": "nanodag.rewards.reward_model:RewardModel",
        "group": "nanodag.rewards.group_reward:GroupReward",
        "process": "nanodag.rewards.step_reward:Steps",
    },
}

SHIPPED = frozenset(path for named in ENTRIES.values() for path in named.values())

FUNCTION_PREFIXES = ("group:", "process:")  # whose argument is a user's function


def names(kind: str) -> tuple[str, ...]:
    """The names of one kind that nanodag ships."""
    return tuple(ENTRIES[kind])


def import_path(kind: str, name: str) -> str:
    """`module:function` of an entry. Raises ConfigError for a name that is neither ours nor an import path."""
    if name in ENTRIES[kind]:
        return ENTRIES[kind][name]
    module, separator, function = name.partition(":")
    if separator and module in WITH_ARGUMENT.get(kind, {}):
        _check_argument(module, function)
        return WITH_ARGUMENT[kind][module]
    if _is_path(name):
        return name
    raise ConfigError(
        f"there is no {kind.replace('_', ' ')} {name!r:.80}; choose one of {', '.join(ENTRIES[kind])}, or name a "
        f"function of your own as package.module:function.{nearest(name, ENTRIES[kind])}"
    )


def without_prefix(name: str) -> str:
    """`module:function` of a user's function that may be named after a prefix."""
    for prefix in FUNCTION_PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _is_path(name: str) -> bool:
    module, _, function = name.partition(":")
    return function.isidentifier() and all(part.isidentifier() for part in module.split("."))


def load(kind: str, name: str) -> Callable[..., Any]:
    """The function of an entry. Raises ConfigError when a user's own cannot be imported."""
    path = import_path(kind, name)
    prefix, _, argument = name.partition(":")
    try:
        found = function_at(path)
        return found(argument) if prefix in WITH_ARGUMENT.get(kind, {}) else found
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"The {kind.replace('_', ' ')} {path!r} cannot be imported: {with_place(error)}. Check the spelling, and "
            "that its package is installed or on PYTHONPATH."
        ) from error


def _check_argument(prefix: str, argument: str) -> None:
    if prefix == "remote" and not argument.startswith(("http://", "https://")):
        raise ConfigError(f"The reward remote:{argument} needs a URL that begins with http:// or https://.")
    if f"{prefix}:" in FUNCTION_PREFIXES and not _is_path(argument):
        raise ConfigError(f"The reward {prefix}:{argument} needs a function as {prefix}:package.module:function.")
    if prefix == "model" and not argument.startswith("/"):
        raise ConfigError(f"The reward model:{argument} needs the absolute path of a Hugging Face directory.")


def load_filter(name: str, options: Mapping[str, float]) -> Callable[..., str | None]:
    """A filter with its options set. Raises ConfigError for an option that it does not have, one that it needs and is
    not given, and options left out where it would then drop nothing."""
    function = load("filter", name)
    takes = [one for one in inspect.signature(function).parameters.values() if one.kind is one.KEYWORD_ONLY]
    known = {one.name for one in takes}
    needed = {one.name for one in takes if one.default is one.empty}
    unknown, missing = sorted(options.keys() - known), sorted(needed - options.keys())
    if unknown or missing or (known and not options):
        needs = f"the option {missing[0]!r}" if missing else "an option, or it would drop nothing"
        what = f"has no option {unknown[0]!r}" if unknown else f"needs {needs}"
        example = f", as in {{name: {name}, options: {{{min(known)}: 0.5}}}}" if known else ""
        raise ConfigError(f"The filter {name!r} {what}; it takes {', '.join(sorted(known)) or 'no options'}{example}.")
    return partial(function, **options)


def load_generate(name: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    """A function that generates, with its options set. Raises ConfigError for one that is not `async def`, or does not
    take these options."""
    function = load("generate", name)
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(f"generate {name!r} must be an `async def` function; found {function!r:.100}.")
    try:
        inspect.signature(function).bind(None, None, **options)
    except TypeError as error:
        given = f"(sampler, sample) and the options {listed(options)}"
        raise ConfigError(f"generate {name!r} is called with {given}: {error}.") from error
    return partial(function, **options)
