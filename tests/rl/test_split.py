"""One step of the trainer is the same for any number of ranks, of ranks that share rows, and of micro-batches, whatever
the algorithm."""

import json
import os
import socket
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from tests.rl.models import save_tiny_model

STEPS = """
import json, os, sys, warnings
from dataclasses import replace
from pathlib import Path
warnings.simplefilter("ignore")
from safetensors.torch import save_file
from nanodag.config.kinds.rl import RLStage
from nanodag.rl.trainer.trainer import Trainer
from nanodag.train.deepspeed_engine import leave
from tests.rl.models import rollout, save_tiny_model

ALGORITHMS = {
    "gspo": dict(advantage="reinforce_pp_baseline", policy_loss="gspo", aggregation="sequence", correction="mis",
                 correction_floor=0.2, correction_cap=5.0, kl_coefficient=0.1, kl_in="reward", kl_kind="k1",
                 opsm_limit=0.1),
    "cispo": dict(advantage="reinforce_pp", policy_loss="cispo", correction="icepop", correction_cap=50.0,
                  kl_coefficient=0.1, kl_unbiased=True, activation_checkpointing=True),
    "gae": dict(advantage="gae", critic=dict(learning_rate=1e-2, epochs=2, value_clip=0.05, gae_lambda=0.9),
                kl_coefficient=0.1, kl_in="reward", kl_kind="k1", correction="tis",
                teacher=dict(model=sys.argv[1] + "/teacher", coefficient=0.5)),
    "steps": dict(advantage="grpo", reward="process:my:f"),
    "sapo": dict(advantage="rloo", policy_loss="sapo", aggregation="constant", correction="tis_sequence",
                 entropy_coefficient=0.01),
}
folder, name = Path(sys.argv[1]), sys.argv[2]
model = save_tiny_model(folder / f"model-{name}")
rollouts = [
    replace(rollout(f"g{g}", i, [1 + g, 2, 3][: g + 1], [4 + i, 5, 6 + g, 7, 8, 9][: 2 + (g + i) % 5],
            reward=float((g + i) % 3), logprob=-3.0 - 0.1 * i),
            steps=((1, float(g - i)), (0, 0.5 * i)))
    for g in range(4) for i in range(3)
]
for algorithm, values in ALGORITHMS.items():
    for budget in map(int, sys.argv[3:]):
        config = RLStage(kind="rl", data=["file:x"], precision="fp32", learning_rate=1e-3, max_new_tokens=8,
                         sampler={"context": 16}, micro_batch_tokens=budget, updates_per_step=2,
                         sequence_parallel=int(os.environ.get("SHARING_A_ROW", "1")), **values)
        trainer = Trainer(config, model, device="cpu")
        replies = [trainer.train(step, rollouts) for step in (1, 2)]
        sums = [reply["sums"]["summed"] for reply in replies]
        # of ranks that share a row one counts
        found = {key: [one[key] for one in sums if one] for key in ("loss", "tokens", "left_out")}
        found["gradient_norm"] = [reply["gradient_norm"] for reply in replies]
        Path(folder / f"{name}-{algorithm}-{budget}.json").write_text(json.dumps(found))
        weights = {name: tensor.clone().contiguous() for name, tensor in trainer.engine.weights()}
        if trainer.engine.rank == 0:
            save_file(weights, folder / f"{name}-{algorithm}-{budget}.safetensors")
leave()
"""


@pytest.mark.slow
def test_a_step_does_not_depend_on_ranks_or_micro_batches(tmp_path):
    save_tiny_model(tmp_path / "teacher", seed=3)
    started = [
        start(tmp_path, "one", ["1000", "16"], {}),
        *start_ranks(tmp_path, "two", 2, sharing=1),
        *start_ranks(tmp_path, "four", 4, sharing=2),
    ]
    for process in started:
        output, _ = process.communicate(timeout=550)
        assert process.returncode == 0, output[-3000:]
    for algorithm in ("gspo", "cispo", "gae", "steps", "sapo"):
        for several, num_ranks in (("two", 2), ("four", 4)):
            check_numbers(tmp_path, algorithm, [f"{several}-{rank}" for rank in range(num_ranks)])
        whole = load_file(tmp_path / f"one-{algorithm}-1000.safetensors")
        others = (f"{name}-0-{algorithm}-1000" for name in ("two", "four"))
        for other in (f"one-{algorithm}-16", *others):
            for name, tensor in load_file(tmp_path / f"{other}.safetensors").items():
                torch.testing.assert_close(
                    tensor, whole[name], rtol=1e-4, atol=2e-5, msg=lambda m, n=name, o=other: f"{o}, {n}: {m}"
                )


def check_numbers(folder, algorithm, ranks):
    """The weights do not tell: AdamW makes the same of a gradient with another denominator. A norm and a loss do."""
    names = (f"one-{algorithm}-1000", f"one-{algorithm}-16", *(f"{rank}-{algorithm}-1000" for rank in ranks))
    whole, split, *of_ranks = (json.loads((folder / f"{name}.json").read_text()) for name in names)
    added = {
        name: [sum(pair) for pair in zip(*(rank[name] for rank in of_ranks if rank[name]), strict=True)]
        for name in whole
    }
    added["gradient_norm"] = of_ranks[0]["gradient_norm"]
    assert min(whole["gradient_norm"]) > 1e-3
    for other in (split, added):
        assert other["tokens"] == whole["tokens"] and other["left_out"] == whole["left_out"]
        assert other["gradient_norm"] == pytest.approx(whole["gradient_norm"], rel=1e-3)
        assert other["loss"] == pytest.approx(whole["loss"], rel=1e-3, abs=1e-4)
    if algorithm == "gspo":  # its limits leave out some
        assert all(0 < out < all_of for out, all_of in zip(whole["left_out"], whole["tokens"], strict=True))


def start_ranks(folder, name, num_ranks, *, sharing):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    address = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        start(
            folder,
            f"{name}-{rank}",
            ["1000"],
            {**address, "RANK": str(rank), "LOCAL_RANK": str(rank), "SHARING_A_ROW": str(sharing)},
        )
        for rank in range(num_ranks)
    ]


def start(folder, name, budgets, environment):
    return subprocess.Popen(
        [sys.executable, "-c", STEPS, str(folder), name, *budgets],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
