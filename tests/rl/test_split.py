"""One step of the trainer is the same for any number of ranks, of ranks that share rows, and of micro-batches, whatever
the algorithm."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from nanodag.host.ports import free_port
from tests.forks import call
from tests.rl.models import save_tiny_model, trainer_of, weights_of
from tests.rl.rollouts import rollout

IN_REWARD = {"kl_coefficient": 0.1, "kl_in": "reward", "kl_kind": "k1"}
ALGORITHMS = {
    "gspo": {"advantage": "reinforce_pp_baseline", "policy_loss": "gspo", "aggregation": "sequence", "opsm_limit": 0.1}
    | {"correction": "mis", "correction_floor": 0.2, "correction_cap": 5.0, **IN_REWARD},
    "cispo": {"advantage": "reinforce_pp", "policy_loss": "cispo", "correction": "icepop", "correction_cap": 50.0}
    | {"kl_coefficient": 0.1, "kl_unbiased": True, "activation_checkpointing": True},
    "gae": {"advantage": "gae", "correction": "tis", **IN_REWARD}
    | {"critic": {"learning_rate": 1e-2, "epochs": 2, "value_clip": 0.05, "gae_lambda": 0.9}},
    "steps": {"advantage": "grpo", "reward": "process:my:f"},
    "sapo": {"advantage": "rloo", "policy_loss": "sapo", "aggregation": "constant", "correction": "tis_sequence"}
    | {"entropy_coefficient": 0.01},
}
ROLLOUTS = [
    rollout(f"g{g}", i, [1 + g, 2, 3][: g + 1], [4 + i, 5, 6 + g, 7, 8, 9][: 2 + (g + i) % 5],
            reward=float((g + i) % 3), logprob=-3.0 - 0.1 * i, steps=((1, float(g - i)), (0, 0.5 * i)))
    for g in range(4)
    for i in range(3)
]  # fmt: skip


def two_steps(folder, name, budget, sharing, environment):
    """By algorithm the sums and norms of two steps of a rank, and on rank 0 the weights after them."""
    os.environ.update(environment)
    model, found = save_tiny_model(folder / name), {}
    for algorithm, values in ALGORITHMS.items():
        if algorithm == "gae":
            values = {**values, "teacher": {"model": str(folder / "teacher"), "coefficient": 0.5}}
        sizes = {"max_new_tokens": 8, "sampler": {"context": 16}, "micro_batch_tokens": budget, "updates_per_step": 2}
        trainer = trainer_of(model, precision="fp32", sequence_parallel=sharing, **sizes, **values)
        replies = [trainer.train(step, ROLLOUTS) for step in (1, 2)]
        sums = [reply["sums"]["summed"] for reply in replies]
        # of ranks that share a row one counts
        numbers = {key: [one[key] for one in sums if one] for key in ("loss", "tokens", "left_out")}
        numbers["gradient_norm"] = [reply["gradient_norm"] for reply in replies]
        weights = weights_of(trainer)  # every rank takes part in bringing them together
        found[algorithm] = numbers, weights if trainer.engine.rank == 0 else {}
    return found


def ranks(folder, name, num_ranks, sharing):
    address = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [
        (folder, f"{name}-{rank}", 1000, sharing, {**address, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(num_ranks)
    ]


@pytest.mark.slow
def test_a_step_does_not_depend_on_ranks_or_micro_batches(tmp_path):
    save_tiny_model(tmp_path / "teacher", seed=3)
    alone = [(tmp_path, f"one-{budget}", budget, 1, {}) for budget in (1000, 16)]
    started = [*alone, *ranks(tmp_path, "two", 2, sharing=1), *ranks(tmp_path, "four", 4, sharing=2)]
    with ThreadPoolExecutor(len(started)) as threads:
        whole, split, *of_ranks = threads.map(lambda arguments: call(two_steps, *arguments), started)
    for several in ([split], of_ranks[:2], of_ranks[2:]):
        for algorithm, (numbers, weights) in whole.items():
            check_numbers(algorithm, numbers, [found[algorithm][0] for found in several])
            others = several[0][algorithm][1]
            for name, tensor in weights.items():
                torch.testing.assert_close(others[name], tensor, rtol=1e-4, atol=2e-5, msg=f"{algorithm}, {name}")


def check_numbers(algorithm, whole, of_ranks):
    """The weights do not tell: AdamW makes the same of a gradient with another denominator. A norm and a loss do."""
    numbers = {name: [rank[name] for rank in of_ranks if rank[name]] for name in whole}
    added = {name: [sum(each) for each in zip(*lists, strict=True)] for name, lists in numbers.items()}
    assert min(whole["gradient_norm"]) > 1e-3
    assert added["tokens"] == whole["tokens"] and added["left_out"] == whole["left_out"]
    assert of_ranks[0]["gradient_norm"] == pytest.approx(whole["gradient_norm"], rel=1e-3)
    assert added["loss"] == pytest.approx(whole["loss"], rel=1e-3, abs=1e-4)
    if algorithm == "gspo":  # its limits leave out some
        assert all(0 < out < all_of for out, all_of in zip(whole["left_out"], whole["tokens"], strict=True))
