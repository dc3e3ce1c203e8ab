"""Remarks on the curves of a stage, finished or under way, for which somebody who watches it would stop it."""

from statistics import fmean, median

from nanodag.report.gather import ReportedStage

WINDOW = 10  # steps
# Metric of RL -> the mean of a window from which on it is said, and how.
SHARES = {
    "zero_spread_share": (0.8, "groups have rewards that are all alike: nothing to prefer. Change the prompts"),
    "truncated_share": (0.25, "answers are cut at the limit. Raise rollout.max_new_tokens"),
    "repeated_share": (0.25, "answers repeat themselves. Lower the learning rate"),
}
NOISE = 3.0  # standard deviations of a window's mean by which it must lie above the lowest window's
RISE = 0.03  # share of the lowest mean, the same
NORMAL = 0.826  # median distance of a value from the middle of its neighbours, in standard deviations


def unusual(stage: ReportedStage) -> list[str]:
    """Sentences on a stage: rewards all alike, answers that are cut or repeat themselves, a loss that rises."""
    remarks = []
    for name, (least, words) in SHARES.items():
        shares = stage.curve(name)[1][-WINDOW:] if stage.kind.config.makes_rollouts else []
        if shares and (share := fmean(shares)) >= least:
            remarks.append(f"{stage.name}: {share:.0%} of the last {words}.")
    for name in ("loss", "validation_loss") if stage.kind.config.curves == "loss" else ():
        steps, values = stage.curve(name)
        size = max(2, len(values) // 8)
        means = [fmean(values[n : n + size]) for n in range(len(values) - size + 1)]
        if len(means) <= size or (name != "loss" and stage.config.get("patience")):  # that stops by it
            continue
        low = min(range(len(means)), key=means.__getitem__)
        # Of the whole curve, less its trend: a mixture's steps differ more than the few of the last window show.
        bends = [abs(now - (before + after) / 2) for before, now, after in zip(values, values[1:], values[2:])]
        noise = median(bends) / NORMAL * (2 / size) ** 0.5
        if means[-1] - means[low] > NOISE * noise + RISE * abs(means[low]):
            rise = f"{means[low]:.3g} from step {steps[low]:.0f} on, now {means[-1]:.3g}"
            remarks.append(f"{stage.name}: {name.replace('_', ' ')} rises, {rise}.")
    return remarks
