"""On-policy distillation: the gradient of the reverse KL to a teacher, token by token, on top of any advantage."""

import json
from pathlib import Path

import pytest
import torch
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM

from nanodag.config.kinds.rl import RLStage
from nanodag.rl.advantages import distilled
from tests.forks import run_script
from tests.rl.models import save_tiny_model

RESPONSES = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]


def test_a_token_that_the_teacher_likes_less_than_the_policy_loses_advantage():
    advantages, reverse_kl = distilled(
        torch.tensor([1.0, 1.0, 0.0, 0.0]),
        torch.tensor([-1.0, -2.0, -0.5, -0.5]),
        torch.tensor([-3.0, -1.0, -0.5, -torch.inf]),
        coefficient=0.5,
    )
    assert reverse_kl.tolist() == [2.0, -1.0, 0.0, 29.5]
    assert advantages.tolist() == [0.0, 1.5, 0.0, -14.75]


# argv: policy, teacher, the advantage, output
TRAINED = """
import json, sys
from pathlib import Path
from nanodag.config.kinds.rl import RLStage
from nanodag.rl.trainer.trainer import Trainer
from tests.rl.models import rollout
from tests.rl.test_distillation import RESPONSES
config = RLStage.of(kind="rl", data=["file:x"], precision="fp32", temperature=0.8, gradient_clipping=0, filters=[],
                 advantage=sys.argv[3], teacher={"model": sys.argv[2], "coefficient": 0.5}, sampler={"context": 64},
                 max_new_tokens=8, micro_batch_tokens=4096)
trainer = Trainer(config, Path(sys.argv[1]), device="cpu")
reply = trainer.train(1, [rollout("a", n, [1, 2], ids, reward=0.5) for n, ids in enumerate(RESPONSES)])
Path(sys.argv[4]).write_text(json.dumps([reply["gradient_norm"], reply["sums"]["summed"]["teacher_kl"]]))
"""


def scores(folder: Path) -> tuple[torch.nn.Module, torch.Tensor]:
    """The model and the log-probability of every response token, each response alone."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    found = []
    for ids in RESPONSES:
        logprobs = log_softmax(model(torch.tensor([[1, 2, *ids]])).logits[0, 1:-1] / 0.8, dim=-1)
        found.append(logprobs.gather(1, torch.tensor(ids)[:, None]).squeeze(1))
    return model, torch.cat(found)


def test_where_rewards_are_equal_the_gradient_is_that_of_the_reverse_kl(tmp_path):
    policy, teacher = save_tiny_model(tmp_path / "policy"), save_tiny_model(tmp_path / "teacher", seed=4)
    arguments = [policy, teacher, "grpo", tmp_path / "out.json"]
    done = run_script(TRAINED, *arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    norm, total = json.loads((tmp_path / "out.json").read_text())
    model, own = scores(policy)
    with torch.no_grad():
        _, theirs = scores(teacher)
    reverse_kl = own.detach() - theirs
    (0.5 * reverse_kl * own).mean().backward()
    wanted = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt().item()
    assert norm == pytest.approx(wanted, rel=1e-4)
    assert total == pytest.approx(reverse_kl.sum().item(), rel=1e-4)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": "http://127.0.0.1:1"}, "name a server as teacher.url"),
        ({"model": "teacher"}, "neither none, input nor the absolute path"),
        ({"coefficient": 0.5}, "means nothing without teacher.model or .url"),
    ],
)
def test_a_teacher_that_cannot_be_asked_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        RLStage.of(kind="rl", data=["file:x"], teacher=values)
