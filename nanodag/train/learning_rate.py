"""The learning rate over a stage."""

from nanodag.config.supervised import ScheduleConfig


def rate_factor(step: int, num_steps: int, config: ScheduleConfig) -> float:
    """What the peak learning rate is multiplied by at a step, counted from 0.

    Rises linearly to 1 over the warm-up's steps, stays, falls linearly towards final_fraction, which would be reached
    one step after the last: no step is taken at a rate of 0.
    """
    warmup = round(config.warmup_fraction * num_steps)
    decay = round(config.decay_fraction * num_steps)
    if step < warmup:
        return (step + 1) / warmup
    left = num_steps - step
    if left >= decay:
        return 1.0
    return config.final_fraction + (1 - config.final_fraction) * left / decay
