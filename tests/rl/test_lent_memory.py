"""Memory that the trainer lends to the samplers: it is free meanwhile, and comes back bit by bit."""

import json
import mmap

import torch

from nanodag.host import process_memory
from nanodag.train.lent_memory import LentMemory
from tests.forks import run_script
from tests.rl.models import save_tiny_model

CPU = torch.device("cpu")


def test_what_is_lent_is_free_can_be_read_and_comes_back_to_every_view():
    kept, scratch = torch.arange(12.0), torch.ones(5)
    view, other = kept.view(3, 4)[1:, 2:], kept[:1].double()
    memory = LentMemory([kept, kept[3:], other], [scratch, torch.zeros(0)], device=CPU)
    assert memory.num_bytes == 12 * 4 + 8 + 5 * 4
    for _ in range(2):
        memory.lend()
        memory.lend()
        assert kept.untyped_storage().nbytes() == scratch.untyped_storage().nbytes() == 0
        assert memory.readable(view).tolist() == [[6, 7], [10, 11]] and memory.readable(CLEAR) is CLEAR
        memory.take_back()
        memory.take_back()
        assert view.tolist() == [[6, 7], [10, 11]] and scratch.tolist() == [0] * 5
        assert memory.readable(view) is view
    assert not LentMemory([kept], device=torch.device("cuda")).num_bytes, "it is not on that device"


CLEAR = torch.ones(1)


def test_a_process_knows_what_it_takes_and_the_most_since_it_was_asked():
    process_memory.peak_bytes()
    before = process_memory.resident_bytes()
    block = mmap.mmap(-1, 32 << 20)  # fresh pages, where malloc may have old ones
    for place in range(0, len(block), mmap.PAGESIZE):
        block[place] = 1
    assert process_memory.resident_bytes() - before > 30 << 20
    block.close()
    assert process_memory.peak_bytes() - before > 30 << 20


# argv: model, output
STEPS = """
import json, sys
from pathlib import Path
from nanodag.config.kinds.rl import RLStage
from nanodag.rl.trainer.trainer import Trainer
from tests.rl.models import rollout
part = [rollout(str(g), s, [1, 2 + g], [3 + s, 5, 7 + g][: 1 + s], reward=float((g + s) % 2))
        for g in range(2) for s in range(3)]
out = Path(sys.argv[2])
found = []
for stage, precision, advantage in ((3, "bf16", "gae"), (2, "fp32", "grpo"), (1, "bf16", "grpo")):
    for is_lent in (False, True):
        config = RLStage.of(kind="rl", data=["file:x"], precision=precision, learning_rate=1e-3, advantage=advantage,
                            max_new_tokens=8, sampler={"context": 64}, micro_batch_tokens=4096, zero_stage=stage,
                            kl_coefficient=0.1, reference_every=1, placement="shared", lends_states=True)
        trainer = Trainer(config, Path(sys.argv[1]), device="cpu")
        sums = []
        for step in (1, 2, 3):
            sums.append(trainer.train(step, part)["sums"])
            if is_lent:
                before = trainer.memory()["peak_bytes"]
                for what in ("states", "weights"):
                    trainer.lend(what)
                    assert all(memory.is_lent and memory.num_bytes > 10**4 for memory in trainer._lent[what])
                assert all(m.untyped_storage().nbytes() == 0 for m in trainer.engine._updates.masters)
                assert all(p.untyped_storage().nbytes() == 0 for p in trainer._reference.policy.parameters())
            (out / f"{stage}-{is_lent}").mkdir(exist_ok=True)
            trainer.save(out / f"{stage}-{is_lent}")
            trainer.take_back()
        trainer.load(out / f"{stage}-{is_lent}")
        found.append([sums, trainer.export(out / f"{stage}-{is_lent}-hf", fingerprint=True)])
(out / "found.json").write_text(json.dumps(found))
"""


def test_a_trainer_that_lends_all_it_holds_after_each_step_takes_the_same_steps(tmp_path):
    done = run_script(STEPS, save_tiny_model(tmp_path / "model"), tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found[::2] == found[1::2] and len(found) == 6 and len(found[0][1]) > 10
    for stage in (1, 2, 3):
        kept, lent = (
            {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
            for folder in (tmp_path / f"{stage}-False", tmp_path / f"{stage}-True")
        )
        assert kept == lent
