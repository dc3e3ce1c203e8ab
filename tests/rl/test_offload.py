"""Policy and critic with ZeRO-3's offload: the same step, and the same weights on their way to the samplers."""

import json

from tests.forks import run_script
from tests.rl.models import save_tiny_model

# argv: model, output
STEPS = """
import json, sys
from pathlib import Path
from nanodag.config.kinds.rl import RLStage
from nanodag.rl.trainer.trainer import Trainer
from tests.rl.models import rollout
part = [rollout(str(g), s, [1, 2 + g], [3 + s, 5, 7 + g][: 1 + s], reward=float((g + s) % 2))
        for g in range(2) for s in range(3)]
found = []
for where in ("none", "cpu"):
    config = RLStage.of(kind="rl", data=["file:x"], precision="bf16", learning_rate=1e-3, advantage="gae",
                     max_new_tokens=8, sampler={"context": 64}, micro_batch_tokens=4096,
                     resources={"offload_optimizer": where, "offload_param": where})
    trainer = Trainer(config, Path(sys.argv[1]), device="cpu")
    replies = [trainer.train(step, part) for step in (1, 2)]
    engines = (trainer.engine, trainer._credit.critic.engine)
    assert [engine._zero.offload_optimizer for engine in engines] == [where == "cpu"] * 2
    own = [[reply["sums"], reply["critic"], reply["gradient_norm"]] for reply in replies]
    found.append([own, trainer.export(Path(sys.argv[2]) / where, fingerprint=True)])
Path(sys.argv[2], "found.json").write_text(json.dumps(found))
"""


def test_an_offloaded_policy_and_critic_take_the_same_steps(tmp_path):
    arguments = [save_tiny_model(tmp_path / "model"), tmp_path]
    done = run_script(STEPS, *arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    plain, offloaded = json.loads((tmp_path / "found.json").read_text())
    assert offloaded == plain and len(plain[1]) > 10
