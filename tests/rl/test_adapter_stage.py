"""An RL stage that leaves adapters alone: product and kept weights are merged to what the same stage leaves merged."""

from nanodag.model.adapter_folder import merge_onto
from tests.rl import stages
from tests.rl.models import all_files


def test_the_product_and_kept_weights_are_merged_to_the_bytes_of_a_stage_that_leaves_them_merged(tmp_path, capsys):
    common = {"num_steps": 2, "lora_rank": 2, "lora_alpha": 8, "keep_weights_every": 1, "keep": "best:eval_reward"}
    jobs = [stages.make_job(tmp_path / save, lora_save=save, **common) for save in ("merged", "adapter")]
    for job in jobs:
        stages.run(job)
    merged, alone = jobs
    kept = sorted((alone.records / "weights").iterdir())
    assert len(kept) == 2
    pairs = [(merged.output, alone.output), *((merged.records / "weights" / one.name, one) for one in kept)]
    for number, (whole, adapter) in enumerate(pairs):
        assert not (adapter / "model.safetensors").exists()
        merge_onto(alone.inputs["model"], adapter, tmp_path / f"made-{number}")
        wanted = {name: data for name, data in all_files(whole).items() if name.parts[0] != "adapter"}
        assert all_files(tmp_path / f"made-{number}") == wanted and not capsys.readouterr().out
