"""RL on prompts with pictures: a whole step against plain PyTorch on transformers' class."""

import os
from dataclasses import replace

import pytest
import torch

from nanodag.host.images import FOLDER, digests_in
from nanodag.model.transformers_class import load_class
from nanodag.rl.rollouts.rollout import groups_of, read_rollouts
from nanodag.tokenizer.chat import load_renderer
from nanodag.worker.job import write_job
from tests.forks import call
from tests.model.vision_models import KINDS, conversation, make_vision, seen
from tests.rl.models import furthest, trainer_of, weights_of
from tests.rl.rollouts import rollout
from tests.rl.stages import make_job, on, run

pytestmark = pytest.mark.filterwarnings("ignore")
ANSWER = [3, 55, 9, 70]


def plain_step(model, folder, rollouts, **optimizer):
    """AdamW's first step on groups of rollouts, one at a time, on transformers' class."""
    chosen = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98), **optimizer)
    num_tokens = sum(one.num_sampled for one in rollouts)
    for group in groups_of(rollouts).values():
        rewards = torch.tensor([one.reward for one in group], dtype=torch.float64)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        for one, advantage in zip(group, advantages.float(), strict=True):
            ids, start = torch.tensor([one.prompt_token_ids + one.response_token_ids]), len(one.prompt_token_ids)
            logits = model(**seen(ids, model, folder)).logits[0, start - 1 : -1]
            logprobs = logits.log_softmax(-1).gather(1, ids[0, start:, None])
            (-(logprobs - logprobs.detach()).exp() * advantage).sum().div(num_tokens).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    chosen.step()


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
    plain_step(model, folder, rollouts, eps=1e-4, weight_decay=0.0)
    after = weights_of(trainer)
    return furthest(after, {f"decoder.{n}": p for n, p in model.named_parameters()}), furthest(after, before)


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_a_step_on_pictures_is_that_of_plain_pytorch(tmp_path, zero_stage):
    apart, moved = call(a_step, tmp_path / "model", tmp_path / "images", zero_stage)
    assert apart <= 2e-5 and moved > 1e-4


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_two_ranks_of_which_one_has_no_picture_step_as_plain_pytorch(tmp_path, monkeypatch, kind, zero_stage):
    monkeypatch.setenv(FOLDER, str(tmp_path / "images"))
    model = make_vision(kind, tmp_path / "seen")
    pictures = {"url": "python:nanodag.data.picture_problems:count_shapes?size=1", "adapter": "problem"}
    texts = {"url": "python:nanodag.data.lists:sort?size=1&count=3", "adapter": "problem"}
    how = {"prompts_per_step": 2, "num_steps": 1, "eval_prompts": 0, "micro_batch_tokens": 170, "learning_rate": 1e-3}
    how |= {"weight_decay": 0.0, "eps": 1e-4, "zero_stage": zero_stage, "sampler": {"context": 96, "max_batch": 16}}
    job = replace(make_job(tmp_path, data=[pictures, texts], **on(2), **how), inputs={"model": tmp_path / "seen"})
    write_job(job)
    run(job)
    rollouts = list(read_rollouts(job.records / "rollouts" / "step-00000001.jsonl"))
    assert {bool(digests_in(one.prompt_token_ids)) for one in rollouts} == {True, False}
    plain_step(model, tmp_path / "seen", rollouts, eps=1e-4, weight_decay=0.0)
    trained = load_class(job.output).whole
    found, expected = dict(trained.named_parameters()), dict(model.named_parameters())
    assert furthest(found, expected) <= 2e-5
    assert furthest(found, dict(load_class(tmp_path / "seen").whole.named_parameters())) > 1e-4
