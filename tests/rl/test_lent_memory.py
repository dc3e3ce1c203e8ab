"""Memory that the trainer lends to the samplers, or has on the host: the same steps, bit by bit."""

from tests.forks import call
from tests.rl.models import all_files, save_tiny_model, trainer_of
from tests.rl.rollouts import rollout

PART = [rollout(str(g), s, [1, 2 + g], [3 + s, 5, 7 + g][: 1 + s], reward=float((g + s) % 2))
        for g in range(2) for s in range(3)]  # fmt: skip
SIZES = {"max_new_tokens": 8, "sampler": {"context": 64}}
SHARED = {"kl_coefficient": 0.1, "reference_every": 1, "placement": "shared", "lends_states": True}
SETTINGS = ((3, "bf16", "gae"), (2, "fp32", "grpo"), (1, "bf16", "grpo"))


def bytes_of(memory):
    return sum(lent.num_bytes for lent in memory._storages.values())


def stepped(folder, model, is_lent, zero_stage, precision, advantage):
    """The sums of three steps, the digests of the weights, and the files of a checkpoint that was saved while all was
    lent, where it is."""
    values = {"zero_stage": zero_stage, "precision": precision, "advantage": advantage}
    trainer, sums = trainer_of(model, **values, **SIZES, **SHARED), []
    folder.mkdir()
    for step in (1, 2, 3):
        sums.append(trainer.train(step, PART)["sums"])
        if is_lent:
            for what in ("states", "weights"):
                trainer.lend(what)
                assert all(memory.is_lent and bytes_of(memory) > 10**4 for memory in trainer._lent[what])
            lent = [*trainer.engine.updates.masters, *trainer._reference.model.shares.values()]
            assert all(tensor.untyped_storage().nbytes() == 0 for tensor in lent)
        trainer.save(folder)
        trainer.take_back()
    trainer.load(folder)
    return sums, trainer.export(folder.with_suffix(".hf"), fingerprint=True), all_files(folder)


def lent_or_not(folder, model):
    return [
        [stepped(folder / f"{setting[0]}-{is_lent}", model, is_lent, *setting) for is_lent in (False, True)]
        for setting in SETTINGS
    ]


def test_a_trainer_that_lends_all_it_holds_after_each_step_takes_the_same_steps(tmp_path):
    for kept, lent in call(lent_or_not, tmp_path, save_tiny_model(tmp_path / "model")):
        assert kept == lent and len(kept[1]) > 10 and kept[2]


def offloaded_or_not(folder, model):
    found = []
    for where in ("none", "cpu"):
        resources = {"offload_optimizer": where, "offload_param": where}
        trainer = trainer_of(model, precision="bf16", advantage="gae", resources=resources, **SIZES)
        replies = [trainer.train(step, PART) for step in (1, 2)]
        engines = (trainer.engine, trainer._credit.critic.engine)
        assert [engine._zero.offload_optimizer for engine in engines] == [where == "cpu"] * 2
        own = [[reply["sums"], reply["critic"], reply["gradient_norm"]] for reply in replies]
        found.append([own, trainer.export(folder / where, fingerprint=True)])
    return found


def test_an_offloaded_policy_and_critic_take_the_same_steps_and_send_the_same_weights(tmp_path):
    plain, offloaded = call(offloaded_or_not, tmp_path, save_tiny_model(tmp_path / "model"))
    assert offloaded == plain and len(plain[1]) > 10
