"""Losses, advantages and corrections here and in TRL, verl and OpenRLHF, on random ragged inputs.

    python benchmarks/losses_vs_peers.py [--trl PYTHON] [--verl PYTHON] [--openrlhf PYTHON] [--seeds 5]

Each peer runs by its own interpreter (benchmarks/loss_peers.py), so its package need not be installed here. Ours is the
objective that the trainer uses, on responses laid one after the other; theirs gets the same responses padded. Printed:
the largest difference of loss and of gradient, or of values, over all seeds; the process fails when one is above
LIMIT that is not known to differ on purpose.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

try:
    from benchmarks import loss_peers
except ImportError:  # started as a file: this folder is where modules are looked for
    import loss_peers

LIMIT = 1e-6
PEERS = ("trl", "verl", "openrlhf")
GROUPS, SAMPLES = 4, 5
PPO = {"clip_low": loss_peers.CLIP_LOW, "clip_high": loss_peers.CLIP_HIGH}
BOUNDS = {"correction_floor": loss_peers.FLOOR, "correction_cap": loss_peers.CAP}
KL_ALONE = {"kl_coefficient": 1.0}

CASES: dict[str, dict[str, Any]] = {
    "ppo_clip, token": PPO,
    "ppo_clip, sequence": PPO | {"aggregation": "sequence"},
    "ppo_clip, constant": PPO | {"aggregation": "constant"},
    "dual clip": PPO | {"dual_clip": loss_peers.DUAL_CLIP},
    "gspo": {
        "policy_loss": "gspo",
        "aggregation": "sequence",
        "clip_low": loss_peers.GSPO_LOW,
        "clip_high": loss_peers.GSPO_HIGH,
    },
    "cispo": {"policy_loss": "cispo", "clip_low": 1.0, "clip_high": loss_peers.CISPO_BOUND - 1.0},
    "sapo": {"policy_loss": "sapo", "aggregation": "sequence"},
    "reinforce": {"policy_loss": "reinforce"},
    "kl k1": KL_ALONE | {"kl_kind": "k1"},
    "kl k2": KL_ALONE | {"kl_kind": "k2"},
    "kl k3": KL_ALONE | {"kl_kind": "k3"},
    "kl low_var": KL_ALONE | {"kl_kind": "low_var"},
    "kl k3, unbiased": KL_ALONE | {"kl_kind": "k3", "kl_unbiased": True},
    "tis": PPO | {"correction": "tis", "correction_cap": loss_peers.CAP},
    "tis_sequence": PPO | {"correction": "tis_sequence", "correction_cap": loss_peers.CAP},
    "icepop": PPO | {"correction": "icepop"} | BOUNDS,
    "mis": PPO | {"correction": "mis"} | BOUNDS,
    "opsm": PPO | {"opsm_limit": loss_peers.OPSM_LIMIT},
}
ADVANTAGES = ("grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline")
# (case, peer, quantity): why it is not the same
ON_PURPOSE = {
    ("kl k3, unbiased", "openrlhf", "loss"): "its value is not weighted by the ratio",
    ("advantage grpo", "openrlhf", "value"): "its epsilon is 1e-9",
    ("advantage reinforce_pp", "openrlhf", "value"): "its variance is divided by n",
    ("advantage reinforce_pp_baseline", "openrlhf", "value"): "its variance is divided by n",
}


def make_inputs(seed: int) -> dict[str, np.ndarray]:
    """GROUPS x SAMPLES responses of 1 to LONGEST tokens. (B, T) float32: trainer, old, sampler, reference. (B, T) bool:
    mask, with holes, as tool tokens make; real, without. (B,): advantages, rewards float32, groups, lengths int64."""
    draw = np.random.default_rng(seed)
    size, longest = GROUPS * SAMPLES, loss_peers.LONGEST
    lengths = draw.integers(1, longest + 1, size)
    lengths[0] = longest
    real = np.arange(longest) < lengths[:, None]
    mask = real & (draw.random((size, longest)) > 0.15)
    mask[:, 0] = True  # a response without a trained token is counted by TRL and not by the others
    old = -draw.exponential(1.2, (size, longest)) - 0.05
    values = {
        "old": old,
        "trainer": old + draw.normal(0.0, 0.25, old.shape),
        "sampler": old + draw.normal(0.0, 0.3, old.shape),
        "reference": old + draw.normal(0.0, 0.3, old.shape),
        "old_values": draw.normal(0.3, 0.5, old.shape),
        "values": draw.normal(0.3, 0.5, old.shape),
        "returns": draw.normal(0.5, 0.7, old.shape),
        "advantages": draw.normal(0.0, 1.0, size),
        "rewards": draw.normal(0.5, 1.0, size),
    }
    arrays = {name: np.where(real, v, 0.0) if v.ndim == 2 else v for name, v in values.items()}
    whole = {"groups": np.repeat(np.arange(GROUPS), SAMPLES), "lengths": lengths}
    return {name: v.astype(np.float32) for name, v in arrays.items()} | whole | {"mask": mask, "real": real}


def of_ours(given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every case by the trainer's objective, gradients laid out as the peers' are."""
    import torch

    from nanodag import registry as entries
    from nanodag.config.kinds.rl import RLStage
    from nanodag.rl.losses import Totals
    from nanodag.rl.rollouts.filters import shaped
    from nanodag.rl.trainer.update import PolicyObjective, Scored

    tensors = {name: torch.from_numpy(array) for name, array in given.items()}
    real, mask = tensors["real"], tensors["mask"]
    flat = {name: tensors[name][real] for name in ("old", "sampler", "reference", "mask")}
    sequence_ids = torch.arange(len(real))[:, None].expand_as(real)[real]
    totals = Totals(num_tokens=int(mask.sum()), num_sequences=len(real), max_tokens=loss_peers.LONGEST)
    row = SimpleNamespace(mask=flat["mask"], sequence_ids=sequence_ids, sampler_logprobs=flat["sampler"])
    found: dict[str, np.ndarray] = {}
    for case, config in CASES.items():
        trainer = tensors["trainer"].clone().requires_grad_()
        stage = RLStage.of(kind="rl", data=["file:none"], max_new_tokens=loss_peers.LONGEST, **config)
        scored = Scored(
            row=row,
            trainer_logprobs=trainer[real],
            entropies=torch.zeros_like(flat["old"]),
            old_logprobs=flat["old"],
            advantages=tensors["advantages"][sequence_ids] * (0.0 if "kl_coefficient" in config else 1.0),
            reference_logprobs=flat["reference"] if "kl_coefficient" in config else None,
        )
        loss, _ = PolicyObjective(stage)(scored, totals)
        found[f"{case}/loss"] = loss.detach().numpy()
        found[f"{case}/gradient"] = torch.autograd.grad(loss, trainer)[0].numpy()
    for name in ADVANTAGES:
        advantage = entries.load("advantage", name)
        found[f"advantage {name}/value"] = advantage(tensors["rewards"], tensors["groups"], mask.sum(-1)).numpy()
    found |= _of_critic(tensors, row, real)
    overlong = {"overlong_buffer": loss_peers.OVERLONG, "overlong_penalty": 1.0}
    section = RLStage.of(kind="rl", data=["file:none"], max_new_tokens=loss_peers.LONGEST, **overlong).rollout
    pairs = zip(given["lengths"].tolist(), given["rewards"].tolist(), strict=True)
    found["overlong/value"] = np.array([shaped(_rollout(length, reward), section).reward for length, reward in pairs])
    return found


def _of_critic(tensors: dict[str, Any], row: Any, real: Any) -> dict[str, np.ndarray]:
    """Whitened advantages and returns of gae, the value loss and its gradient, as the trainer's critic has them."""
    import torch

    from nanodag.rl.advantages import gae, reward_of_last
    from nanodag.rl.trainer.critic import value_loss, whitened

    rewards = reward_of_last(tensors["rewards"].double(), row.mask, row.sequence_ids)
    advantages, returns = gae(
        rewards,
        tensors["old_values"][real],
        row.mask,
        row.sequence_ids,
        gamma=loss_peers.GAMMA,
        gae_lambda=loss_peers.LAMBDA,
    )
    ((scaled,),) = whitened([[advantages]], [[row]], lambda *values: list(values))
    values = tensors["values"].clone().requires_grad_()
    losses, _ = value_loss(
        values[real], tensors["old_values"][real], tensors["returns"][real], clip=loss_peers.VALUE_CLIP
    )
    loss = losses[row.mask].mean()
    padded = torch.zeros(2, *real.shape)
    padded[:, real] = torch.stack([torch.where(row.mask, scaled, 0.0), returns.float()])
    return {
        "advantage gae/value": padded[0].numpy(),
        "returns of gae/value": padded[1].numpy(),
        "value loss/loss": loss.detach().numpy(),
        "value loss/gradient": torch.autograd.grad(loss, values)[0].numpy(),
    }


def _rollout(length: int, reward: float) -> Any:
    from nanodag.rl.rollouts.rollout import Rollout, prompt_span
    from tests.rl.rollouts import sampled_span

    spans = (prompt_span([1]), sampled_span([2] * length, [-1.0] * length, 0))
    return Rollout(group_id="g", prompt_id="g", sample_index=0, spans=spans, finish_reason="stop", reward=reward)


def of_peer(peer: str, python: str, inputs: Sequence[Path]) -> list[dict[str, np.ndarray]]:
    """What a peer's interpreter computed from each file of inputs."""
    outputs = [path.with_name(f"{peer}-{path.name}") for path in inputs]
    pairs = [str(path) for pair in zip(inputs, outputs, strict=True) for path in pair]
    command = [python, str(Path(loss_peers.__file__).resolve()), peer, *pairs]
    subprocess.run(command, check=True, stdout=sys.stderr, cwd=inputs[0].parent)
    return [dict(np.load(path)) for path in outputs]


def main() -> None:
    """Compare, print a table, fail when something differs that should not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for peer in PEERS:
        parser.add_argument(f"--{peer}", metavar="PYTHON", help=f"an interpreter that has {peer}")
    parser.add_argument("--seeds", type=int, default=5)
    given = parser.parse_args()
    peers = {peer: getattr(given, peer) for peer in PEERS if getattr(given, peer)}
    worst: dict[tuple[str, str, str], float] = {}
    with tempfile.TemporaryDirectory() as name:
        inputs = [Path(name) / f"{seed}.npz" for seed in range(given.seeds)]
        for seed, path in enumerate(inputs):
            np.savez(path, **make_inputs(seed))
        ours = [of_ours(make_inputs(seed)) for seed in range(given.seeds)]
        for peer, python in peers.items():
            for mine, theirs in zip(ours, of_peer(peer, python, inputs), strict=True):
                for key, array in theirs.items():
                    case, _, quantity = key.rpartition("/")
                    found = float(np.abs(array.astype(np.float64) - mine[key]).max())
                    worst[case, peer, quantity] = max(worst.get((case, peer, quantity), 0.0), found)
    sys.exit(_report(worst))


def _report(worst: dict[tuple[str, str, str], float]) -> int:
    """Print every difference; 1 when one is above the limit and not on purpose."""
    failed = False
    for (case, peer, quantity), found in sorted(worst.items()):
        reason = ON_PURPOSE.get((case, peer, quantity), "")
        is_wrong = found > LIMIT and not reason
        failed |= is_wrong
        print(f"{case:36} {peer:9} {quantity:9} {found:.1e} {'DIFFERS' if is_wrong else reason}")
    same = [found for key, found in worst.items() if key not in ON_PURPOSE]
    print(f"largest where nothing should differ: {max(same, default=0.0):.1e}")
    return int(failed)


if __name__ == "__main__":
    main()
