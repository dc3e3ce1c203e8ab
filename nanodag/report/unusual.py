"""Remarks on the curves of a stage, finished or under way, for which somebody who watches it would stop it."""

from statistics import fmean, stdev

from nanodag.report.gather import ReportedStage

WINDOW = 10  # steps
# Metric of RL -> the mean of a window from which on it is said, and how.
SHARES = {
    "zero_spread_share": (0.8, "groups have rewards that are all alike: nothing to prefer. Change the prompts"),
    "truncated_share": (0.25, "answers are cut at the limit. Raise rollout.max_new_tokens"),
    "repeated_share": (0.25, "answers repeat themselves. Lower the learning rate"),
}
NOISE = 3.0  # standard deviations of a window by which its mean must lie above the lowest window's


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
        if means[-1] - means[low] > NOISE * stdev(values[-size:]) + 0.01 * abs(means[low]):
            rise = f"{means[low]:.3g} from step {steps[low]:.0f} on, now {means[-1]:.3g}"
            remarks.append(f"{stage.name}: {name.replace('_', ' ')} rises, {rise}.")
    return remarks
