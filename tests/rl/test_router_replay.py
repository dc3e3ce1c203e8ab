"""Steps that replay the sampler's experts: against plain PyTorch, between processes, and through a kill."""

import json
from base64 import b64encode
from dataclasses import replace

import numpy as np
import pytest

from nanodag.data.digests import file_sha256
from nanodag.errors import ConfigError
from nanodag.rl.rollouts.rollout import from_json, read_rollouts, to_json
from nanodag.rl.trainer.rows import pack
from nanodag.tokenizer.bpe import save_tokenizer
from nanodag.worker.job import write_job
from tests.forks import call
from tests.model.model_types import make_tiny, taken_by_transformers
from tests.rl import stages
from tests.rl.models import furthest, trainer_of, weights_of
from tests.rl.rollouts import rollout
from tests.rl.stages import KILL

pytestmark = pytest.mark.filterwarnings("ignore")
PROMPT, ANSWER = [5, 9, 40, 3, 8, 17, 60], [3, 55, 9, 70]


def encoded(routes):
    return b64encode(np.ascontiguousarray(routes, dtype=np.int32).tobytes()).decode()


def with_routes(seed):
    """Three rollouts of one group with any two experts of four for each token and layer."""
    generator, rollouts = np.random.default_rng(seed), []
    for index, times in enumerate((1, 4, 2)):
        routes = generator.random((len(PROMPT) + times * len(ANSWER) - 1, 4, 4)).argsort(-1)[..., :2]
        made = rollout("a", index, PROMPT, ANSWER * times, reward=float(index), routed_experts=encoded(routes))
        rollouts.append(made)
    return rollouts


def steps_apart(folder, zero_stage, checkpointing):
    """Furthest difference of weights after two updates on the same rollouts from those of plain PyTorch on the class
    whose routers are forced, from those without replay, and how far they moved."""
    import torch

    from tests.model.test_expert_routing import Forced
    from tests.rl.test_update import plain_update

    model = make_tiny("qwen3_moe", folder)
    taken_by_transformers(folder)
    rollouts = with_routes(0)
    settings = {"learning_rate": 1e-3, "weight_decay": 0.0, "eps": 1e-4, "epochs_per_step": 2, "precision": "fp32"}
    settings |= {"zero_stage": zero_stage, "activation_checkpointing": checkpointing}
    after = []
    for replays in (True, False):
        trainer = trainer_of(folder, router_replay=replays, **settings)
        before = weights_of(trainer)
        trainer.train(1, rollouts)
        after.append(weights_of(trainer))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-4, weight_decay=0.0)
    forced, old = Forced(model), {}

    def forced_model(ids):
        (one,) = [r for r in rollouts if list(r.prompt_token_ids + r.response_token_ids) == ids[0].tolist()]
        with_last = np.concatenate([routes_of(one), np.zeros((1, 4, 2), np.int32)])  # nothing is read of the last one
        forced.routes = torch.from_numpy(with_last)
        return model(ids)

    forced_model.parameters = model.parameters
    for _ in range(2):
        plain_update(forced_model, optimizer, rollouts, old)
    expected = {f"decoder.{name}": parameter for name, parameter in model.named_parameters()}
    return furthest(after[0], expected), furthest(after[0], after[1]), furthest(after[0], before)


def routes_of(one):
    row = pack([one], budget_tokens=64, shares_prompts=False, replays_routes=True)[0]
    return row.routes.reshape(-1, 4, 2)


@pytest.mark.parametrize(("zero_stage", "checkpointing"), [(1, False), (3, True)])
def test_two_updates_are_those_of_plain_pytorch_with_the_experts_forced(tmp_path, zero_stage, checkpointing):
    apart, without, moved = call(steps_apart, tmp_path, zero_stage, checkpointing)
    assert apart <= 2e-5 and without > 1e-4 and moved > 1e-4


def test_rows_have_the_experts_of_each_rollouts_tokens_in_its_place():
    rollouts = with_routes(1)
    (row,) = pack(rollouts, budget_tokens=64, shares_prompts=False, replays_routes=True)
    assert row.routes.shape == (len(row.token_ids), 8)
    for (start, length), index in zip(row.prompts.tolist(), row.rollouts.tolist(), strict=True):
        size = length + len(rollouts[index].response_token_ids) - 1
        assert encoded(row.routes[start : start + size]) == rollouts[index].routed_experts


def test_rollouts_without_routes_are_refused_where_they_are_to_be_replayed():
    bare = [rollout("a", index, PROMPT, ANSWER, reward=float(index)) for index in range(2)]
    cut = [replace(one, routed_experts=encoded(np.zeros((3, 4, 2)))) for one in bare]
    for rollouts in (bare, cut):
        with pytest.raises(ConfigError, match=r"has (0|24) routed experts for 10 tokens"):
            pack(rollouts, budget_tokens=64, shares_prompts=False, replays_routes=True)
    for text in ("a", "AAA=", "AAAAAAA="):  # no base64, and bytes that are no whole numbers
        with pytest.raises(ConfigError, match="has 0 routed experts for 10 tokens"):
            damaged = [replace(one, routed_experts=text) for one in bare]
            pack(damaged, budget_tokens=64, shares_prompts=False, replays_routes=True)
    assert pack(cut, budget_tokens=64)[0].routes.size == 0


def test_a_line_of_a_rollout_keeps_its_experts_and_has_none_without():
    (one, *_) = with_routes(2)
    assert from_json(to_json(one)) == one
    assert "routed_experts" not in json.loads(to_json(replace(one, routed_experts="")))


def moe_job(folder, **config):
    make_tiny("qwen3_moe", folder / "moe", vocab_size=stages.VOCABULARY)
    save_tokenizer(stages.BYTES, folder / "moe")
    taken_by_transformers(folder / "moe")
    settings = {"num_steps": 3, "learning_rate": 1e-3, "router_replay": True, "eval_prompts": 0}
    settings |= {"sampler": {"context": 64, "max_batch": 16, "deterministic": True}}
    job = replace(stages.make_job(folder, **settings | config), inputs={"model": folder / "moe"})
    write_job(job)
    return job


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_killed_stage_replays_the_same_experts_and_ends_on_the_same_bytes(tmp_path, num_ranks):
    jobs = [moe_job(tmp_path / name, **stages.on(num_ranks)) for name in ("undisturbed", "killed")]
    stages.run(jobs[0])
    stages.slow_rewards(tmp_path / "killed")
    assert stages.disturb(jobs[1], (1, 2, KILL)) == 1, "the stage was over before it was killed"
    stages.run(jobs[1])
    products = [file_sha256(job.output / "model.safetensors") for job in jobs]
    assert products[0] == products[1] != file_sha256(jobs[0].inputs["model"] / "model.safetensors")
    stages.same_in_the_end(jobs[1], jobs[0])
    for step in (1, 2, 3):
        name = f"rollouts/step-{step:08d}.jsonl"
        kept, expected = (list(read_rollouts(job.records / name)) for job in jobs)
        assert kept == expected and all(one.routed_experts for one in kept)
    assert all(line["mismatch_absolute"] < 1e-5 for line in stages.metrics(jobs[0]))


def test_a_stage_on_a_model_without_experts_is_refused_in_one_line(tmp_path):
    job = stages.make_job(tmp_path, router_replay=True)
    process = stages.start(job)
    assert process.wait(timeout=120) != 0
    log = (job.workspace / "worker.log").read_text()
    assert "router_replay is true, and a model of type qwen3 has no routers of experts" in log
