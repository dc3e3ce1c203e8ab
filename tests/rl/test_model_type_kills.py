"""Models that transformers' classes compute: sft, then RL, each killed at random moments, end on the same bytes."""

from dataclasses import replace

import pytest

from nanodag.data.digests import file_sha256
from nanodag.host.images import FOLDER
from nanodag.tokenizer.bpe import save_tokenizer
from nanodag.worker.job import read_job, write_job
from tests.model.model_types import make_tiny, taken_by_transformers
from tests.model.vision_models import KINDS as VISION
from tests.model.vision_models import make_vision
from tests.rl import stages
from tests.rl.stages import KILL
from tests.train import stages as supervised
from tests.train.resume import losses

SFT = {"max_steps": 12, "checkpoint_every": 2, "precision": "fp32", "patience": 0, "sample_prompts": []}
SFT |= {"optimizer": {"name": "adamw", "learning_rate": 1e-3, "matrix_lr": 1e-3}}
RL = {"num_steps": 6, "checkpoint_every": 2, "eval_every": 3, "learning_rate": 1e-3}
RL |= {"sampler": {"context": 64, "max_batch": 16, "deterministic": True}}
PICTURES = {
    "data": [
        {"url": "python:nanodag.data.picture_problems:count_shapes?size=240", "adapter": "problem", "held_out": 0.2}
    ]
}
ROOM = {"sampler": {"context": 96, "max_batch": 16, "deterministic": True}, "micro_batch_tokens": 256}
# First and last step behind which a kill falls; 0 is the start, when the model is read and its sampler starts.
KILLS = {"sft": ((0, 1, KILL), (2, 5, KILL), (6, 9, KILL)), "rl": ((0, 0, KILL), (1, 2, KILL), (3, 5, KILL))}


def sft_job(folder, model, **changes):
    workspace = supervised.make_job(folder / "sft", supervised.sft(folder, **SFT, **changes), {"model": model})
    return read_job(workspace / "job.json")


def rl_job(folder, model, **changes):
    job = replace(stages.make_job(folder, **{**RL, **changes}), inputs={"model": model})
    write_job(job)
    return job


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_moe", "falcon_h1", "gpt2", *VISION])
def test_killed_at_random_sft_and_rl_of_a_transformers_model_end_on_the_same_bytes(tmp_path, monkeypatch, name):
    monkeypatch.setenv(FOLDER, str(tmp_path / "images"))
    of_sft, of_rl = ({}, {}) if name not in VISION else (PICTURES, PICTURES | ROOM)
    if name in VISION:
        make_vision(name, tmp_path / "model")
    else:
        make_tiny(name, tmp_path / "model", vocab_size=stages.VOCABULARY)
        save_tokenizer(stages.BYTES, tmp_path / "model")
        taken_by_transformers(tmp_path / "model")
    before = {case: tmp_path / "model" for case in ("undisturbed", "killed")}
    for kind, make_job, changes in (("sft", sft_job, of_sft), ("rl", rl_job, of_rl)):
        undisturbed, job = (make_job(tmp_path / case, model, **changes) for case, model in before.items())
        stages.run(undisturbed, fresh=True)  # with a seed of hashes of its own
        if kind == "rl":
            stages.slow_rewards(tmp_path / "killed")
        assert stages.disturb(job, *KILLS[kind]) >= 2, f"{kind} was over before it was killed"
        stages.run(job)
        places = (job.output, undisturbed.output, before["killed"])
        killed, expected, untrained = (file_sha256(place / "model.safetensors") for place in places)
        assert killed == expected, f"{kind} ended on other weights"
        assert killed != untrained, f"{kind} trained nothing"
        assert losses(job.workspace) == losses(undisturbed.workspace)
        before = {"undisturbed": undisturbed.output, "killed": job.output}
    stages.same_in_the_end(job, undisturbed)
    stages.outcomes_of(job)
