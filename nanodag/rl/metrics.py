"""The numbers of a step: what rollouts look like, and what the trainer's ranks counted. No torch here."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from nanodag.rl.rollout import Rollout, groups_of, reward_spread
from nanodag.rl.shaping import OVERLONG

SOLVED_FROM = 0.999


@dataclass(slots=True)
class Sums:
    """Numbers of micro-batches added up. summed: sums over trained tokens; largest: maxima."""

    summed: dict[str, float]
    largest: dict[str, float]

    def add(self, other: "Sums") -> None:
        """Add another's numbers to these."""
        for name, value in other.summed.items():
            self.summed[name] = self.summed.get(name, 0.0) + value
        for name, value in other.largest.items():
            self.largest[name] = max(self.largest.get(name, value), value)


def trainer_metrics(ranks: Sequence[Sums], *, num_updates: int) -> dict[str, float]:
    """Means over the trained tokens of all ranks and updates of a step.

    entropy in nats. ratio = exp(trainer - old); clipped_share: tokens whose gradient was cut off. mismatch = old
    logprob minus the sampler's: mean, mean size, largest size, and as a KL (k3). correction: mean importance weight;
    left_out_share: tokens whose weight is 0.
    """
    total = Sums({}, {})
    for sums in ranks:
        total.add(sums)
    tokens = max(total.summed["tokens"], 1.0)
    metrics = {"loss": total.summed["loss"] / num_updates, "trained_tokens": total.summed["tokens"] / num_updates}
    for name, shown in (
        ("entropy", "entropy"),
        ("ratio", "ratio"),
        ("clipped", "clipped_share"),
        ("mismatch", "mismatch"),
        ("mismatch_absolute", "mismatch_absolute"),
        ("mismatch_kl", "mismatch_kl"),
        ("correction", "correction"),
        ("left_out", "left_out_share"),
        ("kl", "kl"),
    ):
        if name in total.summed:
            metrics[shown] = total.summed[name] / tokens
    return metrics | total.largest


def rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Over all generated rollouts, dropped ones too: reward and its parts, pass rate, lengths, truncated share, groups
    without spread.

    pass_rate: share with a reward of at least 0.999, what was taken off for length aside. pass_at_n: share of groups
    with at least one such. Rollouts whose reward failed count as reward_failed only.
    """
    scored = [rollout for rollout in rollouts if rollout.reward is not None]
    lengths = [rollout.num_sampled for rollout in rollouts]
    groups = list(groups_of(scored).values())
    metrics = {
        "rollouts": float(len(rollouts)),
        "reward_failed": float(len(rollouts) - len(scored)),
        "response_tokens": fmean(lengths) if lengths else 0.0,
        "response_tokens_median": float(median(lengths)) if lengths else 0.0,
        "response_tokens_largest": float(max(lengths, default=0)),
        "truncated_share": _share([rollout.finish_reason == "length" for rollout in rollouts]),
        "zero_spread_share": _share([reward_spread(group) == 0.0 for group in groups]),
    }
    if scored:
        metrics["reward"] = fmean(rollout.reward for rollout in scored if rollout.reward is not None)
        metrics["pass_rate"] = _share([_is_solved(rollout) for rollout in scored])
        metrics["pass_at_n"] = _share([any(map(_is_solved, group)) for group in groups])
    return metrics | _component_means(scored)


def drop_counts(reasons: Sequence[str]) -> dict[str, float]:
    """How many groups were dropped for which reason."""
    return {f"dropped_{reason}": float(count) for reason, count in sorted(Counter(reasons).items())}


def _is_solved(rollout: Rollout) -> bool:
    taken = rollout.reward_components.get(OVERLONG, 0.0)
    return rollout.reward is not None and rollout.reward - taken >= SOLVED_FROM


def _share(flags: Sequence[bool]) -> float:
    return sum(flags) / len(flags) if flags else 0.0


def _component_means(rollouts: Sequence[Rollout]) -> Mapping[str, float]:
    values: dict[str, list[float]] = {}
    for rollout in rollouts:
        for name, value in rollout.reward_components.items():
            values.setdefault(f"reward_{name}", []).append(value)
    return {name: fmean(found) for name, found in sorted(values.items())}
