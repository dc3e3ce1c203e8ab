"""Every shipped preset fits the machines that it is made for, and what does not fit is said."""

import pytest
import yaml

from nanodag.config import resolve
from nanodag.host.folders import PROJECT
from nanodag.host.machine import machine_of
from nanodag.plan.make import plan_of

FILE = PROJECT / "pipeline.yaml"
MADE_FOR = {
    "pocket": ("cpu:2:avx2:8GiB", "1x24GB", "1xH200"),
    "best-of-n": ("cpu:2:avx2:8GiB", "1x24GB", "1xH200"),
    "small": ("cpu:2:avx2:8GiB", "1x24GB", "1xH200"),
    "single-gpu": ("1x24GB", "1xH200"),
    "speedrun": ("8xH100",),
    "gsm8k-rl": ("1x24GB", "1xH200", "8xH100"),
}
PAIRS = [(preset, machine) for preset, machines in MADE_FOR.items() for machine in machines]


def planned(preset, machine, *overrides):
    machine = machine_of(machine)
    return plan_of(resolve(FILE, preset, overrides, machine=machine).pipeline, machine)


@pytest.mark.parametrize("preset, machine", PAIRS)
def test_a_preset_fits_the_machines_that_it_is_made_for(preset, machine):
    plan = planned(preset, machine)
    assert plan.faults == []
    # How many answers are good enough for `sft_best` to train on, nobody knows beforehand.
    assert {stage.name for stage in plan.stages if stage.seconds is None} <= {"sft_best"}
    assert all(stage.processes for stage in plan.stages)


def test_every_preset_is_made_for_a_machine():
    assert set(yaml.safe_load(FILE.read_text())["presets"]) == set(MADE_FOR)


@pytest.mark.parametrize(
    ("preset", "machine", "named"),
    [("speedrun", "cpu:2:avx2:8GiB", "pretrain.micro_batch_tokens"), ("gsm8k-rl", "1x8GB", "rl.")],
)
def test_what_is_too_small_for_a_preset_is_said(preset, machine, named):
    assert any(fault.startswith(named) for fault in planned(preset, machine).faults)


@pytest.mark.parametrize(
    ("model", "machine"),
    [("Qwen/Qwen3-8B", "8xH100"), ("Qwen/Qwen2.5-3B", "1x24GB"), ("Qwen/Qwen2.5-0.5B-Instruct", "1xT4")],
)
def test_what_auto_gives_the_evaluation_of_an_imported_model_fits(model, machine):
    found = resolve(FILE, "gsm8k-rl", [f"base.model=hub:{model}"], machine=machine_of(machine))
    (plan,) = plan_of(found.pipeline, found.machine, stages=["eval_base"]).stages
    assert not plan.faults and plan.at_once > 64
