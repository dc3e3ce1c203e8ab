"""Stages that leave adapters alone: merged, they are what the same stage leaves merged; peft reads them as they are."""

import json
import signal

import pytest
import torch

from nanodag.config import result_config
from nanodag.config.pipeline import read_stage
from nanodag.model.adapter_folder import merge_onto
from nanodag.model.architecture import MODEL_CODE
from nanodag.worker.job import read_job
from tests.rl.models import all_files
from tests.train import forks, stages

LORA = {"name": "adamw", "learning_rate": 0.01, "matrix_lr": 0.01, "lora_rank": 4, "lora_alpha": 8.0}
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    stages.write_inputs(folder)
    stages.write_model(folder / "theirs", folder / "tokenizer")
    config = json.loads((folder / "theirs" / "config.json").read_text())
    (folder / "theirs" / "config.json").write_text(json.dumps({**config, MODEL_CODE: "transformers"}))
    return folder


def job(folder, kind, save, *, model="model", name="", **changes):
    config = stages.sft(folder, patience=0, sample_prompts=[]) if kind == "sft" else stages.preference(folder)
    config |= {"kind": kind, "optimizer": {**LORA, "lora_save": save}, "max_steps": 8, "checkpoint_every": 2, **changes}
    place = folder / f"{kind}-{save}-{model}-{name}{'-'.join(map(str, changes.values()))}" / "work"
    return stages.make_job(place, config, {"model": folder / model})


CASES = [
    ("sft", "model", "fp32"),
    ("sft", "model", "bf16"),
    ("sft", "theirs", "fp32"),
    ("reward_model", "model", "fp32"),
    ("reward_model", "theirs", "fp32"),
]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def left(request, folder):
    """Kind, base, and the products of two stages that differ in lora_save alone."""
    kind, model, precision = request.param
    works = [job(folder, kind, save, model=model, precision=precision) for save in ("merged", "adapter")]
    for work in works:
        stages.finish(work)
    return kind, folder / model, *(work / "output" for work in works)


def test_what_is_merged_of_adapters_is_to_the_bit_what_the_stage_leaves_merged(left, tmp_path, capsys):
    _, base, merged, alone = left
    merge_onto(base, alone, tmp_path / "made")
    wanted = {name: data for name, data in all_files(merged).items() if name.parts[0] != "adapter"}
    assert all_files(tmp_path / "made") == wanted and not capsys.readouterr().out
    weights = [name for name in all_files(alone) if name.suffix == ".safetensors"]
    assert [str(name) for name in weights] == ["adapter_model.safetensors"] and (alone / "tokenizer.json").exists()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
def test_peft_reads_the_folder_to_the_logits_of_the_merged_model(left):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    kind, base, merged, alone = left
    options = {"dtype": torch.float32, **({"num_labels": 1, "pad_token_id": 0} if kind == "reward_model" else {})}
    auto = AutoModelForSequenceClassification if kind == "reward_model" else AutoModelForCausalLM
    with torch.no_grad():
        wanted = auto.from_pretrained(merged, **options)(IDS).logits
        found = PeftModel.from_pretrained(auto.from_pretrained(base, **options), str(alone))(IDS).logits
    exact = json.loads((alone / "config.json").read_text())["dtype"] == "float32"
    assert (found - wanted).abs().max() <= (1e-5 if exact else 5e-2) * wanted.abs().max()
    assert wanted.abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["sft", "preference", "reward_model"])
def test_a_merged_product_is_in_no_key_and_adapters_alone_are(folder, kind):
    merged, alone = (
        read_job(job(folder, kind, save, name="key") / "job.json").config for save in ("merged", "adapter")
    )
    assert "lora_save" not in result_config(merged)["optimizer"]
    assert result_config(alone)["optimizer"] == {**result_config(merged)["optimizer"], "lora_save": "adapter"}


def test_a_stage_that_leaves_adapters_alone_is_killed_and_ends_on_the_same_bytes(folder):
    whole, killed = (job(folder, "sft", "adapter", name=name, precision="fp32") for name in ("whole", "killed"))
    stages.finish(whole)
    codes = [forks.interrupt(killed, after_step=after, with_signal=signal.SIGKILL) for after in (1, 3)]
    assert [-signal.SIGKILL] in codes
    stages.finish(killed)
    assert all_files(killed / "output") == all_files(whole / "output")


def test_a_stage_over_a_base_in_four_bits_learns_on_one_and_two_ranks_and_killed_ends_on_the_same_bytes(folder):
    def four_bits(name, **changes):
        config = stages.sft(folder, patience=0, sample_prompts=[], max_steps=8, checkpoint_every=2, precision="fp32")
        config |= {"optimizer": {**LORA, "lora_base": "nf4"}, **changes}
        return stages.make_job(folder / f"four-{name}", config, {"model": folder / "model"})

    two_ranks = {"zero_stage": 2, "resources": {**stages.RESOURCES, "num_ranks": 2}}
    whole, killed, two = four_bits("whole"), four_bits("killed"), four_bits("two", **two_ranks)
    stages.finish(whole)
    forks.interrupt(killed, after_step=5, with_signal=signal.SIGKILL)
    stages.finish(killed)
    assert stages.content(killed / "output") == stages.content(whole / "output")
    losses = [line["loss"] for line in stages.metrics(whole) if line["event"] == "step"]
    assert losses[-1] < losses[0]
    stages.finish(two, num_ranks=2)
    of_two = [line["loss"] for line in stages.metrics(two) if line["event"] == "step"]
    assert of_two[-1] < of_two[0]


@pytest.mark.parametrize("changes", [{"zero_stage": 3}, {"optimizer": {"lora_save": "adapter"}}])
def test_a_base_in_four_bits_is_refused_where_it_would_be_shared_out_or_replaced_by_the_whole_one(folder, changes):
    config = stages.sft(folder, **changes) | {"optimizer": {**LORA, "lora_base": "nf4", **changes.get("optimizer", {})}}
    with pytest.raises(ValueError, match="lora_base nf4 with zero_stage"):
        read_stage(config)
