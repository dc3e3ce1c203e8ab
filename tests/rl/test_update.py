"""The loss of a row as the config chooses it, and a whole step against plain PyTorch."""

import math
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from nanodag import registry
from nanodag.config.kinds.rl import RLStage
from nanodag.config.rl_sections import AlgorithmSection
from nanodag.errors import ConfigError
from nanodag.rl.losses import PolicyLoss, Totals
from nanodag.rl.rollouts.filters import with_overlong_penalty
from nanodag.rl.rollouts.metrics import Sums, rollout_metrics, trainer_metrics
from nanodag.rl.rollouts.rollout import groups_of, read_rollouts
from nanodag.rl.trainer.update import DeviceSums, PolicyObjective, Scored
from tests.forks import run_script
from tests.rl.models import rollout
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
    assert loss == plain_loss and gradient.equal(plain_gradient)
    assert metrics["kl"] == math.inf


def test_a_reference_is_held_for_a_coefficient_or_the_metric_alone():
    asked = [{}, {"kl_metric": True}, {"kl_coefficient": 0.1}, {"kl_metric": True, "reference_every": 2}]
    assert [RLStage.of(kind="rl", data=["file:x"], **one).algorithm.has_reference for one in asked] == [
        False, True, True, True
    ]  # fmt: skip


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


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kl_in": "reward"}, "kl_coefficient is 0"),
        ({"reference_every": 2}, "refreshes nothing"),
        ({"kl_in": "reward", "kl_coefficient": 0.1, "kl_unbiased": True}, "needs no mending"),
        ({"correction_floor": 0.5}, "correction_floor 0.5 means nothing with correction none"),
        ({"correction": "mis", "correction_floor": 2.0}, "not below correction_cap"),
        ({"policy_loss": "cispo", "dual_clip": 3.0}, "dual_clip 3.0 means nothing with policy_loss cispo"),
        ({"policy_loss": "reinforce", "clip_high": 0.3}, "clip_high 0.3 means nothing with policy_loss reinforce"),
        ({"policy_loss": "sapo", "clip_low": 0.3}, "clip_low 0.3 means nothing with policy_loss sapo"),
        ({"sapo_negative": 2.0}, "sapo_negative 2.0 means nothing with policy_loss ppo_clip"),
        ({"kl_kind": "k1"}, "kl_kind k1 means nothing with kl_coefficient 0"),
        ({"kl_unbiased": True}, "kl_unbiased True means nothing with kl_coefficient 0"),
        ({"kl_unbiased": True, "kl_metric": True}, "kl_unbiased True means nothing with kl_coefficient 0"),
        ({"correction_cap": 3.0}, "correction_cap 3.0 means nothing with correction none"),
        ({"overlong_penalty": 0.5}, "overlong_penalty 0.5 means nothing with overlong_buffer 0"),
        (
            {"reward": {"code": 1.0, "f1": 0.1}, "reward_timeout_s": 6.5},
            "6.5 is below 7, what the reward code takes",
        ),
        (
            {"sync_mode": "retract", "max_staleness": 1, "sampler": {"deterministic": True}},
            "sampler.deterministic: false .found true",
        ),
        (
            {"sync_mode": "abort", "max_staleness": 2, "sampler": {"deterministic": False}, "over_sampling": 64}
            | {"partial_rollout_tokens": 8},
            "needs partial_rollouts: correct",
        ),
        ({"sync_mode": "abort", "sampler": {"deterministic": False}}, "max_staleness above 0 .found 0"),
        ({"overlong_buffer": 300}, "above max_new_tokens 256"),
        ({"order": "arrival", "max_staleness": 1}, "sync_mode: finish waits for them"),
        ({"order": "arrival", "over_sampling": 64}, "over_sampling 64 chooses groups in the order of their prompts"),
    ],
)
def test_settings_that_would_do_nothing_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        RLStage.of(kind="rl", data=["file:x"], **values)


def test_settings_at_their_defaults_may_be_written_out():
    written = RLStage.of(kind="rl", data=["file:x"], policy_loss="sapo").model_dump()
    assert RLStage(**written).algorithm.kl_kind.name == "low_var"


def own_loss(trainer, old, advantages, mask, sequence_ids, *, clip_low, power=1.0):
    """A user's policy loss; its ratio shows what it was given."""
    return PolicyLoss(values=-advantages * trainer, ratio=torch.full_like(old, clip_low**power), clipped=mask)


def test_a_loss_of_ones_own_gets_its_options_and_the_settings_that_it_names():
    own = {"name": f"{__name__}:own_loss", "options": {"power": 2}}
    _, _, metrics = loss_of(policy_loss=own, clip_low=0.5)
    assert metrics["ratio"] == 0.25


def plain_loss(trainer, old, advantages, mask, ids, clip_low, clip_high):
    return PolicyLoss(values=-advantages * trainer, ratio=torch.full_like(old, clip_low + clip_high), clipped=mask)


@pytest.mark.parametrize(("values", "seen"), [({}, 0.4), ({"clip_low": 0.5, "clip_high": 0.25}, 0.75)])
def test_a_loss_of_ones_own_may_name_settings_as_ordinary_parameters(values, seen):
    _, _, metrics = loss_of(policy_loss=f"{__name__}:plain_loss", **values)
    assert metrics["ratio"] == pytest.approx(seen)


def discounted(rewards, group_ids, num_tokens, gamma):
    return rewards * gamma


def test_an_advantage_of_ones_own_may_name_settings_as_ordinary_parameters():
    algorithm = RLStage.of(kind="rl", data=["file:x"], advantage=f"{__name__}:discounted").algorithm
    assert algorithm.load(algorithm.advantage)(2.0, None, None) == 2.0


def test_an_ordinary_parameter_that_no_setting_fills_is_an_option():
    own = {"name": f"{__name__}:own_weights", "options": {"scale": 3}}
    algorithm = RLStage.of(kind="rl", data=["file:x"], aggregation=own).algorithm
    assert algorithm.aggregation.load()(2.0, None, None) == 6.0
    algorithm = RLStage.of(kind="rl", data=["file:x"], aggregation=own["name"]).algorithm
    with pytest.raises(ConfigError, match="needs the option 'scale'; it takes scale"):
        algorithm.aggregation.load()


def softened(old_logprobs, sampler_logprobs, mask, sequence_ids, *, power):
    return ((old_logprobs - sampler_logprobs) * power).exp() * mask


def test_a_correction_of_ones_own_gets_its_options():
    own = {"name": f"{__name__}:softened", "options": {"power": 2}}
    _, gradient, _ = loss_of(correction=own)  # mismatches -0.1, 0.5 and 0
    assert gradient.tolist() == pytest.approx([-math.exp(-0.2) / 3, -math.exp(1.0) / 3, 0, 2 / 3])


def own_weights(mask, sequence_ids, totals, scale):
    return mask * scale


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dual_clip": 3.0}, "own_loss does not name dual_clip 3.0; leave dual_clip out"),
        (
            {"policy_loss": {"name": f"{__name__}:own_loss", "options": {"powr": 2}}},
            "no option 'powr'; it takes clip_low, power",
        ),
    ],
)
def test_what_a_loss_of_ones_own_does_not_name_is_refused_when_it_is_loaded(values, message):
    with pytest.raises(ConfigError, match=message):
        table = {"kind": "rl", "data": ["file:x"], "policy_loss": f"{__name__}:own_loss"} | values
        PolicyObjective(RLStage.of(**table))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"policy_loss": {"name": "ppo_clip", "options": {"clip_low": 0.1}}}, "is the setting clip_low; set it there"),
        ({"advantage": {"name": "gae", "options": {"gamma": 0.9}}}, "is the setting critic.gamma; set it there"),
        ({"advantage": {"name": "rloo", "options": {"gamma": 0.9}}}, "is the setting critic.gamma; set it there"),
        ({"reward": {"name": "reasoning_gym", "options": {"strict": 2}}}, "takes strict as bool, not 2"),
        ({"correction": {"name": "tis", "options": {"bound": 2}}}, "has no option 'bound'; it takes no options"),
        ({"reward": ["f1", "f1"]}, "reward f1 stands twice"),
    ],
)
def test_options_that_an_entry_does_not_take_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        RLStage.of(kind="rl", data=["file:x"], **values)


def test_a_setting_has_the_default_of_every_loss_that_takes_it():
    for name, traits in registry.entries_of("policy_loss").items():
        for option in traits.options:
            assert str(AlgorithmSection.model_fields[option].default) == traits.options[option].default, name


@pytest.mark.parametrize(("num_tokens", "taken"), [(1, 0.0), (60, 0.0), (61, -0.05), (80, -1.0), (70, -0.5)])
def test_the_overlong_penalty_grows_over_the_last_tokens(num_tokens, taken):
    one = rollout("a", 0, [1], [2] * num_tokens, reward=1.0)
    found = with_overlong_penalty(one, longest=80, buffer=20, penalty=1.0)
    assert found.reward == pytest.approx(1.0 + taken) and found.reward_components == {"overlong": pytest.approx(taken)}
    assert rollout_metrics([found])["pass_rate"] == 1.0  # right, if long


def test_a_masked_token_may_hold_anything():
    reference = torch.tensor([-1.6, -1.5, -float("inf"), -1.5])
    loss, gradient, _ = loss_of(reference, kl_coefficient=0.5, kl_kind="k3")
    assert torch.isfinite(gradient).all() and loss == loss


def test_means_are_over_the_tokens_of_all_ranks():
    first = Sums({"loss": 0.25, "tokens": 1.0, "entropy": 3.0, "ratio": 1.0}, {"ratio_largest": 1.0})
    second = Sums({"loss": 0.5, "tokens": 3.0, "entropy": 1.0, "ratio": 3.6}, {"ratio_largest": 1.4})
    found = trainer_metrics([first, second], num_updates=1)
    assert found["loss"] == 0.75 and found["entropy"] == 1.0 and found["ratio"] == pytest.approx(1.15)
    assert found["ratio_largest"] == 1.4


def test_numbers_of_rollouts_by_hand():
    group = [rollout("a", i, [1], [2] * (i + 1), reward=float(i == 2)) for i in range(3)]
    found = rollout_metrics([*group, *(rollout("b", i, [1], [2], reward=0.0) for i in range(2))])
    assert found["reward"] == found["pass_rate"] == pytest.approx(0.2)
    assert found["pass_at_n"] == found["zero_spread_share"] == 0.5
    assert found["response_tokens"] == pytest.approx(8 / 5) and found["response_tokens_largest"] == 3.0


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


@pytest.fixture(scope="module")
def by_ranks(tmp_path_factory):
    """The same stage of two steps on one rank and on two ranks of ZeRO-3."""
    jobs = {}
    for num_ranks in (1, 2):
        resources = {"num_ranks": num_ranks, "threads": 1, "device": "cpu"}
        values = {"num_steps": 2, "eval_prompts": 0, "checkpoint_every": 10, "learning_rate": 1e-3}
        jobs[num_ranks] = make_job(tmp_path_factory.mktemp("ranks"), resources=resources, **values)
        run(jobs[num_ranks])
    return jobs


def test_two_steps_of_the_stage_equal_plain_pytorch_on_the_same_rollouts(by_ranks):
    from transformers import AutoModelForCausalLM

    job = by_ranks[1]
    model = AutoModelForCausalLM.from_pretrained(job.inputs["model"], dtype=torch.float32)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.98))
    for step in (1, 2):
        norm = plain_step(model, optimizer, list(read_rollouts(job.records / "rollouts" / f"step-{step:08d}.jsonl")))
        assert metrics(job)[step - 1]["gradient_norm"] == pytest.approx(norm, rel=1e-4)
    assert_weights_close(load_file(job.output / "model.safetensors"), dict(model.named_parameters()))


def test_two_ranks_of_zero_3_train_to_the_same_weights_as_one(by_ranks):
    numbers = [
        torch.tensor(
            [[line[name] for name in ("loss", "gradient_norm", "entropy")] for line in metrics(by_ranks[ranks])]
        )
        for ranks in (1, 2)
    ]
    torch.testing.assert_close(numbers[1], numbers[0], rtol=1e-4, atol=1e-5)
    one, two = (load_file(by_ranks[ranks].output / "model.safetensors") for ranks in (1, 2))
    assert_weights_close(two, one)


def assert_weights_close(found, wanted) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(
            found[name], tensor.detach(), rtol=1e-4, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


DIVERGING = """
import sys, warnings
from pathlib import Path
warnings.simplefilter("ignore")
from torch.utils._python_dispatch import TorchDispatchMode
from nanodag.config.kinds.rl import RLStage
from nanodag.errors import TrainingDiverged
from nanodag.rl.trainer.trainer import Trainer
from tests.rl.models import rollout, save_tiny_model

class Reads(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += "_local_scalar_dense" in str(function)
        return function(*args, **(kwargs or {}))

def counted(loss, *, last):
    seen.append(reads.count)
    backward(loss, last=last)
    reads.count = 0

values = {"micro_batch_tokens": 16, "max_new_tokens": 8, "sampler": {"context": 16}}
config = RLStage.of(kind="rl", data=["file:x"], precision="fp32", learning_rate=1e-3, **values)
trainer = Trainer(config, save_tiny_model(Path(sys.argv[1])), device="cpu")
rollouts = [rollout("a", i, [1, 2], [3 + i] * 8, reward=float(i)) for i in range(6)]
trainer.train(1, rollouts)  # in its first step ZeRO-3 writes down the order of the layers, for which it reads
seen, backward = [], trainer.engine.backward
trainer.engine.backward = counted
with Reads() as reads:
    trainer.train(1, rollouts)
trainer.engine.backward = backward
print("reads", seen)
before = {name: tensor.clone() for name, tensor in trainer.engine.weights()}
try:
    trainer.train(2, [rollout("a", i, [1, 2], [3 + i], reward=float("inf") if i else 0.0) for i in range(3)])
except TrainingDiverged as error:
    print(error)
print(all((tensor == before[name]).all() for name, tensor in trainer.engine.weights()))
"""


def test_a_gradient_that_is_not_finite_stops_with_step_and_last_losses_and_changes_no_weight(tmp_path):
    done = run_script(DIVERGING, tmp_path)
    reads, message, unchanged = done.stdout.splitlines()[-3:]
    assert "not finite" in message and "RL step 2, this rank's last losses [" in message and "nan]" in message
    assert unchanged == "True"
    # Nothing of a micro-batch was read from the device before its backward pass.
    assert reads == "reads [0, 0, 0]"


SKIPPING = """
import sys, warnings
from pathlib import Path
warnings.simplefilter("ignore")
from nanodag.config.kinds.rl import RLStage
from nanodag.errors import TrainingDiverged
from nanodag.rl.trainer.trainer import Trainer
from tests.rl.models import rollout, save_tiny_model

model = save_tiny_model(Path(sys.argv[1]))

def train(rewards, **values):
    values |= {"kind": "rl", "data": ["file:x"], "learning_rate": 1e-3, "micro_batch_tokens": 4096}
    trainer = Trainer(RLStage.of(**values), model, device="cpu")
    rollouts = [[rollout("a", i, [1, 2], [3 + i], reward=r) for i, r in enumerate(three)] for three in rewards]
    replies = [trainer.train(step, one) for step, one in enumerate(rollouts, start=1)]
    print([(r["num_updates"], r["skipped_updates"]) for r in replies], replies[-1]["gradient_norm"] > 0)
    return {name: tensor.clone() for name, tensor in trainer.engine.weights()}, trainer.num_updates

good, bad, better = (0.0, 1.0, 2.0), (0.0, float("inf"), 1.0), (2.0, 0.0, 0.0)
values = {"precision": sys.argv[2], "zero_stage": int(sys.argv[3])}
mended, count = train([good, bad, better], bad_gradient="skip", **values)
wanted, other = train([good, better], **values)
print(all((tensor == wanted[name]).all() for name, tensor in mended.items()), count == other == 2)
train([good], bad_gradient="skip", gradient_limit=1e-6, precision="fp32")
try:
    train([good], gradient_limit=1e-6, precision="fp32")
except TrainingDiverged as error:
    print(error)
"""


@pytest.mark.parametrize("setting", [("fp32", "3"), pytest.param(("bf16", "1"), marks=pytest.mark.slow)])
def test_a_bad_gradient_is_skipped_as_if_its_rollouts_had_not_been_where_that_is_wished(tmp_path, setting):
    done = run_script(SKIPPING, tmp_path, *setting)
    assert done.returncode == 0, done.stderr[-3000:]
    *several, limited, message = [line for line in done.stdout.splitlines() if "accelerator" not in line]
    assert several == ["[(1, 0), (0, 1), (1, 0)] True", "[(1, 0), (1, 0)] True", "True True"]
    assert limited == "[(0, 1)] False"
    assert "above gradient_limit 1e-06" in message and "RL step 1" in message


EPOCHS = """
import sys, warnings
from pathlib import Path
warnings.simplefilter("ignore")
import torch
from transformers import AutoModelForCausalLM
from nanodag.config.kinds.rl import RLStage
from nanodag.rl.trainer.trainer import Trainer
from tests.rl.models import rollout, save_tiny_model

folder = save_tiny_model(Path(sys.argv[1]))
rollouts = [rollout("a", i, [1, 2], [3 + i, 5, 9 - i], reward=float(i)) for i in range(3)]
config = RLStage.of(kind="rl", data=["file:x"], precision="fp32", learning_rate=1e-2, epochs_per_step=3,
                    weight_decay=0.0, micro_batch_tokens=4096, kl_metric=True)
trainer = Trainer(config, folder, device="cpu")
reply = trainer.train(1, rollouts)

model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.98), weight_decay=0.0)
rewards = torch.tensor([0.0, 1.0, 2.0])
advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
ids = torch.tensor([one.prompt_token_ids + one.response_token_ids for one in rollouts])
old, clipped, kl = None, 0, 0.0
for _ in range(3):
    logprobs = model(ids).logits[:, 1:-1].log_softmax(-1).gather(2, ids[:, 2:, None])[..., 0]
    old = logprobs.detach() if old is None else old  # of the model that the stage began with, so the reference's too
    kl += (old.exp() / logprobs.exp() - 1 - (old - logprobs)).clamp(max=10).sum().item()
    ratio = (logprobs - old).exp()
    inside = ratio.clamp(0.8, 1.2)
    loss = -torch.minimum(ratio * advantages[:, None], inside * advantages[:, None]).sum() / 9
    clipped += (ratio != inside).sum().item()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
wanted = dict(model.named_parameters())
named = ((name.removeprefix("decoder."), tensor) for name, tensor in trainer.engine.weights())
print(max((tensor - wanted[name]).abs().max().item() for name, tensor in named))
print(clipped, reply["num_updates"], reply["num_passes"], trainer.num_updates, reply["sums"]["summed"]["tokens"])
print(len(trainer.last_scores[0][1]), sum(len(row.targets) for row, _, _ in trainer.last_scores[0][1]))
print(kl, reply["sums"]["summed"]["kl"])
"""


def test_several_epochs_over_a_step_equal_plain_pytorch_with_the_old_logprobs_of_its_start(tmp_path):
    done = run_script(EPOCHS, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    furthest, counts, scores, kl = done.stdout.splitlines()[-4:]
    assert float(furthest) < 2e-5
    clipped, *rest = counts.split()
    assert int(clipped) > 0 and rest == ["3", "3", "3", "27.0"]
    assert scores == "1 9"
    wanted, logged = map(float, kl.split())
    assert logged == pytest.approx(wanted, rel=1e-3) and wanted > 1e-3


REFRESHED = """
import sys, warnings
from pathlib import Path
warnings.simplefilter("ignore")
import torch
from nanodag.config.kinds.rl import RLStage
from nanodag.rl.trainer.trainer import Trainer
from tests.rl.models import rollout, save_tiny_model

folder = Path(sys.argv[1])
values = {"precision": "fp32", "learning_rate": 1e-3, "kl_coefficient": 0.1, "reference_every": 2,
          "micro_batch_tokens": 4096}
config = RLStage.of(kind="rl", data=["file:x"], **values)
model = save_tiny_model(folder / "model")
trainer, other = (Trainer(config, model, device="cpu") for _ in range(2))

def distance(reference, engine):
    found = dict(reference.policy.named_parameters())
    return max((found[name] - tensor).abs().max().item() for name, tensor in engine.weights())

for step in (1, 2, 3):
    trainer.train(step, [rollout("a", i, [1, 2], [3 + i], reward=float(i)) for i in range(3)])
    print(step, distance(trainer._reference, trainer.engine) == 0.0)
(folder / "checkpoint").mkdir()
trainer.save(folder / "checkpoint")
other.load(folder / "checkpoint")
before = dict(trainer._reference.policy.named_parameters())
print(all((before[name] == tensor).all() for name, tensor in other._reference.policy.named_parameters()))
"""


def test_the_reference_is_refreshed_every_second_update_and_is_part_of_a_checkpoint(tmp_path):
    done = run_script(REFRESHED, tmp_path)
    assert done.stdout.splitlines()[-4:] == ["1 False", "2 True", "3 False", "True"], done.stdout + done.stderr[-2000:]
