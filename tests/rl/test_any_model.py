"""RL of models that transformers' classes compute: a whole step against plain PyTorch on those classes."""

import pytest
import torch

from tests.forks import call
from tests.model.model_types import TYPES, make_tiny, taken_by_transformers
from tests.rl.models import furthest, trainer_of, weights_of
from tests.rl.rollouts import rollout
from tests.rl.test_update import plain_update

pytestmark = pytest.mark.filterwarnings("ignore")
MOST_APART = 2e-5  # AdamW's first step moves a weight by the whole rate, whatever its gradient


def a_step(folder, name, zero_stage):
    """Furthest difference of weights after a step, and how far these moved."""
    model = make_tiny(name, folder)
    taken_by_transformers(folder)
    prompt, answer = [5, 9, 40, 3, 8, 17, 60], [3, 55, 9, 70]
    # Of lengths that make rows of several classes.
    rollouts = [rollout("a", i, prompt, answer * times, reward=float(i)) for i, times in enumerate((1, 4, 2))]
    settings = {"learning_rate": 1e-3, "weight_decay": 0.0, "eps": 1e-4, "kl_metric": True}
    trainer = trainer_of(folder, precision="fp32", zero_stage=zero_stage, **settings)
    before = weights_of(trainer)
    trainer.train(1, rollouts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-4, weight_decay=0.0)
    plain_update(model, optimizer, rollouts, {})
    after = weights_of(trainer)
    return furthest(after, {f"decoder.{n}": p for n, p in model.named_parameters()}), furthest(after, before)


QUICK = [("gemma2", 1), ("qwen3_moe", 3), ("falcon_h1", 3)]
REST = [(name, stage) for name in TYPES for stage in (1, 3) if (name, stage) not in QUICK]
CASES = [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in REST)]


@pytest.mark.parametrize(("name", "zero_stage"), CASES)
def test_a_step_is_that_of_plain_pytorch_on_transformers_class(tmp_path, name, zero_stage):
    apart, moved = call(a_step, tmp_path, name, zero_stage)
    assert apart <= MOST_APART and moved > 1e-4
