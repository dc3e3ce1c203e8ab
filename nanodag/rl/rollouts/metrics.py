"""The numbers of a step: what rollouts look like, what the trainer's ranks counted, and what took how long; and whether
a whole stage learned anything. No torch here.
"""

import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import fmean, linear_regression, median
from typing import Any

from nanodag.evaluation.intervals import student_p
from nanodag.evaluation.results import pass_at
from nanodag.rl.rollouts.filters import OVERLONG
from nanodag.rl.rollouts.rollout import METRICS, TURNS, Rollout, groups_of, main_sequences, reward_spread

SOLVED_FROM = 0.999
GRAM = 4
SMALLEST_VARIANCE = 1e-12
REPEATED_FROM = 0.5
ALIKE_FROM = 0.999
FEWEST_STEPS = 8  # with fewer, the noise of a step's reward is not known well enough to speak of a trend
NOISE = 0.05
FALL = 4.0  # of series without a trend some 4 in 100 fall so far, where neighbours are much alike 10
Timed = tuple[str, float, float]
"""name, begin, end: seconds since 1970."""
Sums = Mapping[str, Mapping[str, float]]
"""Numbers of micro-batches added up. `summed`: sums over trained tokens; `largest`: maxima."""
TRAINERS = ("train", "checkpoint", "trainer_waits")


def _added(ranks: Sequence[Sums]) -> tuple[dict[str, float], dict[str, float]]:
    summed: dict[str, float] = {}
    largest: dict[str, float] = {}
    for sums in ranks:
        for name, value in sums["summed"].items():
            summed[name] = summed.get(name, 0.0) + value
        for name, value in sums["largest"].items():
            largest[name] = max(largest.get(name, value), value)
    return summed, largest


def trainer_metrics(ranks: Sequence[Sums], *, num_updates: int) -> dict[str, float]:
    """Means over the trained tokens of all ranks and updates of a step (docs/reference/metrics.md).

    mismatch = old logprob minus the sampler's: mean, mean size, largest size, and as a KL (k3). None of mismatch,
    correction and left_out_share where answers are imitated.
    """
    summed, largest = _added(ranks)
    tokens = max(summed["tokens"], 1.0)
    metrics = {"loss": summed["loss"] / num_updates, "trained_tokens": summed["tokens"] / num_updates}
    names = ("entropy", "ratio", "clipped", "mismatch", "mismatch_absolute", "mismatch_kl", "correction", "left_out")
    for name in (*names, "kl", "teacher_kl"):
        if name in summed:
            metrics[f"{name}_share" if name in ("clipped", "left_out") else name] = summed[name] / tokens
    return metrics | largest


def update_metrics(replies: Sequence[Mapping[str, Any]], *, critic_epochs: int) -> dict[str, float]:
    """Metrics of a step's updates. replies: of the trainer's ranks, which say the same but for sums and sizes."""
    first = replies[0]
    values = trainer_metrics([reply["sums"] for reply in replies], num_updates=first["num_passes"])
    if "critic" in first:
        num_updates = first["num_parts"] * critic_epochs
        values |= critic_metrics([reply["critic"] for reply in replies], num_updates=num_updates)
        values["critic_gradient_norm"] = first["critic_gradient_norm"]
    values |= {name: first[name] for name in ("gradient_norm", "skipped_updates", "learning_rate")}
    values |= {name: sum(r[name] for r in replies) for name in ("computed_tokens", "scored_tokens", "peak_flops")}
    return values | {"trainer_peak_bytes": max(reply["peak_bytes"] for reply in replies)}


def critic_metrics(ranks: Sequence[Sums], *, num_updates: int) -> dict[str, float]:
    """Means over the trained tokens of all ranks (docs/reference/metrics.md). num_updates: of the critic, over which
    value_loss is a mean. value_mean, return_mean: before the step. value_explained: left out where all returns are
    equal."""
    summed, _ = _added(ranks)
    tokens = max(summed["tokens"], 1.0)
    metrics = {
        "value_loss": summed["value_loss"] / num_updates,
        "value_clipped_share": summed["clipped"] / tokens / num_updates,
        "value_mean": summed["value"] / tokens,
        "return_mean": summed["return"] / tokens,
    }
    spread = summed["return_squared"] / tokens - metrics["return_mean"] ** 2
    if spread > SMALLEST_VARIANCE:
        unexplained = summed["error_squared"] / tokens - (summed["error"] / tokens) ** 2
        metrics["value_explained"] = 1.0 - unexplained / spread
    return metrics


def rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Over all generated rollouts, dropped ones too (docs/reference/metrics.md): reward and its parts, pass rate,
    lengths, truncated and repeated share, groups without spread.

    Rollouts whose reward failed count as reward_failed only, those whose generation failed as generate_failed. A sample
    of several sequences counts once, by its main one; sequences: how many a sample has, where any has more. turns,
    metric_<name>: over samples of which an environment says them.
    """
    everything, rollouts = len(rollouts), main_sequences(rollouts)
    scored = [rollout for rollout in rollouts if rollout.reward is not None]
    lengths = [rollout.num_sampled for rollout in rollouts]
    groups = list(groups_of(scored).values())
    num_broken = sum(rollout.finish_reason == "error" for rollout in rollouts)
    metrics = {
        "rollouts": float(len(rollouts)),
        "reward_failed": float(len(rollouts) - len(scored) - num_broken),
        "response_tokens": fmean(lengths) if lengths else 0.0,
        "response_tokens_median": float(median(lengths)) if lengths else 0.0,
        "response_tokens_largest": float(max(lengths, default=0)),
        "truncated_share": _share([rollout.finish_reason == "length" for rollout in rollouts]),
        "repeated_share": _share([repetition(rollout.sampled_token_ids) > REPEATED_FROM for rollout in rollouts]),
        "zero_spread_share": _share([reward_spread(group) == 0.0 for group in groups]),
    }
    if scored:
        metrics["reward"] = fmean(rollout.reward for rollout in scored if rollout.reward is not None)
        metrics["pass_rate"] = _share([_is_solved(rollout) for rollout in scored])
        metrics["pass_at_n"] = _share([any(map(_is_solved, group)) for group in groups])
        metrics |= _pass_at([(len(group), sum(map(_is_solved, group))) for group in groups])
    if everything > len(rollouts):
        metrics["sequences"] = everything / len(rollouts)
    if num_broken:
        metrics["generate_failed"] = float(num_broken)
    if any(span.kind == "tool" for rollout in rollouts for span in rollout.spans):
        metrics["tool_results"] = fmean(sum(s.kind == "tool" for s in rollout.spans) for rollout in rollouts)
    components = [(f"reward_{name}", v) for rollout in scored for name, v in rollout.reward_components.items()]
    reported = [(f"metric_{name}", v) for rollout in rollouts for name, v in said_metrics(rollout).items()]
    reported += [(TURNS, n) for rollout in rollouts if isinstance(n := rollout.metadata.get(TURNS), int | float)]
    return {**metrics, **_means(components), **_means(reported)}


def repetition(token_ids: Sequence[int]) -> float:
    """Share of 4-grams that occurred before in the same response: 1 - different / all, 0.0 below 4 tokens (seq-rep-4 of
    Welleck et al. 2019, arXiv:1908.04319)."""
    number = len(token_ids) - GRAM + 1
    different = len(set(zip(*(token_ids[start:] for start in range(GRAM)), strict=False)))
    return 1.0 - different / number if number > 0 else 0.0


def speeds(
    values: Mapping[str, float], seconds: Mapping[str, float], *, num_parameters: int, num_head_parameters: int
) -> dict[str, float]:
    """Tokens a second of either side while it worked, and `mfu`, the share of the matmul peak of all ranks that
    training reached.

    values: sampled_tokens, seconds_generate; and where something was trained computed_tokens, scored_tokens, of them
    those whose logits were computed, and peak_flops, the peak. seconds: train. num_parameters: of the matrices but the
    head. FLOPs are 6 a parameter and token (2 forward, 4 backward; Kaplan et al. 2020, arXiv:2001.08361, table 1),
    without attention, and without what scoring with old or reference weights takes.
    """
    metrics = {"sampled_tokens_per_second": values["sampled_tokens"] / max(values["seconds_generate"], 1e-9)}
    if "computed_tokens" in values:
        metrics["tokens_per_second"] = values["computed_tokens"] / max(seconds["train"], 1e-9)
        worked = num_parameters * values["computed_tokens"] + num_head_parameters * values["scored_tokens"]
        metrics["mfu"] = 6 * worked / max(seconds["train"], 1e-9) / values["peak_flops"]
    return metrics


def cost_of(totals: Mapping[str, int], *, num_parameters: int, num_head_parameters: int) -> dict[str, int]:
    """Tokens and FLOPs of a stage: 2 a parameter and token forward, 4 backward; prompts are run once for a group on
    both sides, and have no logits. num_parameters: of the matrices but the head."""
    forward = totals["sampled"] + totals["prompt"]
    flops = num_parameters * (6 * totals["computed"] + 2 * forward)
    flops += num_head_parameters * (6 * totals["scored"] + 2 * totals["sampled"])
    return {
        "tokens": totals["computed"],
        "forward_tokens": forward,
        "sampled_tokens": totals["sampled"],
        "flops": flops,
    }


def drop_counts(reasons: Sequence[str]) -> dict[str, float]:
    """Number of groups that were dropped, by the reason."""
    return {f"dropped_{reason}": float(count) for reason, count in sorted(Counter(reasons).items())}


def _is_solved(rollout: Rollout) -> bool:
    taken = rollout.reward_components.get(OVERLONG, 0.0)
    return rollout.reward is not None and rollout.reward - taken >= SOLVED_FROM


def _pass_at(groups: Sequence[tuple[int, int]]) -> dict[str, float]:
    """groups: (samples, solved) of each."""
    shares, k = {}, 1
    while enough := [(size, solved) for size, solved in groups if size >= k and size > 1]:
        shares[f"pass_at_{k}"] = fmean(pass_at(k, size, solved) for size, solved in enough)
        k *= 2
    return shares


def _share(flags: Sequence[bool]) -> float:
    return sum(flags) / len(flags) if flags else 0.0


def _means(pairs: Iterable[tuple[str, float]]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for name, value in pairs:
        values.setdefault(name, []).append(value)
    return {name: fmean(of_name) for name, of_name in sorted(values.items())}


def said_metrics(rollout: Rollout) -> Mapping[str, float]:
    """Numbers that an environment says by name. A function of a user's may keep something else under that word."""
    metrics = rollout.metadata.get(METRICS)
    named = metrics.items() if isinstance(metrics, Mapping) else ()
    return {name: value for name, value in named if isinstance(value, int | float)}


def learning_of(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Summary of a whole stage, from the records of metrics.jsonl.

    reward_first, reward_last: ends of the straight line through the steps' rewards; reward_p: of "there is no trend"
    (two-sided, Student's t), left out below FEWEST_STEPS steps. zero_spread_share: mean over the steps.
    """
    steps = [line for line in lines if line.get("event", "step") == "step" and line.get("step", 0) > 0]
    summary: dict[str, float] = {}
    if shares := [float(line["zero_spread_share"]) for line in steps if "zero_spread_share" in line]:
        summary["zero_spread_share"] = fmean(shares)
    pairs = [(float(line["step"]), float(line["reward"])) for line in steps if "reward" in line]
    if len(pairs) < FEWEST_STEPS:
        return summary
    xs, ys = zip(*pairs, strict=True)
    slope, intercept = linear_regression(xs, ys)
    summary |= {"reward_first": intercept + slope * xs[0], "reward_last": intercept + slope * xs[-1]}
    residual = sum((y - intercept - slope * x) ** 2 for x, y in pairs) / (len(pairs) - 2)
    stderr = math.sqrt(residual / sum((x - fmean(xs)) ** 2 for x in xs))
    is_flat = abs(slope) <= 1e-12  # a reward that is the same in every step has neither trend nor noise
    summary["reward_p"] = 1.0 if is_flat else student_p(slope, stderr, len(pairs) - 2) if stderr else 0.0
    return summary


def why_nothing_was_learned(metrics: Mapping[str, Any]) -> list[str]:
    """Reasons to believe that an RL stage learned nothing, from the metrics that it ended with; none, normally."""
    if metrics.get("version", 1) == 0:
        return ["no update of the weights was made."]
    reasons = []
    if metrics.get("zero_spread_share", 0.0) >= ALIKE_FROM:
        reasons.append("the rewards in each group were all alike, so there was nothing to prefer.")
    if "reward_p" in metrics:
        first, last = metrics["reward_first"], metrics["reward_last"]
        if metrics["reward_p"] >= NOISE:
            reasons.append(f"the reward stayed flat, {first:.3g} at first, {last:.3g} at last: no trend beyond noise.")
        elif last < first:
            reasons.append(f"the reward fell, from {first:.3g} at first to {last:.3g} at last.")
    return reasons


def over_optimised(lines: Sequence[Mapping[str, Any]], watched: Mapping[str, str]) -> list[str]:
    """Where the reward rose on while a measure that was not trained on fell again. lines: of metrics.jsonl. watched:
    label by metric, better when higher. The fall from the best window of an eighth of the values to the last one must
    be FALL times the noise of the difference of two such means."""
    found = []
    rewards = [(line["step"], line["reward"]) for line in lines if "reward" in line]
    for name, label in watched.items():
        curve = [(line["step"], line[name]) for line in lines if name in line]
        if len(curve) < FEWEST_STEPS:
            continue
        steps, values = zip(*curve, strict=True)
        size = len(values) // FEWEST_STEPS
        means = [fmean(values[n : n + size]) for n in range(len(values) - size + 1)]
        best = max(range(len(means)), key=means.__getitem__)
        eighths = means[::-size]  # how far each is off its neighbours' middle is noise, and no trend
        noise = math.sqrt(fmean((a - 2 * b + c) ** 2 for a, b, c in zip(eighths, eighths[1:], eighths[2:])) / 3)
        since = [reward for step, reward in rewards if step >= steps[best]]
        then = since[: max(1, sum(steps[best] <= step <= steps[best + size - 1] for step, _ in rewards))]
        last = [reward for step, reward in rewards if step >= steps[-size]]
        if means[best] - means[-1] > FALL * noise and then and last and fmean(last) > fmean(then):
            found.append(
                f"from step {steps[best]} on the reward rose, {fmean(then):.3g} to {fmean(last):.3g}, and {label}, "
                f"which it does not see, fell, {means[best]:.3g} to {means[-1]:.3g}. Raise algorithm.kl_coefficient, "
                "or end at that step."
            )
    return found


def chrome_trace(spans: Sequence[Timed]) -> dict[str, Any]:
    """The spans as chrome://tracing and ui.perfetto.dev read them: a row for the trainer's side, one for the
    samplers'."""
    rows = {"trainer": 0, "samplers": 1}
    names = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": tid, "args": {"name": side}} for side, tid in rows.items()
    ]
    events = [
        {
            "ph": "X",
            "name": name,
            "pid": 0,
            "tid": rows["trainer" if name in TRAINERS else "samplers"],
            "ts": round(begin * 1e6),
            "dur": round((end - begin) * 1e6),
        }
        for name, begin, end in spans
    ]
    return {"traceEvents": [*names, *events], "displayTimeUnit": "ms"}


class Stopwatch:
    """Seconds by name. Parts that overlap count in full, so they may add up to more than `step`, the wall time."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._spans: list[Timed] = []
        self._began = time.monotonic()
        self._offset = time.time() - self._began

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add what the block takes."""
        began = time.monotonic()
        try:
            yield
        finally:
            ended = time.monotonic()
            self._seconds[name] = self._seconds.get(name, 0.0) + ended - began
            self._spans.append((name, round(began + self._offset, 4), round(ended + self._offset, 4)))

    def taken(self) -> tuple[dict[str, float], list[Timed]]:
        """Since this was called last: seconds by name, `step` among them, the wall time; and what ended when."""
        now = time.monotonic()
        seconds, spans = {**self._seconds, "step": now - self._began}, self._spans
        self._seconds, self._spans, self._began = {}, [], now
        return seconds, spans
