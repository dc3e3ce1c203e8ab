"""The loss of a row as the config chooses it, and a whole step against plain PyTorch."""

import math
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from nanodag import registry
from nanodag.config.kinds.rl import RLStage
from nanodag.config.rl_sections import AlgorithmSection
from nanodag.errors import ConfigError, TrainingDiverged
from nanodag.rl.losses import PolicyLoss, Totals
from nanodag.rl.rollouts.filters import shaped
from nanodag.rl.rollouts.metrics import Sums, rollout_metrics, trainer_metrics
from nanodag.rl.rollouts.rollout import groups_of, read_rollouts
from nanodag.rl.trainer.update import DeviceSums, PolicyObjective, Scored
from tests.forks import call
from tests.rl.models import furthest, save_tiny_model, trainer_of, weights_of
from tests.rl.rollouts import rollout
from tests.rl.stages import make_job, metrics, run

MASK = torch.tensor([True, True, False, True])
ROW = SimpleNamespace(
    mask=MASK,
    sequence_ids=torch.tensor([0, 0, 0, 1]),
    sampler_logprobs=torch.tensor([-1.0, -2.0, -3.0, -1.5]),
)
OLD = torch.tensor([-1.1, -1.5, -9.0, -1.5])
TOTALS = Totals(num_tokens=3, num_sequences=2, max_tokens=4)


def loss_of(reference=None, sampler=ROW.sampler_logprobs, **config) -> tuple[float, torch.Tensor, dict[str, float]]:
    """Loss, gradient to the trainer's logprobs, metrics; the trainer is at the old weights."""
    trainer = OLD.clone().requires_grad_()
    scored = Scored(
        row=SimpleNamespace(**{**vars(ROW), "sampler_logprobs": sampler}),
        trainer_logprobs=trainer,
        entropies=torch.tensor([0.5, 0.25, 9.0, 1.0]),
        old_logprobs=OLD,
        advantages=torch.tensor([1.0, 1.0, 1.0, -2.0]),
        reference_logprobs=reference,
    )
    loss, sums = PolicyObjective(RLStage.of(kind="rl", data=["file:x"], **config))(scored, TOTALS)
    (gradient,) = torch.autograd.grad(loss, trainer)
    return loss.item(), gradient, trainer_metrics([sums.read()], num_updates=1)


def test_token_mean_on_policy():
    loss, gradient, metrics = loss_of()
    assert loss == pytest.approx((-1 - 1 + 2) / 3)
    assert gradient.tolist() == pytest.approx([-1 / 3, -1 / 3, 0, 2 / 3])
    assert metrics["ratio"] == 1.0 and metrics["clipped_share"] == 0.0
    assert metrics["mismatch_absolute"] == pytest.approx((0.1 + 0.5 + 0.0) / 3, rel=1e-6)
    assert metrics["mismatch_largest"] == pytest.approx(0.5)
    assert metrics["entropy"] == pytest.approx((0.5 + 0.25 + 1.0) / 3)


def test_truncated_importance_weights_multiply_the_policy_loss():
    _, gradient, metrics = loss_of(correction="tis", correction_cap=1.2)
    weights = [torch.tensor(-0.1).exp().item(), 1.2, 1.0]  # exp(0.5) is cut to 1.2
    assert gradient.tolist() == pytest.approx([-weights[0] / 3, -weights[1] / 3, 0, 2 / 3])
    assert metrics["correction"] == pytest.approx(sum(weights) / 3)


def test_kl_in_the_loss_pulls_towards_the_reference():
    reference = torch.tensor([-1.6, -1.5, 0.0, -1.5])
    loss, gradient, metrics = loss_of(reference, kl_coefficient=0.5, kl_kind="k2")
    assert metrics["kl"] == pytest.approx(0.125 / 3, rel=1e-5)
    assert loss == pytest.approx(0.5 * 0.125 / 3, rel=1e-5)
    assert gradient[0].item() == pytest.approx((-1 + 0.5 * 0.5) / 3)


def test_kl_that_is_only_logged_leaves_loss_and_gradient_alone():
    reference = torch.tensor([-1.6, -1.5, 0.0, -1.5])
    plain_loss, plain_gradient, _ = loss_of()
    loss, gradient, metrics = loss_of(reference, kl_metric=True)
    assert metrics["kl"] == pytest.approx((math.exp(-0.5) - 1 + 0.5) / 3, rel=1e-5)
    assert loss == plain_loss and gradient.equal(plain_gradient)
    impossible = torch.tensor([-math.inf, -1.5, 0.0, -1.5])  # a token that the reference rules out
    loss, gradient, metrics = loss_of(impossible, kl_metric=True, kl_kind="k3")
    assert loss == plain_loss and gradient.equal(plain_gradient) and metrics["kl"] == math.inf
    masked = torch.tensor([-1.6, -1.5, -math.inf, -1.5])  # a token that is not trained may hold anything
    loss, gradient, _ = loss_of(masked, kl_coefficient=0.5, kl_kind="k3")
    assert gradient.isfinite().all() and math.isfinite(loss)


def test_a_reference_is_held_for_a_coefficient_or_the_metric_alone():
    for values in ({}, {"kl_metric": True}, {"kl_coefficient": 0.1}):
        assert RLStage.of(kind="rl", data=["file:x"], **values).algorithm.has_reference == bool(values)


def test_kl_in_the_reward_is_summed_over_each_rollout_and_leaves_the_loss_alone():
    reference = torch.tensor([-1.6, -1.25, 0.0, -2.0])
    plain, _, _ = loss_of(reference)
    loss, _, metrics = loss_of(reference, kl_coefficient=0.5, kl_kind="k1", kl_in="reward")
    assert loss == plain and metrics["kl"] == pytest.approx((0.5 - 0.25 + 0.5) / 3)
    kl = {"kl_coefficient": 0.5, "kl_kind": "k1", "kl_in": "reward"}
    objective = PolicyObjective(RLStage.of(kind="rl", data=["file:x"], **kl))
    row = SimpleNamespace(mask=MASK, sequence_ids=ROW.sequence_ids, rollouts=torch.tensor([2, 0]))
    sums = objective.kl_of_rollouts(row, OLD, reference, 4)
    assert sums.tolist() == pytest.approx([0.5, 0.0, 0.25, 0.0])


def test_responses_left_out_by_opsm_have_no_gradient_and_stay_in_the_denominator():
    # response 1 has a negative advantage, and the trainer is 0 nats from its sampler, then 0.5
    _, gradient, metrics = loss_of(opsm_limit=0.1)
    assert gradient.tolist() == pytest.approx([-1 / 3, -1 / 3, 0, 2 / 3]) and metrics["left_out_share"] == 0.0
    far = ROW.sampler_logprobs.clone()
    far[3] = -1.0
    _, gradient, metrics = loss_of(sampler=far, opsm_limit=0.1)
    assert gradient.tolist() == pytest.approx([-1 / 3, -1 / 3, 0, 0])
    assert metrics["left_out_share"] == pytest.approx(1 / 3)


def test_a_vetoed_response_has_no_gradient_whatever_the_correction():
    _, gradient, metrics = loss_of(correction_veto=0.95)  # ratios exp(-0.1), exp(0.5) and 1
    assert gradient.tolist() == pytest.approx([0, 0, 0, 2 / 3]) and metrics["left_out_share"] == pytest.approx(2 / 3)


def test_numbers_are_added_up_on_the_device_and_a_row_without_trained_tokens_has_no_largest():
    total = DeviceSums()
    for values, largest in (([1.0, 2.0], [3.0]), ([0.5, 0.25], []), ([0.0, 0.0], [-torch.inf])):
        maximum = {"b": torch.tensor(*largest)} if largest else {}
        total.add(DeviceSums({"a": torch.tensor(values[0]), "n": torch.tensor(values[1])}, maximum))
    assert total.read() == Sums({"a": 1.5, "n": 2.25}, {"b": 3.0})
    assert DeviceSums({"a": torch.tensor(1)}, {"b": torch.tensor(-torch.inf)}).read() == Sums({"a": 1.0}, {})


def test_settings_at_their_defaults_may_be_written_out():
    written = RLStage.of(kind="rl", data=["file:x"], policy_loss="sapo").model_dump()
    assert RLStage(**written).algorithm.kl_kind.name == "low_var"


def own_loss(trainer, old, advantages, mask, sequence_ids, *, clip_low, power=1.0):
    """A user's policy loss; its ratio shows what it was given."""
    return PolicyLoss(values=-advantages * trainer, ratio=torch.full_like(old, clip_low**power), clipped=mask)


def plain_loss(trainer, old, advantages, mask, ids, clip_low, clip_high):
    return PolicyLoss(values=-advantages * trainer, ratio=torch.full_like(old, clip_low + clip_high), clipped=mask)


def discounted(rewards, group_ids, num_tokens, gamma):
    return rewards * gamma


def softened(old_logprobs, sampler_logprobs, mask, sequence_ids, *, power):
    return ((old_logprobs - sampler_logprobs) * power).exp() * mask


def own_weights(mask, sequence_ids, totals, scale):
    return mask * scale


def own(name: str, **options) -> dict:
    return {"name": f"{__name__}:{name}", "options": options}


@pytest.mark.parametrize(
    ("loss", "values", "ratio"),
    [
        (own("own_loss", power=2), {"clip_low": 0.5}, 0.25),
        (own("plain_loss"), {}, 0.4),
        (own("plain_loss"), {"clip_low": 0.5, "clip_high": 0.25}, 0.75),
    ],
)
def test_a_loss_of_ones_own_gets_its_options_and_the_settings_that_it_names(loss, values, ratio):
    assert loss_of(policy_loss=loss, **values)[2]["ratio"] == pytest.approx(ratio)


def test_an_advantage_a_correction_and_an_aggregation_of_ones_own_get_settings_and_options():
    algorithm = RLStage.of(kind="rl", data=["file:x"], advantage=own("discounted")).algorithm
    assert algorithm.load(algorithm.advantage)(2.0, None, None) == 2.0
    _, gradient, _ = loss_of(correction=own("softened", power=2))  # mismatches -0.1, 0.5 and 0
    assert gradient.tolist() == pytest.approx([-math.exp(-0.2) / 3, -math.exp(1.0) / 3, 0, 2 / 3])
    algorithm = RLStage.of(kind="rl", data=["file:x"], aggregation=own("own_weights", scale=3)).algorithm
    assert algorithm.aggregation.load()(2.0, None, None) == 6.0
    algorithm = RLStage.of(kind="rl", data=["file:x"], aggregation=own("own_weights")).algorithm
    with pytest.raises(ConfigError, match="needs the option 'scale'; it takes scale"):
        algorithm.aggregation.load()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dual_clip": 3.0}, "own_loss does not name dual_clip 3.0; leave dual_clip out"),
        ({"policy_loss": own("own_loss", powr=2)}, "no option 'powr'; it takes clip_low, power"),
    ],
)
def test_what_a_loss_of_ones_own_does_not_name_is_refused_when_it_is_loaded(values, message):
    with pytest.raises(ConfigError, match=message):
        loss_of(**{"policy_loss": own("own_loss"), **values})


def test_a_setting_has_the_default_of_every_loss_that_takes_it():
    for name, traits in registry.entries_of("policy_loss").items():
        for option in traits.options:
            assert str(AlgorithmSection.model_fields[option].default) == traits.options[option].default, name


def test_the_overlong_penalty_grows_over_the_last_tokens():
    section = RLStage.of(
        kind="rl", data=["file:x"], max_new_tokens=80, overlong_buffer=20, overlong_penalty=1.0
    ).rollout
    for num_tokens, taken in ((1, 0.0), (60, 0.0), (61, -0.05), (70, -0.5), (80, -1.0)):
        response = rollout("a", 0, [1], [2] * num_tokens, reward=1.0)
        found = shaped(response, section)
        assert found.reward == pytest.approx(1.0 + taken)
        assert found.reward_components == {"overlong": pytest.approx(taken)}
        assert rollout_metrics([found])["pass_rate"] == 1.0  # right, if long


def test_means_are_over_the_tokens_of_all_ranks():
    first = Sums({"loss": 0.25, "tokens": 1.0, "entropy": 3.0, "ratio": 1.0}, {"ratio_largest": 1.0})
    second = Sums({"loss": 0.5, "tokens": 3.0, "entropy": 1.0, "ratio": 3.6}, {"ratio_largest": 1.4})
    found = trainer_metrics([first, second], num_updates=1)
    assert found["loss"] == 0.75 and found["entropy"] == 1.0 and found["ratio"] == pytest.approx(1.15)
    assert found["ratio_largest"] == 1.4


def plain_step(model, optimizer, rollouts) -> float:
    """One GRPO step written from the paper, a rollout at a time; returns the gradient's norm."""
    num_tokens = sum(one.num_sampled for one in rollouts)
    for group in groups_of(rollouts).values():
        rewards = torch.tensor([one.reward for one in group], dtype=torch.float64)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        for one, advantage in zip(group, advantages.float(), strict=True):
            ids = torch.tensor([one.prompt_token_ids + one.response_token_ids])
            start = len(one.prompt_token_ids)
            logprobs = model(ids).logits[0, start - 1 : -1].log_softmax(-1).gather(1, ids[0, start:, None])
            (-(logprobs - logprobs.detach()).exp() * advantage).sum().div(num_tokens).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return norm.item()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_two_steps_of_the_stage_equal_plain_pytorch_on_the_same_rollouts_on_one_rank_and_two(tmp_path, num_ranks):
    from transformers import AutoModelForCausalLM

    resources = {"num_ranks": num_ranks, "threads": 1, "device": "cpu"}
    job = make_job(tmp_path, resources=resources, eval_prompts=0, checkpoint_every=10, learning_rate=1e-3)
    run(job)
    model = AutoModelForCausalLM.from_pretrained(job.inputs["model"], dtype=torch.float32)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.98))
    for step in (1, 2):
        norm = plain_step(model, optimizer, list(read_rollouts(job.records / "rollouts" / f"step-{step:08d}.jsonl")))
        assert metrics(job)[step - 1]["gradient_norm"] == pytest.approx(norm, rel=1e-4)
    found = load_file(job.output / "model.safetensors")
    for name, tensor in model.named_parameters():
        torch.testing.assert_close(found[name], tensor.detach(), rtol=1e-4, atol=2e-5, msg=name)


class Reads(TorchDispatchMode):
    """Counts what is read from the device."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += "_local_scalar_dense" in str(function)
        return function(*args, **(kwargs or {}))


def diverging(folder):
    """What was read before each backward pass, the error of a step with an infinite reward, and by how much it moved
    a weight."""
    sizes = {"micro_batch_tokens": 16, "max_new_tokens": 8, "sampler": {"context": 16}}
    trainer = trainer_of(save_tiny_model(folder), precision="fp32", **sizes)
    rollouts = [rollout("a", i, [1, 2], [3 + i] * 8, reward=float(i)) for i in range(6)]
    trainer.train(1, rollouts)  # in its first step ZeRO-3 writes down the order of the layers, for which it reads
    seen, backward = [], trainer.engine.backward

    def counted(loss, *, last):
        seen.append(reads.count)
        backward(loss, last=last)
        reads.count = 0

    trainer.engine.backward = counted
    with Reads() as reads:
        trainer.train(1, rollouts)
    trainer.engine.backward = backward
    before = weights_of(trainer)
    with pytest.raises(TrainingDiverged) as raised:
        trainer.train(2, [rollout("a", i, [1, 2], [3 + i], reward=float("inf") if i else 0.0) for i in range(3)])
    return seen, str(raised.value), furthest(weights_of(trainer), before)


def test_a_gradient_that_is_not_finite_stops_with_step_and_last_losses_and_changes_no_weight(tmp_path):
    reads, message, moved = call(diverging, tmp_path)
    assert "not finite" in message and "RL step 2, this rank's last losses [" in message and "nan]" in message
    assert moved == 0.0
    assert reads == [0, 0, 0], "something of a micro-batch was read from the device before its backward pass"


def updated(model, *steps, **values):
    """Of each step of three rewards the updates that were made and skipped, the last gradient's norm, the weights."""
    trainer = trainer_of(model, **values)
    parts = [[rollout("a", i, [1, 2], [3 + i], reward=reward) for i, reward in enumerate(three)] for three in steps]
    replies = [trainer.train(step, part) for step, part in enumerate(parts, start=1)]
    counts = [(reply["num_updates"], reply["skipped_updates"]) for reply in replies]
    assert trainer.num_updates == sum(made for made, _ in counts)
    return counts, replies[-1]["gradient_norm"], weights_of(trainer)


def skipping(folder, precision, zero_stage):
    model, good, bad, better = save_tiny_model(folder), (0.0, 1.0, 2.0), (0.0, float("inf"), 1.0), (2.0, 0.0, 0.0)
    values = {"precision": precision, "zero_stage": zero_stage}
    mended, norm, weights = updated(model, good, bad, better, bad_gradient="skip", **values)
    plain, _, others = updated(model, good, better, **values)
    limit = {"gradient_limit": 1e-6, "precision": "fp32"}
    limited, limited_norm, _ = updated(model, good, bad_gradient="skip", **limit)
    with pytest.raises(TrainingDiverged, match="RL step 1") as raised:
        updated(model, good, **limit)
    assert "above gradient_limit 1e-06" in str(raised.value)
    return mended, plain, limited, norm, limited_norm, furthest(weights, others)


@pytest.mark.parametrize("setting", [("fp32", 3), pytest.param(("bf16", 1), marks=pytest.mark.slow)])
def test_a_bad_gradient_is_skipped_as_if_its_rollouts_had_not_been_where_that_is_wished(tmp_path, setting):
    mended, plain, limited, norm, limited_norm, apart = call(skipping, tmp_path, *setting)
    assert (mended, plain, limited) == ([(1, 0), (0, 1), (1, 0)], [(1, 0), (1, 0)], [(0, 1)])
    assert norm > 0.0 == limited_norm and apart == 0.0


def several_epochs(folder):
    """A step of three epochs by the trainer, and in plain PyTorch."""
    from transformers import AutoModelForCausalLM

    rollouts = [rollout("a", i, [1, 2], [3 + i, 5, 9 - i], reward=float(i)) for i in range(3)]
    settings = {"learning_rate": 1e-2, "epochs_per_step": 3, "weight_decay": 0.0, "kl_metric": True}
    trainer = trainer_of(save_tiny_model(folder), precision="fp32", **settings)
    reply = trainer.train(1, rollouts)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.98), weight_decay=0.0)
    rewards = torch.tensor([0.0, 1.0, 2.0])
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    ids = torch.tensor([one.prompt_token_ids + one.response_token_ids for one in rollouts])
    old, clipped, kl = None, 0, 0.0
    for _ in range(3):
        logprobs = model(ids).logits[:, 1:-1].log_softmax(-1).gather(2, ids[:, 2:, None])[..., 0]
        old = logprobs.detach() if old is None else old  # of the model that the stage began with: the reference's too
        kl += (old.exp() / logprobs.exp() - 1 - (old - logprobs)).clamp(max=10).sum().item()
        ratio = (logprobs - old).exp()
        inside = ratio.clamp(0.8, 1.2)
        loss = -torch.minimum(ratio * advantages[:, None], inside * advantages[:, None]).sum() / 9
        clipped += (ratio != inside).sum().item()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    wanted = {f"decoder.{name}": tensor for name, tensor in model.named_parameters()}
    rows = trainer.last_scores[0][1]
    counts = [reply["num_updates"], reply["num_passes"], trainer.num_updates, reply["sums"]["summed"]["tokens"]]
    scored = (len(rows), sum(len(row.targets) for row, _, _ in rows))
    return furthest(weights_of(trainer), wanted), clipped, counts, scored, (kl, reply["sums"]["summed"]["kl"])


def test_several_epochs_over_a_step_equal_plain_pytorch_with_the_old_logprobs_of_its_start(tmp_path):
    apart, clipped, counts, scored, (kl, logged) = call(several_epochs, tmp_path)
    assert apart < 2e-5 and clipped > 0 and counts == [3, 3, 3, 27.0] and scored == (1, 9)
    assert logged == pytest.approx(kl, rel=1e-3) and kl > 1e-3


def refreshed(folder):
    """How far the reference is from the policy after each of three steps, and from that of a trainer that goes on."""
    model = save_tiny_model(folder / "model")
    values = {"precision": "fp32", "kl_coefficient": 0.1, "reference_every": 2}
    trainer, other = (trainer_of(model, **values) for _ in range(2))
    distances = []
    for step in (1, 2, 3):
        trainer.train(step, [rollout("a", i, [1, 2], [3 + i], reward=float(i)) for i in range(3)])
        distances.append(furthest(weights_of(trainer), reference_of(trainer)))
    (folder / "checkpoint").mkdir()
    trainer.save(folder / "checkpoint")
    other.load(folder / "checkpoint")
    return [*distances, furthest(reference_of(trainer), reference_of(other))]


def reference_of(trainer):
    return {name: tensor.clone() for name, tensor in trainer._reference.policy.named_parameters()}


def test_the_reference_is_refreshed_every_second_update_and_is_part_of_a_checkpoint(tmp_path):
    first, second, third, resumed = call(refreshed, tmp_path)
    assert first > 0.0 and third > 0.0 and second == resumed == 0.0
