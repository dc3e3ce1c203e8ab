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
from nanodag.rl.rollouts.metrics import rollout_metrics, trainer_metrics
from nanodag.rl.rollouts.rollout import groups_of, read_rollouts
from nanodag.rl.trainer.update import DeviceSums, PolicyObjective, Scored, kl_of_rollouts
from tests.forks import call
from tests.rl.models import furthest, save_tiny_model, trainer_of, weights_of
from tests.rl.rollouts import rollout
from tests.rl.stages import make_job, metrics, on, run

MASK, RESPONSES = torch.tensor([True, True, False, True]), torch.tensor([0, 0, 0, 1])
SAMPLER, FAR = (-1.0, -2.0, -3.0, -1.5), (-1.0, -2.0, -3.0, -1.0)
OLD = torch.tensor([-1.1, -1.5, -9.0, -1.5])
TOTALS = Totals(num_tokens=3, num_sequences=2, max_tokens=4)


def loss_of(reference=None, sampler=SAMPLER, **config) -> tuple[list[float], dict[str, float]]:
    """Gradient to the trainer's logprobs, metrics; the trainer is at the old weights."""
    trainer = OLD.clone().requires_grad_()
    scored = Scored(
        row=SimpleNamespace(mask=MASK, sequence_ids=RESPONSES, sampler_logprobs=torch.tensor(sampler)),
        trainer_logprobs=trainer,
        entropies=torch.tensor([0.5, 0.25, 9.0, 1.0]),
        old_logprobs=OLD,
        advantages=torch.tensor([1.0, 1.0, 1.0, -2.0]),
        reference_logprobs=None if reference is None else torch.tensor(reference),
    )
    loss, sums = PolicyObjective(stage(**config))(scored, TOTALS)
    (gradient,) = torch.autograd.grad(loss, trainer)
    return gradient.tolist(), trainer_metrics([sums.read()], num_updates=1)


def stage(**config) -> RLStage:
    return RLStage.of(kind="rl", data=["file:x"], **config)


PLAIN = [-1 / 3, -1 / 3, 0, 2 / 3]
K3 = math.exp(-0.5) - 0.5  # of a token half a nat likelier than under the reference
LOGGED = {"kl_metric": True}
NEAR, IMPOSSIBLE, MASKED = (-1.6, -1.5, 0.0, -1.5), (-math.inf, -1.5, 0.0, -1.5), (-1.6, -1.5, -math.inf, -1.5)
IN_REWARD = {"kl_coefficient": 0.5, "kl_kind": "k1", "kl_in": "reward"}
LOSSES = {
    "token mean on policy": (
        *({}, PLAIN),
        {"loss": 0.0, "ratio": 1.0, "clipped_share": 0.0, "entropy": 1.75 / 3, "mismatch_largest": 0.5},
    ),
    "mismatch": ({}, PLAIN, {"mismatch_absolute": 0.6 / 3}),
    "importance weights": (  # exp(-0.1), exp(0.5) and 1; the second is cut
        {"correction": "tis", "correction_cap": 1.2},
        [-math.exp(-0.1) / 3, -1.2 / 3, 0, 2 / 3],
        {"correction": (math.exp(-0.1) + 2.2) / 3},
    ),
    "KL in the loss": (
        {"reference": NEAR, "kl_coefficient": 0.5, "kl_kind": "k2"},
        [(-1 + 0.5 * 0.5) / 3, *PLAIN[1:]],
        {"kl": 0.125 / 3, "loss": 0.5 * 0.125 / 3},
    ),
    "KL that is only logged": ({"reference": NEAR, **LOGGED}, PLAIN, {"kl": K3 / 3, "loss": 0.0}),
    "impossible": ({"reference": IMPOSSIBLE, **LOGGED, "kl_kind": "k3"}, PLAIN, {"kl": math.inf, "loss": 0.0}),
    "a masked token may hold anything": (
        {"reference": MASKED, "kl_coefficient": 0.5, "kl_kind": "k3"},
        [(-1 + 0.5 * (1 - math.exp(-0.5))) / 3, *PLAIN[1:]],
        {"kl": K3 / 3, "loss": 0.5 * K3 / 3},
    ),
    "a masked token far from its reference, whose exponential overflows": (
        {"reference": (*MASKED[:2], 100.0, MASKED[3]), "kl_coefficient": 0.5, "kl_kind": "k3"},
        [(-1 + 0.5 * (1 - math.exp(-0.5))) / 3, *PLAIN[1:]],
        {"kl": K3 / 3, "loss": 0.5 * K3 / 3},
    ),
    "KL in the reward": ({"reference": (-1.6, -1.25, 0.0, -2.0), **IN_REWARD}, PLAIN, {"kl": 0.75 / 3, "loss": 0.0}),
    # the second response has a negative advantage, and the trainer is 0 nats from its sampler, then 0.5
    "OPSM, near": ({"opsm_limit": 0.1}, PLAIN, {"left_out_share": 0.0}),
    "OPSM, far": ({"opsm_limit": 0.1, "sampler": FAR}, [-1 / 3, -1 / 3, 0, 0], {"left_out_share": 1 / 3}),
    "veto": ({"correction_veto": 0.95}, [0, 0, 0, 2 / 3], {"left_out_share": 2 / 3}),
    "veto, of a masked token": ({"correction_veto": 0.5}, PLAIN, {"left_out_share": 0.0}),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_of_a_row(name):
    values, wanted, numbers = LOSSES[name]
    gradient, metrics = loss_of(**values)
    assert gradient == pytest.approx(wanted)
    assert {name: metrics[name] for name in numbers} == pytest.approx(numbers, rel=1e-5, abs=1e-7)


def test_a_reference_is_held_for_a_coefficient_or_the_metric_alone():
    for values in ({}, {"kl_metric": True}, {"kl_coefficient": 0.1}):
        assert stage(**values).algorithm.has_reference == bool(values)


def test_kl_in_the_reward_is_summed_over_each_rollout():
    row = SimpleNamespace(mask=MASK, sequence_ids=RESPONSES, rollouts=torch.tensor([2, 0]))
    kl = PolicyObjective(stage(**IN_REWARD)).kl(OLD, torch.tensor([-1.6, -1.25, 0.0, -2.0]))
    sums = kl_of_rollouts(kl, row, 4)
    assert sums.tolist() == pytest.approx([0.5, 0.0, 0.25, 0.0])


def test_numbers_are_added_up_on_the_device_and_a_row_without_trained_tokens_has_no_largest():
    total = DeviceSums()
    for values, largest in (([1.0, 2.0], [3.0]), ([0.5, 0.25], []), ([0.0, 0.0], [-torch.inf])):
        maximum = {"b": torch.tensor(*largest)} if largest else {}
        total.add(DeviceSums({"a": torch.tensor(values[0]), "n": torch.tensor(values[1])}, maximum))
    assert total.read() == {"summed": {"a": 1.5, "n": 2.25}, "largest": {"b": 3.0}}
    found = DeviceSums({"a": torch.tensor(1)}, {"b": torch.tensor(-torch.inf)}).read()
    assert found == {"summed": {"a": 1.0}, "largest": {}}


def test_settings_at_their_defaults_may_be_written_out():
    assert RLStage(**stage(policy_loss="sapo").model_dump()).algorithm.kl_kind.name == "low_var"


def own_loss(trainer, old, advantages, mask, sequence_ids, clip_high, *, clip_low, power=1.0):
    """A user's policy loss; its ratio shows what it was given."""
    return PolicyLoss(-advantages * trainer, torch.full_like(old, (clip_low + clip_high) ** power), mask)


def discounted(rewards, group_ids, num_tokens, gamma):
    return rewards * gamma


def softened(old_logprobs, sampler_logprobs, mask, sequence_ids, *, power):
    return ((old_logprobs - sampler_logprobs) * power).exp() * mask


def own_weights(mask, sequence_ids, totals, scale):
    return mask * scale


def own(name: str, **options) -> dict:
    return {"name": f"{__name__}:{name}", "options": options}


@pytest.mark.parametrize(
    ("options", "values", "ratio"),
    [({"power": 2}, {"clip_low": 0.3}, 0.25), ({}, {}, 0.4), ({}, {"clip_low": 0.5, "clip_high": 0.25}, 0.75)],
)
def test_a_loss_of_ones_own_gets_its_options_and_the_settings_that_it_names(options, values, ratio):
    assert loss_of(policy_loss=own("own_loss", **options), **values)[1]["ratio"] == pytest.approx(ratio)


def test_an_advantage_a_correction_and_an_aggregation_of_ones_own_get_settings_and_options():
    algorithm = stage(advantage=own("discounted"), aggregation=own("own_weights", scale=3)).algorithm
    assert algorithm.load(algorithm.advantage)(2.0, None, None) == 2.0
    assert algorithm.aggregation.load()(2.0, None, None) == 6.0
    gradient, _ = loss_of(correction=own("softened", power=2))  # mismatches -0.1, 0.5 and 0
    assert gradient == pytest.approx([-math.exp(-0.2) / 3, -math.exp(1.0) / 3, 0, 2 / 3])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"policy_loss": own("own_loss"), "dual_clip": 3.0}, "own_loss does not name dual_clip 3.0; leave"),
        ({"policy_loss": own("own_loss", powr=2)}, "no option 'powr'; it takes clip_high, clip_low, power"),
        ({"aggregation": own("own_weights")}, "needs the option 'scale'; it takes scale"),
    ],
)
def test_what_an_entry_of_ones_own_does_not_name_or_needs_is_refused_when_it_is_loaded(values, message):
    with pytest.raises(ConfigError, match=message):
        loss_of(**values)


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
    first = {"summed": {"loss": 0.25, "tokens": 1.0, "entropy": 3.0, "ratio": 1.0}, "largest": {"ratio_largest": 1.0}}
    second = {"summed": {"loss": 0.5, "tokens": 3.0, "entropy": 1.0, "ratio": 3.6}, "largest": {"ratio_largest": 1.4}}
    found = trainer_metrics([first, second], num_updates=1)
    assert found["loss"] == 0.75 and found["entropy"] == 1.0 and found["ratio"] == pytest.approx(1.15)
    assert found["ratio_largest"] == 1.4


def plain_update(model, optimizer, rollouts, old):
    """One GRPO update written from the paper, a rollout at a time. old: log-probabilities of the step's begin, by the
    rollout, which the first update fills in. Returns the gradient's norm, the clipped tokens and their KL to old."""
    num_tokens, clipped, kl = sum(one.num_sampled for one in rollouts), 0, 0.0
    for group in groups_of(rollouts).values():
        rewards = torch.tensor([one.reward for one in group], dtype=torch.float64)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        for one, advantage in zip(group, advantages.float(), strict=True):
            ids = torch.tensor([one.prompt_token_ids + one.response_token_ids])
            start = len(one.prompt_token_ids)
            logprobs = model(ids).logits[0, start - 1 : -1].log_softmax(-1).gather(1, ids[0, start:, None])
            apart = logprobs - old.setdefault((one.group_id, one.sample_index), logprobs.detach())
            ratio, inside = apart.exp(), apart.exp().clamp(0.8, 1.2)
            clipped += (ratio != inside).sum().item()
            kl += ((-apart).exp() - 1 + apart).clamp(max=10).sum().item()
            (-torch.minimum(ratio * advantage, inside * advantage)).sum().div(num_tokens).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return norm.item(), clipped, kl


def test_two_steps_of_a_stage_of_two_ranks_equal_plain_pytorch_on_the_same_rollouts(tmp_path):
    from transformers import AutoModelForCausalLM

    job = make_job(tmp_path, **on(2), eval_prompts=0, checkpoint_every=10, learning_rate=1e-3)
    run(job)
    model = AutoModelForCausalLM.from_pretrained(job.inputs["model"], dtype=torch.float32)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.98))
    for step in (1, 2):
        rollouts = list(read_rollouts(job.records / "rollouts" / f"step-{step:08d}.jsonl"))
        norm, *_ = plain_update(model, optimizer, rollouts, {})
        assert metrics(job)[step - 1]["gradient_norm"] == pytest.approx(norm, rel=1e-4)
    found = load_file(job.output / "model.safetensors")
    for name, tensor in model.named_parameters():
        torch.testing.assert_close(found[name], tensor.detach(), rtol=1e-4, atol=2e-5, msg=name)


class Reads(TorchDispatchMode):
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
    assert trainer.engine.updates.num_updates == sum(made for made, _ in counts)
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
    from transformers import AutoModelForCausalLM

    rollouts = [rollout("a", i, [1, 2], [3 + i, 5, 9 - i], reward=float(i)) for i in range(3)]
    settings = {"learning_rate": 1e-2, "epochs_per_step": 3, "weight_decay": 0.0, "kl_metric": True}
    trainer = trainer_of(save_tiny_model(folder), precision="fp32", **settings)
    reply = trainer.train(1, rollouts)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.98), weight_decay=0.0)
    old = {}  # of the model that the stage began with: the reference's too
    _, clipped, kl = zip(*(plain_update(model, optimizer, rollouts, old) for _ in range(3)), strict=True)
    wanted = {f"decoder.{name}": tensor for name, tensor in model.named_parameters()}
    rows = trainer.last_scores[0][1]
    counts = [
        reply["num_updates"],
        reply["num_passes"],
        trainer.engine.updates.num_updates,
        reply["sums"]["summed"]["tokens"],
    ]
    scored = (len(rows), sum(len(row.targets) for row, _, _ in rows))
    return furthest(weights_of(trainer), wanted), sum(clipped), counts, scored, sum(kl), reply["sums"]["summed"]["kl"]


def test_several_epochs_over_a_step_equal_plain_pytorch_with_the_old_logprobs_of_its_start(tmp_path):
    apart, clipped, counts, scored, kl, logged = call(several_epochs, tmp_path)
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
    return [*distances, furthest(*map(reference_of, (trainer, other)))]


def reference_of(trainer):
    """The reference's weights; one rank's share is all of a tensor."""
    shapes = {name: tensor.shape for name, tensor in trainer.engine.weights()}
    return {name: share.view(shapes[name]).clone() for name, share in trainer._reference.model.shares.items()}


def test_the_reference_is_refreshed_every_second_update_and_is_part_of_a_checkpoint(tmp_path):
    first, second, third, resumed = call(refreshed, tmp_path)
    assert first > 0.0 and third > 0.0 and second == resumed == 0.0
