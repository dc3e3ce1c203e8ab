"""Supervised stages in real processes: killed, stopped, damaged and restarted, they end on the same bytes."""

import json
import random
import shutil
import signal

import pytest
from safetensors.torch import load_file, save_file

from tests.train import forks, stages


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return stages.with_inputs(tmp_path_factory.mktemp("stages"))


def finished(folder, name, config, *, num_ranks=1, **inputs):
    """The workspace of a stage that nothing disturbed, and its result."""
    workspace = stages.make_job(folder / name, config, inputs)
    return workspace, stages.finish(workspace, num_ranks=num_ranks)


def of_steps(workspace, name, event="step"):
    return [line[name] for line in stages.metrics(workspace) if line["event"] == event]


@pytest.fixture(scope="module")
def pretrained(folder):
    workspace, _ = finished(folder, "pretrain", stages.pretrain(folder), tokenizer=folder / "tokenizer")
    return workspace


def test_a_result_says_what_was_trained_and_what_it_cost(pretrained):
    result = json.loads((pretrained / "result.json").read_text())
    found, cost = result["metrics"], result["cost"]
    assert found["steps"] == 12
    assert cost["tokens"] + found["padding"] == 12 * 512
    assert found["padding"] < 64  # behind the last document of a window
    assert found["validation_bits_per_byte"] > 0
    assert cost["flops"] > 6 * 20_000 * cost["tokens"]
    assert {"seconds", "cpu_seconds", "start_seconds", "tokens_per_second", "mfu", "step_ms"} <= set(cost)
    assert of_steps(pretrained, "step") == list(range(1, 13))
    assert of_steps(pretrained, "step", "eval") == [4, 8, 12]
    assert "river stone" in of_steps(pretrained, "prompt", "sample")
    losses = of_steps(pretrained, "loss")
    assert losses[-1] < losses[0] - 0.5


def test_held_out_rows_are_the_same_for_every_seed(folder, pretrained):
    config = stages.pretrain(folder, seed=4, horizon_tokens=512)
    other, _ = finished(folder, "other-seed", config, tokenizer=folder / "tokenizer")
    rows = stages.content(pretrained / "held_out")
    assert any(rows.values()) and rows == stages.content(other / "held_out")


def test_a_killed_pretrain_run_with_a_damaged_checkpoint_ends_on_the_same_bytes(folder, pretrained):
    workspace = stages.make_job(folder / "killed", stages.pretrain(folder), {"tokenizer": folder / "tokenizer"})
    step = random.randint(7, 10)
    forks.interrupt(workspace, after_step=step, with_signal=signal.SIGKILL)
    newest = sorted((workspace / "checkpoints").glob("step-????????"))[-1]
    state = newest / "state-00000-of-00001.safetensors"
    damaged = bytearray(state.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    state.write_bytes(damaged)
    stages.finish(workspace, fresh=True)
    log = (workspace / "worker.log").read_text()
    assert str(state) in log
    assert log.count("held-out rows into") == 1  # the restart found them
    assert stages.content(workspace / "output") == stages.content(pretrained / "output"), f"killed after step {step}"
    assert of_steps(workspace, "step") == list(range(1, 13))


@pytest.mark.slow  # which has torchao
def test_a_stage_in_fp8_learns_as_in_bf16_with_other_products_and_killed_ends_on_the_same_bytes(folder):
    losses = {}
    for precision in ("bf16", "fp8"):
        config = stages.pretrain(folder, precision=precision)
        workspace, _ = finished(folder, precision, config, tokenizer=folder / "tokenizer")
        losses[precision] = of_steps(workspace, "loss")
    assert losses["fp8"] != losses["bf16"] and losses["fp8"] == pytest.approx(losses["bf16"], abs=0.05)
    killed = stages.make_job(folder / "killed_fp8", config, {"tokenizer": folder / "tokenizer"})
    forks.interrupt(killed, after_step=7, with_signal=signal.SIGKILL)
    stages.finish(killed)
    assert stages.content(killed / "output") == stages.content(workspace / "output")


def test_sigterm_leaves_a_checkpoint_and_exit_code_75_and_a_restart_the_same_bytes(folder, pretrained):
    config = stages.pretrain(folder, checkpoint_every=1000)
    workspace = stages.make_job(folder / "stopped", config, {"tokenizer": folder / "tokenizer"})
    assert forks.interrupt(workspace, after_step=5, with_signal=signal.SIGTERM) == [75]
    assert len(list((workspace / "checkpoints").glob("step-????????"))) == 1
    assert not (workspace / "result.json").exists()
    stages.finish(workspace)
    assert stages.content(workspace / "output") == stages.content(pretrained / "output")


def test_a_killed_sft_run_resumes_to_the_same_weights(folder, pretrained):
    whole, result = finished(folder, "sft", stages.sft(folder), model=pretrained / "output")
    result = result["metrics"]
    killed = stages.make_job(folder / "killed_sft", stages.sft(folder), {"model": pretrained / "output"})
    step = random.randint(4, max(4, result["steps"] - 1))
    forks.interrupt(killed, after_step=step, with_signal=signal.SIGKILL)
    stages.finish(killed)
    assert stages.content(killed / "output") == stages.content(whole / "output"), f"killed after step {step}"
    assert result["label_tokens"] < result["tokens"]
    assert result["dropped_tokens"] == 0


def test_pretraining_goes_on_from_a_models_weights(folder, pretrained):
    more = stages.pretrain(folder, inputs={"model": "pretrain"}, horizon_tokens=512 * 4, seed=4)
    del more["shape"]
    workspace, found = finished(folder, "more", more, model=pretrained / "output")
    before = json.loads((pretrained / "result.json").read_text())["metrics"]
    assert of_steps(workspace, "loss")[0] < before["loss"] + 0.5  # random weights begin 2 above
    assert found["metrics"]["validation_bits_per_byte"] < before["validation_bits_per_byte"]
    for name in ("config.json", "tokenizer.json"):
        assert (workspace / "output" / name).read_bytes() == (pretrained / "output" / name).read_bytes()


def test_sft_trains_documents_beside_conversations_and_validates_on_the_conversations(folder, pretrained):
    plain = stages.sft(folder, max_steps=10, validation_every=1000, precision="fp32")
    prose = {"url": f"file:{folder / 'prose.jsonl'}[0:20]", "adapter": "text", "held_out": 0.1}
    both = {**plain, "data": [*plain["data"], prose]}
    found = {}
    for name, config in (("plain", plain), ("both", both)):
        workspace, result = finished(folder, f"documents_{name}", config, model=pretrained / "output")
        found[name] = result["metrics"]["document_share"], of_steps(workspace, "validation_loss", "eval")[0]
    assert found["plain"][0] == 0
    assert 0.1 < found["both"][0] < 0.9
    assert found["plain"][1] == found["both"][1]  # of the untrained model: the same held-out conversations


def test_the_best_weights_are_kept_when_validation_gets_worse(folder, pretrained):
    # A rate far too high from the second half on: validation soon stops improving.
    far = {"optimizer": {"name": "adamw", "learning_rate": 0.5, "matrix_lr": 0.5}, "gradient_clipping": 0.0}
    config = stages.sft(folder, num_epochs=20, validation_every=1, precision="fp32", **far)
    workspace, result = finished(folder, "worse", config, model=pretrained / "output")
    result = result["metrics"]
    assert result["stopped_early"] and result["steps"] < result["planned_steps"]
    assert result["best_step"] == result["steps"] - 3
    assert result["validation_loss"] == result["best_validation_loss"]
    evals = {line["step"]: line["validation_loss"] for line in stages.metrics(workspace) if line["event"] == "eval"}
    assert min(evals.values()) == evals[result["best_step"]]
    if result["best_step"] == 0:
        one, other = ((one / "output" / "model.safetensors").read_bytes() for one in (workspace, pretrained))
        assert one == other


def test_a_loss_that_is_not_finite_ends_the_stage_with_the_step_and_the_last_losses(folder, pretrained):
    model = shutil.copytree(pretrained / "output", folder / "huge")
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"] *= 1e30  # whose logits leave float32's range after the softmax's sum
    weights["model.embed_tokens.weight"] *= 1e30
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    config = stages.pretrain(folder, inputs={"model": "pretrain"}, horizon_tokens=512 * 4)
    del config["shape"]
    workspace = stages.make_job(folder / "diverged", config, {"model": model})
    assert stages.start(workspace).wait(timeout=120) == 1
    log = (workspace / "worker.log").read_text()
    assert "TrainingDiverged" in log
    assert "step 1 of 4; last losses: " in log.lower(), log
    assert not (workspace / "result.json").exists()


def test_two_ranks_under_zero_3_train_validate_and_publish_one_model(folder):
    two = {"resources": {**stages.RESOURCES, "num_ranks": 2}, "zero_stage": 3, "max_steps": 4, "precision": "bf16"}
    workspace, result = finished(
        folder, "two", stages.pretrain(folder, **two), num_ranks=2, tokenizer=folder / "tokenizer"
    )
    assert result["metrics"]["steps"] == 4
    assert result["cost"]["tokens"] == 4 * 512
    assert "model.safetensors" in stages.content(workspace / "output")
