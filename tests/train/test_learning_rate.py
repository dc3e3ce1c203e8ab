"""The learning rate's shape, worked out by hand."""

import pytest
import torch

from nanodag.config.supervised import ScheduleConfig
from nanodag.train.learning_rate import rate_factor


def test_warm_up_flat_and_decay():
    config = ScheduleConfig(warmup_fraction=0.2, decay_fraction=0.4, final_fraction=0.0)
    factors = [rate_factor(step, 10, config) for step in range(10)]
    assert factors == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25])


def test_decay_goes_towards_the_final_fraction():
    config = ScheduleConfig(warmup_fraction=0.0, decay_fraction=1.0, final_fraction=0.1)
    assert [rate_factor(step, 4, config) for step in range(4)] == pytest.approx([1, 0.775, 0.55, 0.325])


def test_a_cosine_is_torchs():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8, eta_min=0.1)
    rates = []
    for _ in range(8):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    config = ScheduleConfig(warmup_fraction=0.2, decay_fraction=0.8, final_fraction=0.1, learning_rate_decay="cosine")
    assert [rate_factor(step, 10, config) for step in range(10)] == pytest.approx([0.5, 1.0, *rates])


def test_no_step_has_a_rate_of_zero():
    for warmup, decay in ((0.0, 0.0), (0.5, 0.5), (0.0, 1.0), (1.0, 0.0)):
        config = ScheduleConfig(warmup_fraction=warmup, decay_fraction=decay)
        for num_steps in (1, 2, 3, 7):
            assert all(0 < rate_factor(step, num_steps, config) <= 1 for step in range(num_steps))
