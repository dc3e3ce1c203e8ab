"""Settings that users of other trainers know: schedules, a horizon in epochs, bounds, limits."""

import math
from contextlib import nullcontext

import pytest
import torch

from nanodag.config.derive_sampler import derive_sampler
from nanodag.config.kinds.rl import RLStage
from nanodag.config.pipeline import DataSize
from nanodag.data.mixture import Mixture
from nanodag.errors import ConfigError, StageFailed
from nanodag.plan.rl import planned_steps
from nanodag.plan.sizes import Sizes
from nanodag.rl.control.checks import check_mismatch
from nanodag.rl.rollouts.prompts import with_num_steps
from nanodag.train.learning_rate import policy_rate
from tests.forks import call
from tests.rl.models import furthest, save_tiny_model, trainer_of, weights_of
from tests.rl.rollouts import rollout
from tests.rl.stages import MACHINE, on


def stage(**config) -> RLStage:
    return RLStage.of(**{"kind": "rl", "data": ["file:x"], **config})


def rates(num_steps: int, **optimizer) -> list[float]:
    section = stage(**optimizer).optimizer
    return [policy_rate(section, steps_done=n, num_updates=n, num_steps=num_steps) for n in range(num_steps)]


def torch_rates(scheduler, num_steps: int, **options) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2e-3)
    made, found = scheduler(optimizer, **options), []
    for _ in range(num_steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        made.step()
    return found


def test_decays_are_torchs_schedulers_from_the_end_of_the_warm_up_on():
    peak = {"learning_rate": 2e-3, "learning_rate_minimum": 5e-4}
    wanted = torch_rates(torch.optim.lr_scheduler.CosineAnnealingLR, 9, T_max=9, eta_min=5e-4)
    assert rates(9, learning_rate_decay="cosine", **peak) == pytest.approx(wanted)
    linear = {"start_factor": 1.0, "end_factor": 0.25, "total_iters": 9}
    wanted = torch_rates(torch.optim.lr_scheduler.LinearLR, 9, **linear)
    assert rates(9, learning_rate_decay="linear", **peak) == pytest.approx(wanted)
    warm = rates(12, learning_rate_decay="linear", warmup_steps=3, **peak)
    assert warm[3:] == pytest.approx(wanted) and warm[:3] == pytest.approx([2e-3 / 4, 2e-3 / 2, 2e-3 * 3 / 4])
    assert rates(3, learning_rate=2e-3) == [2e-3] * 3


def test_a_decay_goes_by_the_steps_that_a_critic_s_warm_up_leaves():
    section = stage(learning_rate=1.0, learning_rate_decay="linear", updates_per_step=2).optimizer
    assert policy_rate(section, steps_done=2.5, num_updates=2, num_steps=4, first_step=1) == 1 - 1.5 / 3


def test_epochs_are_as_many_steps_as_their_training_prompts_fill(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f'{{"prompt": "{n}", "answer": "x"}}\n' for n in range(21)))
    config = stage(data=[{"url": f"file:{path}[:20]", "held_out": 0.25}], num_epochs=1.5, prompts_per_step=4, seed=1)
    found = with_num_steps(config)
    num_held_out = sum(1 for _ in Mixture(config.data, kind="prompt", seed=1, part="held_out", once=True))
    assert found.num_epochs == 0 and num_held_out > 0 and found.num_steps == math.ceil(1.5 * (20 - num_held_out) / 4)
    whole = stage(data=[f"file:{path}"], num_epochs=1.5, prompts_per_step=4, seed=1)
    assert with_num_steps(whole).num_steps == 8  # 31.5 prompts, 4 a step
    assert with_num_steps(stage(seed=1)) == stage(seed=1)
    gae = stage(data=[f"file:{path}"], num_epochs=0.1, seed=1, advantage="gae", critic={"warmup_steps": 5})
    with pytest.raises(ConfigError, match=r"(?s)num_epochs 0\.1 of 21 prompts.*warmup_steps 5"):
        with_num_steps(gae)


def test_a_plan_knows_the_steps_of_epochs_over_a_known_set():
    gsm8k = stage(data=["hub:openai/gsm8k/main:train"], num_epochs=2, prompts_per_step=32)
    sizes = Sizes([DataSize(url="hub:openai/gsm8k/main:train", rows=7473)])
    assert planned_steps(gsm8k, sizes) == math.ceil(2 * 7473 / 32)
    assert planned_steps(stage(data=["hub:some/body:train"], num_epochs=2), sizes) is None
    assert planned_steps(stage(num_steps=7), sizes) == 7


@pytest.mark.parametrize(
    ("settings", "is_stale", "limit"),
    [
        ({}, False, "weights.mismatch_limit is 0.01"),
        ({"precision": "bf16"}, False, ""),
        ({"mismatch_limit": 0.05}, False, ""),
        ({}, True, ""),
        ({"stale_mismatch_limit": 0.015}, True, "weights.stale_mismatch_limit is 0.015"),
    ],
)
def test_how_far_sampler_and_trainer_may_be_apart_is_a_setting(settings, is_stale, limit):
    given = {**on(1), "seed": 1, "precision": "fp32"}
    config = derive_sampler("rl", stage(**given | settings), MACHINE, None, {})
    with pytest.raises(StageFailed, match=limit) if limit else nullcontext():
        check_mismatch(0.02, config.weights, is_stale=is_stale)


def one_step(folder):
    """The rate of the third of four steps, by how much it moved the weights, and KL to the reference."""
    model, other = save_tiny_model(folder / "model"), save_tiny_model(folder / "other", seed=3)
    groups = [rollout(f"g{g}", i, [1 + g], [4 + i, 5], reward=float(i)) for g in range(2) for i in range(2)]
    values = {"learning_rate_decay": "linear", "eps": 0.1, "weight_decay": 0.0, "gradient_clipping": 0.0}
    values |= {"updates_per_step": 2, "kl_metric": True, "kl_kind": "k1", "reference": {"model": str(other)}}
    trainer = trainer_of(model, precision="fp32", max_new_tokens=8, sampler={"context": 16}, **values)
    before = weights_of(trainer)
    reply = trainer.train(3, groups, num_steps=4)
    return reply["learning_rate"], furthest(weights_of(trainer), before), reply["sums"]["summed"]["kl"]


def test_the_trainer_takes_the_decayed_rate_adamws_eps_and_the_reference_of_ones_own(tmp_path):
    rate, moved, kl = call(one_step, tmp_path)
    assert rate == pytest.approx(1e-3 * (1 - 2.5 / 4))  # the second update of step 3 of 4
    assert 0 < moved < 8e-4  # at an eps of 1e-8 a first update moves each weight by the rate, whatever its gradient
    assert abs(kl) > 0.1  # the first update is of the reference's own weights where it is the policy's
