"""Where samplers of RL lie: what `auto` takes on described machines, GPUs of their own, and what a plan says."""

import pytest

from nanodag.config import resolve
from nanodag.errors import ConfigError
from nanodag.host.folders import PROJECT
from nanodag.host.machine import machine_of
from nanodag.plan.make import plan_of
from nanodag.plan.stage_plan import Process, StagePlan

SHIPPED = PROJECT / "pipeline.yaml"
SEPARATE = "rl.placement=separate"


def resolved(machine, *overrides, preset="gsm8k-rl"):
    return resolve(SHIPPED, preset, overrides, machine=machine_of(machine))


def stage_on(machine, *overrides, preset="gsm8k-rl"):
    return resolved(machine, *overrides, preset=preset).pipeline.stages["rl"]


@pytest.mark.parametrize(
    ("preset", "machine", "overrides", "placement", "offload"),
    [
        ("gsm8k-rl", "8xH100+sglang", [], "beside", "none"),
        ("gsm8k-rl", "1xH200+sglang", [], "beside", "none"),
        ("gsm8k-rl", "1x24GB+sglang", [], "beside", "cpu"),
        ("speedrun", "8xH100", [], "beside", "none"),
        ("pocket", "cpu:2:avx2:8GiB", [], "beside", "none"),
        # Weights, gradients and AdamW's states are 12 GiB: over half of 0.6 of 31, not of 0.9.
        ("gsm8k-rl", "1xL40S+sglang", [], "shared", "none"),
        ("gsm8k-rl", "1xA100-40GB", [], "shared", "none"),
        ("gsm8k-rl", "1xL40S+sglang", ["rl.max_staleness=1"], "beside", "cpu"),
        ("gsm8k-rl", "1xL40S+sglang", ["rl.placement=beside"], "beside", "cpu"),
        ("gsm8k-rl", "1xL40S+sglang", ["rl.rollout.source=file:/r", "rl.evaluation.validation=[]"], "beside", "none"),
        ("gsm8k-rl", "1xL40S+sglang", ["rl.lends_states=false"], "beside", "cpu"),
        ("gsm8k-rl", "4xL40S+sglang", [], "beside", "none"),
        ("gsm8k-rl", "1xH100+sglang", ["base.model=hub:Qwen/Qwen2.5-7B"], "beside", "cpu"),
        ("gsm8k-rl", "1xH100", ["base.model=file:/m"], "beside", "none"),
    ],
)
def test_samplers_are_beside_the_trainer_unless_turns_keep_the_optimizer_on_the_gpu(
    preset, machine, overrides, placement, offload
):
    stage = stage_on(machine, *overrides, preset=preset)
    assert (stage.placement, stage.resources.offload_optimizer) == (placement, offload)
    assert stage.lends_states == (placement == "shared") and stage.sampler.gpus == ()
    fractions = {"beside": 0.4, "shared": 0.8} if stage.resources.device == "cuda" else {"beside": 0.25}
    assert stage.sampler.memory_fraction == fractions[placement]


@pytest.mark.parametrize(
    ("overrides", "ranks", "gpus", "replicas"),
    [
        ([], 4, (4, 5, 6, 7), 4),
        (["rl.sampler.gpus=2"], 6, (6, 7), 2),
        (["rl.sampler.gpus=4", "rl.sampler.tensor_parallel=2"], 4, (4, 5, 6, 7), 2),
        (["rl.sampler.gpus=[0,3]"], 6, (0, 3), 2),
        (["rl.sampler.gpus=2", "rl.num_ranks=1"], 1, (6, 7), 2),
        (["rl.sampler.gpus=7", "rl.num_ranks=1"], 1, (1, 2, 3, 4, 5, 6, 7), 7),
    ],
)
def test_gpus_of_samplers_are_not_the_trainers_and_replicas_follow_from_them(overrides, ranks, gpus, replicas):
    stage = stage_on("8xH100+sglang", SEPARATE, *overrides)
    found = (stage.resources.num_ranks, stage.sampler.gpus, stage.sampler.replicas, stage.sampler.memory_fraction)
    assert found == (ranks, gpus, replicas, 0.9) and stage.num_gpus(8) == 8


def test_samplers_of_other_nodes_have_all_of_their_gpus(tmp_path):
    given = [SEPARATE, "rl.sampler.nodes=2", "rl.nodes=1", "rl.sampler.tensor_parallel=2"]
    with pytest.raises(ConfigError, match=r"sampler\.nodes 2 needs cluster\.hostfile"):
        stage_on("3x8xH100+sglang", *given)
    (tmp_path / "pipeline.yaml").write_text("cluster: {hostfile: /hosts}\n" + SHIPPED.read_text())
    found = resolve(tmp_path / "pipeline.yaml", "gsm8k-rl", given, machine=machine_of("3x8xH100+sglang"))
    stage = found.pipeline.stages["rl"]
    assert (stage.resources.num_ranks, stage.sampler.replicas, stage.sampler.gpus) == (8, 8, ())
    assert stage.num_gpus(8) == 8


@pytest.mark.parametrize("gpus", ["8", "[0,8]", "[1,1]", "[]", "[0,1,2,3,4,5,6,7]"])
def test_gpus_that_are_not_there_or_leave_the_trainer_none_are_refused(gpus):
    with pytest.raises(ConfigError, match=r"sampler\.gpus"):
        stage_on("8xH100", SEPARATE, f"rl.sampler.gpus={gpus}")


@pytest.mark.parametrize("placement", ["beside", "shared", "separate"])
@pytest.mark.parametrize("machine", ["8xH100+sglang", "8xH100", "2x24GB+sglang"])
def test_a_preset_fits_its_machines_in_every_placement(machine, placement):
    found = resolved(machine, f"rl.placement={placement}")
    (plan,) = plan_of(found.pipeline, found.machine, stages=["rl"]).stages
    trainer, sampler = plan.processes[:2]
    resting = (trainer.resting or 0, sampler.resting or 0)
    together = {
        "beside": trainer.on_device + sampler.on_device,
        "shared": max(trainer.on_device + resting[1], sampler.on_device + resting[0]),
        "separate": max(trainer.on_device, sampler.on_device),
    }[placement]
    assert not plan.faults and plan.device_bytes == together and bool(sum(resting)) == (placement == "shared")
    if placement == "shared":
        assert trainer.host["lent"] > trainer.device["optimizer"] * (machine[0] == "8") and sampler.resting < 12 << 30


def test_a_gpu_in_turns_is_as_full_as_in_its_fullest_turn():
    trainer = Process(name="trainer", count=4, device={"all": 60}, gpus=1, resting=5)
    sampler = Process(name="sampler", count=2, device={"all": 50}, gpus=2, resting=7)
    beside = Process(name="other", count=4, device={"all": 1}, gpus=1)
    plan = {"name": "rl", "kind": "rl", "device": "cuda", "num_gpus": 4}
    assert StagePlan(**plan, processes=(trainer, sampler, beside)).device_bytes == 60 + 7 + 1
    own = Process(name="sampler", count=2, device={"all": 90}, gpus=2, own_gpus=2)
    alone = Process(name="trainer", count=2, device={"all": 60}, gpus=1, own_gpus=2)
    assert StagePlan(**plan, processes=(alone, own)).device_bytes == 180
