"""RL on prompts with pictures: a whole step against plain PyTorch on transformers' class."""

import os

import pytest
import torch

from nanodag.host.images import FOLDER
from nanodag.tokenizer.chat import load_renderer
from tests.forks import call
from tests.model.vision_models import conversation, make_vision, seen
from tests.rl.models import furthest, trainer_of, weights_of
from tests.rl.rollouts import rollout

pytestmark = pytest.mark.filterwarnings("ignore")
ANSWER = [3, 55, 9, 70]


def a_step(folder, images, zero_stage):
    """Furthest difference of weights after a step, and how far these moved."""
    os.environ[FOLDER] = str(images)
    model = make_vision("qwen2_5_vl", folder)
    renderer = load_renderer(folder)
    prompts = [renderer.prompt(conversation(n)["messages"][:1]) for n in (0, 1)]
    prompts.append(renderer.prompt([{"role": "user", "content": "1 + 1?"}]))  # a group without a picture
    rollouts = [
        rollout(name, i, prompt, ANSWER * times, reward=float(i))
        for name, prompt in zip("abc", prompts, strict=True)
        for i, times in enumerate((1, 3, 2))
    ]
    settings = {"learning_rate": 1e-3, "weight_decay": 0.0, "eps": 1e-4, "kl_metric": True}
    trainer = trainer_of(folder, precision="fp32", zero_stage=zero_stage, **settings)
    before = weights_of(trainer)
    trainer.train(1, rollouts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-4, weight_decay=0.0)
    num_tokens = sum(one.num_sampled for one in rollouts)
    rewards = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64)
    advantages = ((rewards - rewards.mean()) / (rewards.std() + 1e-6)).tolist()
    for one in rollouts:
        ids, start = torch.tensor([one.prompt_token_ids + one.response_token_ids]), len(one.prompt_token_ids)
        logits = model(**seen(ids, model, folder)).logits[0, start - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(1, ids[0, start:, None])
        ratio = (logprobs - logprobs.detach()).exp()
        (-ratio * advantages[one.sample_index]).sum().div(num_tokens).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    after = weights_of(trainer)
    return furthest(after, {f"decoder.{n}": p for n, p in model.named_parameters()}), furthest(after, before)


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_a_step_on_pictures_is_that_of_plain_pytorch(tmp_path, zero_stage):
    apart, moved = call(a_step, tmp_path / "model", tmp_path / "images", zero_stage)
    assert apart <= 2e-5 and moved > 1e-4
