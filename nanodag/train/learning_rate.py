"""The learning rate over a stage: of the supervised loop by its schedule, of RL's policy by its optimizer section."""

import math

from nanodag.config.rl_sections import OptimizerSection
from nanodag.config.supervised import ScheduleConfig


def rate_factor(step: int, num_steps: int, config: ScheduleConfig) -> float:
    """Factor of the peak learning rate at a step, counted from 0.

    Rises linearly to 1 over the warm-up's steps, stays, falls towards final_fraction, which would be reached one step
    after the last: no step is taken at a rate of 0. A cosine is torch's CosineAnnealingLR with eta_min, over the decay.
    """
    warmup = round(config.warmup_fraction * num_steps)
    decay = round(config.decay_fraction * num_steps)
    if step < warmup:
        return (step + 1) / warmup
    left: float = num_steps - step
    if left >= decay:
        return 1.0
    if config.learning_rate_decay == "cosine":
        left = decay * (1.0 - math.cos(math.pi * left / decay)) / 2.0
    return config.final_fraction + (1 - config.final_fraction) * left / decay


def policy_rate(
    optimizer: OptimizerSection, *, steps_done: float, num_updates: int, num_steps: int, first_step: int = 0
) -> float:
    """Learning rate of one update of the policy.

    steps_done: of the policy's step, parts counted, before the update. num_updates: optimizer steps before it. The
    warm-up counts updates, so that steps in which nothing was trained do not shorten it: update n of w has n / (w + 1)
    of the rate. first_step: steps before the policy's first one, in which a critic warms up. The decay counts steps,
    so that it ends where the stage ends: step t of those between warm-up and the end, T of them, has by `linear`
    minimum + (rate - minimum) (1 - t / T) and by `cosine` minimum + (rate - minimum) (1 + cos(pi t / T)) / 2, as
    torch's CosineAnnealingLR with eta_min.
    """
    warmup = optimizer.warmup_steps * optimizer.updates_per_step * optimizer.epochs_per_step
    begin = first_step + optimizer.warmup_steps
    part = min(1.0, max(0.0, steps_done - begin) / max(1, num_steps - begin))
    left = {"none": 1.0, "linear": 1.0 - part, "cosine": (1.0 + math.cos(math.pi * part)) / 2.0}
    minimum = optimizer.learning_rate_minimum
    rate = minimum + (optimizer.learning_rate - minimum) * left[optimizer.learning_rate_decay]
    return rate * min(1.0, (num_updates + 1) / (warmup + 1))
