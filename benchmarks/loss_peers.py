"""The peers' side of losses_vs_peers.py, run by each peer's own interpreter: calls its package, writes what came out.

    python loss_peers.py trl|verl|openrlhf inputs.npz outputs.npz [inputs.npz outputs.npz ...]

Inputs: arrays of B responses, padded on the right to T tokens (see losses_vs_peers.make_inputs). Outputs: for each case
that the peer has, `case/loss` and `case/gradient`, or `case/value`. A peer's trainer object is stood in for by a plain
namespace with the attributes that its loss reads; no formula is written here. Flash attention and
vLLM, which OpenRLHF imports on the way and its formulas never call, are empty modules where they are not installed.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

CLIP_LOW, CLIP_HIGH, DUAL_CLIP, LONGEST = 0.2, 0.28, 1.5, 20
GSPO_LOW, GSPO_HIGH, CISPO_BOUND = 0.03, 0.04, 1.3
FLOOR, CAP, OPSM_LIMIT, OVERLONG = 0.5, 2.0, 0.02, 8
GAMMA, LAMBDA, VALUE_CLIP = 0.97, 0.9, 0.2
NEVER_CALLED = ("flash_attn", "vllm")  # that OpenRLHF imports on the way
Results = dict[str, np.ndarray]


class _Inputs:
    """The arrays as tensors; `trainer` is made again for each case, with gradient."""

    def __init__(self, path: str) -> None:
        self.arrays = {name: torch.from_numpy(array) for name, array in np.load(path).items()}

    def __getattr__(self, name: str) -> torch.Tensor:
        return self.arrays[name]

    def differentiated(
        self, loss: Callable[[torch.Tensor], torch.Tensor], of: str = "trainer"
    ) -> tuple[np.ndarray, np.ndarray]:
        """The loss of the trainer's log-probabilities, or another array, and its gradient to them."""
        trainer = self.arrays[of].clone().requires_grad_()
        value = loss(trainer)
        (gradient,) = torch.autograd.grad(value, trainer)
        return value.detach().numpy(), gradient.numpy()


def of_trl(given: _Inputs) -> Results:
    """GRPOTrainer._compute_loss. Its advantages and correction weights are made amid generation, not callable alone."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    def loss(trainer: torch.Tensor, advantages: torch.Tensor | None = None, **settings: Any) -> torch.Tensor:
        args = {"use_bias_correction_kl": False, "delta": None, "steps_per_generation": 1}
        args |= {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}
        args |= {name: settings.pop(name) for name in list(settings) if name in args}
        own: dict[str, Any] = {
            "aux_loss_enabled": False, "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None,
            "importance_sampling_level": "token", "beta": 0.0, "loss_type": "dapo", "epsilon_low": CLIP_LOW,
            "epsilon_high": CLIP_HIGH, "use_vllm": False, "vllm_importance_sampling_correction": False,
            "max_completion_length": LONGEST, "current_gradient_accumulation_steps": 1,
            "_entropy_bonus_enabled": False, "model": SimpleNamespace(training=True), "args": SimpleNamespace(**args),
            "_metrics": defaultdict(lambda: defaultdict(list)), "get_off_policy_mask": GRPOTrainer.get_off_policy_mask,
            "accelerator": SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
            "_get_per_token_logps_and_entropies": lambda *a, **k: (trainer, torch.zeros_like(trainer), None),
        }  # fmt: skip
        ids = torch.zeros(given.mask.shape, dtype=torch.int64)
        inputs = {
            "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1] + 1, "completion_ids": ids,
            "completion_mask": given.mask.float(), "old_per_token_logps": given.old,
            "ref_per_token_logps": given.reference, "sampling_per_token_logps": given.sampler,
            "advantages": given.advantages if advantages is None else advantages,
            "num_items_in_batch": given.mask.sum(),
        }  # fmt: skip
        return GRPOTrainer._compute_loss(SimpleNamespace(**(own | settings)), None, inputs)

    zeros = torch.zeros_like(given.advantages)
    kl_alone = {"advantages": zeros, "beta": 1.0}
    settings: dict[str, dict[str, Any]] = {
        "ppo_clip, token": {},
        "ppo_clip, sequence": {"loss_type": "grpo"},
        "ppo_clip, constant": {"loss_type": "dr_grpo"},
        "dual clip": {"delta": DUAL_CLIP},
        "gspo": {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon_low": GSPO_LOW,
            "epsilon_high": GSPO_HIGH,
        },
        "cispo": {"loss_type": "cispo", "epsilon_high": CISPO_BOUND},
        "sapo": {"loss_type": "sapo"},
        "kl k3": kl_alone,
        "kl k3, unbiased": {**kl_alone, "use_bias_correction_kl": True},
        "opsm": {"off_policy_mask_threshold": OPSM_LIMIT},
    }
    return _losses(given, {case: lambda trainer, s=own: loss(trainer, **s) for case, own in settings.items()})


def of_verl(given: _Inputs) -> Results:
    """core_algos, and the weights of rollout_corr_helper."""
    from verl.trainer.config import AlgoConfig
    from verl.trainer.ppo import core_algos, rollout_corr_helper
    from verl.workers.config import ActorConfig

    mask = given.mask.float()
    advantages = given.advantages[:, None].expand_as(mask)

    def loss(trainer: torch.Tensor, name: str = "vanilla", mode: str = "token-mean", **settings: Any) -> torch.Tensor:
        weights = settings.pop("weights", None)
        info = {"loss_scale_factor": LONGEST} if mode.endswith("norm") else {}
        values = {"clip_ratio_low": CLIP_LOW, "clip_ratio_high": CLIP_HIGH, "clip_ratio_c": 1e30} | settings
        config = ActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, global_batch_info=info, **values)
        function = core_algos.get_policy_loss_fn(name)
        return function(given.old, trainer, advantages, mask, mode, config, weights)[0]

    def weights(level: str, threshold: float | str) -> torch.Tensor:
        mismatch = (given.old - given.sampler) * mask
        return rollout_corr_helper.compute_rollout_correction_weights(mismatch, mask, level, threshold)[0]

    def kl(trainer: torch.Tensor, kind: str) -> torch.Tensor:
        return core_algos.agg_loss(core_algos.kl_penalty(trainer, given.reference, kind), mask, "token-mean")

    both = f"{FLOOR}_{CAP}"
    found = _losses(
        given,
        {
            "ppo_clip, token": lambda t: loss(t),
            "ppo_clip, sequence": lambda t: loss(t, mode="seq-mean-token-mean"),
            "ppo_clip, constant": lambda t: loss(t, mode="seq-mean-token-sum-norm"),
            "dual clip": lambda t: loss(t, clip_ratio_c=DUAL_CLIP),
            "gspo": lambda t: loss(
                t, "gspo", "seq-mean-token-mean", clip_ratio_low=GSPO_LOW, clip_ratio_high=GSPO_HIGH
            ),
            "cispo": lambda t: loss(t, "cispo", clip_ratio_low=1.0, clip_ratio_high=CISPO_BOUND - 1.0),
            "sapo": lambda t: loss(t, "sapo"),
            "reinforce": lambda t: loss(t, "gpg"),
            "kl k1": lambda t: kl(t, "k1"),
            "kl k2": lambda t: kl(t, "k2"),
            "kl low_var": lambda t: kl(t, "low_var_kl"),
            "tis": lambda t: loss(t, weights=weights("token", CAP)),
            "tis_sequence": lambda t: loss(t, weights=weights("sequence", CAP)),
            "icepop": lambda t: loss(t, weights=weights("token", both)),
            "mis": lambda t: loss(t, weights=weights("sequence", both)),
        },
    )
    index, config = given.groups.numpy(), AlgoConfig(gamma=1.0)
    last = mask.cumsum(-1).argmax(-1)

    def advantage(name: str, **settings: Any) -> np.ndarray:
        rewards = torch.zeros_like(mask)
        rewards[torch.arange(len(rewards)), last] = given.rewards
        per_token, _ = core_algos.get_adv_estimator_fn(name)(
            token_level_rewards=rewards, response_mask=mask, index=index, config=config, **settings
        )
        return per_token[torch.arange(len(rewards)), last].numpy()

    last_rewards = torch.zeros_like(mask)
    last_rewards[torch.arange(len(mask)), last] = given.rewards
    of_tokens, returns = core_algos.compute_gae_advantage_return(last_rewards, given.old_values, mask, GAMMA, LAMBDA)
    found["advantage gae/value"] = (of_tokens * mask).numpy()
    found["returns of gae/value"] = (returns * mask).numpy()
    found["value loss/loss"], found["value loss/gradient"] = given.differentiated(
        lambda values: core_algos.compute_value_loss(values, given.returns, given.old_values, mask, VALUE_CLIP)[0],
        "values",
    )
    found["advantage grpo/value"] = advantage("grpo")
    found["advantage dr_grpo/value"] = advantage("grpo", norm_adv_by_std_in_grpo=False)
    found["advantage rloo/value"] = advantage("rloo")
    found["advantage reinforce_pp/value"] = advantage("reinforce_plus_plus")
    found["advantage reinforce_pp_baseline/value"] = advantage("reinforce_plus_plus_baseline")
    return found


def of_openrlhf(given: _Inputs) -> Results:
    """PolicyLoss, compute_approx_kl, and the advantages of RemoteExperienceMaker."""
    from openrlhf.models.loss import PolicyLoss, ValueLoss, aggregate_loss
    from openrlhf.models.utils import compute_approx_kl
    from openrlhf.trainer.ppo_utils.length_penalty import apply_overlong_penalty

    mask, advantages = given.mask.float(), given.advantages[:, None].expand_as(given.mask)

    def loss(trainer: torch.Tensor, **settings: Any) -> torch.Tensor:
        values = {"clip_eps_low": CLIP_LOW, "clip_eps_high": CLIP_HIGH, **settings}
        return PolicyLoss(**values)(trainer, given.old, advantages, mask, given.sampler)[0]

    def kl(trainer: torch.Tensor, kind: str, **settings: Any) -> torch.Tensor:
        return aggregate_loss(compute_approx_kl(trainer, given.reference, kl_estimator=kind, **settings), mask)

    token = {"is_correction_level": "token"}
    found = _losses(
        given,
        {
            "ppo_clip, token": lambda t: loss(t),
            "ppo_clip, sequence": lambda t: loss(t, token_level_loss=False),
            "dual clip": lambda t: loss(t, dual_clip=DUAL_CLIP),
            "gspo": lambda t: loss(t, policy_loss_type="gspo", clip_eps_low=GSPO_LOW, clip_eps_high=GSPO_HIGH),
            "kl k1": lambda t: kl(t, "k1"),
            "kl k2": lambda t: kl(t, "k2"),
            "kl k3": lambda t: kl(t, "k3"),
            "kl k3, unbiased": lambda t: kl(t, "k3", unbiased_gradient=True, log_probs_old=given.old),
            "tis": lambda t: loss(t, is_correction_mode="clip", is_correction_threshold=(0.0, CAP), **token),
            "icepop": lambda t: loss(t, is_correction_threshold=(FLOOR, CAP), **token),
        },
    )
    for name, estimator in (
        ("grpo", "group_norm"),
        ("dr_grpo", "dr_grpo"),
        ("rloo", "rloo"),
        ("reinforce_pp", "reinforce"),
        ("reinforce_pp_baseline", "reinforce_baseline"),
    ):
        found[f"advantage {name}/value"] = _openrlhf_advantage(given, mask, estimator)
    found["value loss/loss"], found["value loss/gradient"] = given.differentiated(
        lambda values: ValueLoss(VALUE_CLIP)(values, given.old_values, given.returns, mask), "values"
    )
    long = SimpleNamespace(rewards=given.rewards.clone(), response_length=given.lengths)
    apply_overlong_penalty([long], LONGEST, OVERLONG, 1.0)
    found["overlong/value"] = long.rewards.numpy()
    return found


def _openrlhf_advantage(given: _Inputs, mask: torch.Tensor, estimator: str) -> np.ndarray:
    from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker

    one = SimpleNamespace(
        index=list(range(len(mask))),
        rewards=given.rewards.clone(),
        action_mask=mask.bool(),
        kl=torch.zeros_like(mask),
        response_length=mask.sum(-1),
        info={},
        values=None,
    )
    advantage = SimpleNamespace(estimator=estimator, gamma=1.0, lambd=1.0, no_std_norm=False)
    args = SimpleNamespace(
        algo=SimpleNamespace(advantage=advantage),
        rollout=SimpleNamespace(n_samples_per_prompt=int((given.groups == given.groups[0]).sum())),
        reward=SimpleNamespace(clip_range=None),
    )
    maker = SimpleNamespace(
        strategy=SimpleNamespace(args=args),
        advantage_estimator=estimator,
        kl_ctl=SimpleNamespace(value=0.0),
        get_cumulative_returns=lambda *a: RemoteExperienceMaker.get_cumulative_returns(None, *a),
    )
    (done,) = RemoteExperienceMaker.compute_advantages_and_returns(maker, [one])
    return done.advantages[torch.arange(len(mask)), mask.cumsum(-1).argmax(-1)].numpy()


def _losses(given: _Inputs, cases: dict[str, Callable[[torch.Tensor], torch.Tensor]]) -> Results:
    found: Results = {}
    for case, loss in cases.items():
        found[f"{case}/loss"], found[f"{case}/gradient"] = given.differentiated(loss)
    return found


class _Empty(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Empty modules for packages that are not installed and never called."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.partition(".")[0] in NEVER_CALLED:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: _anything(name)  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _anything(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {"__init__": lambda self, *a, **k: None, "__call__": lambda self, *a, **k: a[0]})


def main() -> None:
    """Write the results of one peer, for each file of inputs."""
    peer, *paths = sys.argv[1:]
    if peer == "openrlhf":
        sys.meta_path.append(_Empty())  # last: asked only for what is not installed
    compute = {"trl": of_trl, "verl": of_verl, "openrlhf": of_openrlhf}[peer]
    for inputs, outputs in zip(paths[::2], paths[1::2], strict=True):
        np.savez(outputs, **compute(_Inputs(inputs)))


if __name__ == "__main__":
    main()
