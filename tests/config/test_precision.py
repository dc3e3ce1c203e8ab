"""`precision: auto`: what a machine's processor and GPUs decide."""

import pytest

from nanodag.config import resolve
from nanodag.host import processor
from nanodag.host.folders import PROJECT
from nanodag.host.machine import detect, machine_of

FLAGS = {
    "other": {"sse4_2"},
    "avx2": {"avx2"},
    "avx512": {"avx2", "avx512f"},
    "avx512_bf16": {"avx2", "avx512f", "avx512_bf16"},
    "amx": {"avx2", "avx512f", "avx512_bf16", "amx_bf16"},
}


@pytest.fixture(autouse=True)
def no_limits(monkeypatch):
    for name in processor.ISA_LIMITS:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("instructions", "expected"), [("avx2", "fp32"), ("avx512", "fp32"), ("avx512_bf16", "bf16"), ("amx", "bf16")]
)
def test_auto_precision_is_what_the_processor_multiplies_fast(instructions, expected):
    resolved = resolve(PROJECT / "pipeline.yaml", "pocket", machine=machine_of(f"cpu:2:{instructions}:8GiB"))
    assert resolved.pipeline.stages["pretrain"].precision == expected
    assert resolved.pipeline.stages["sft"].precision == expected
    assert resolved.origins["pretrain.precision"].startswith(f"derived: cpu:2:{instructions}:8GiB: bf16 where")


@pytest.mark.parametrize(
    ("preset", "machine", "trainer", "evaluation"),
    [
        ("pocket", "cpu:2:avx512_bf16:8GiB", "fp32", "fp32"),  # width 192
        ("small", "cpu:2:avx512_bf16:8GiB", "bf16", "fp32"),  # width 256
        ("small", "cpu:2:avx2:8GiB", "fp32", "fp32"),
        ("pocket", "1x24GB", "bf16", "bf16"),
        ("small", "1x24GB", "bf16", "bf16"),
        ("pocket", "1xT4", "fp32", "fp32"),
    ],
)
def test_rl_and_evaluation_take_bf16_on_gpus_and_on_a_cpu_only_rl_of_a_wide_model(preset, machine, trainer, evaluation):
    stages = resolve(PROJECT / "pipeline.yaml", preset, machine=machine_of(machine)).pipeline.stages
    assert stages["rl"].optimizer.precision == stages["rl"].sampler.precision == trainer
    assert {stages[name].precision for name in ("eval_base", "eval_rl")} == {evaluation}


def test_a_precision_that_is_given_is_kept():
    given = ["rl.optimizer.precision=bf16", "eval_rl.precision=bf16"]
    stages = resolve(PROJECT / "pipeline.yaml", "pocket", given, machine=machine_of("cpu:2:avx2:8GiB")).pipeline.stages
    assert stages["rl"].optimizer.precision == stages["eval_rl"].precision == "bf16"


@pytest.mark.parametrize("name", FLAGS)
def test_the_instruction_set_is_the_widest_that_the_processor_has(name, monkeypatch):
    monkeypatch.setattr(processor, "processor_flags", lambda: frozenset(FLAGS[name]))
    assert detect().instruction_set == name


@pytest.mark.parametrize(("limit", "expected"), [("AVX2", "avx2"), ("avx512_core_bf16", "avx512_bf16"), ("ALL", "amx")])
def test_a_processor_told_to_work_as_another_counts_as_that_one(limit, expected, monkeypatch):
    monkeypatch.setattr(processor, "processor_flags", lambda: frozenset(FLAGS["amx"]))
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    assert detect().instruction_set == expected


@pytest.mark.parametrize(("gpu", "is_fast"), [("8xH100", True), ("1xA100", True), ("1x24GB", True), ("1xT4", False)])
def test_gpus_take_bf16_from_ampere_on(gpu, is_fast):
    assert machine_of(gpu).multiplies_bf16_fast("cuda") == is_fast


def test_every_stage_of_every_preset_has_a_precision_when_it_begins():
    machine = machine_of("cpu:2:avx2:8GiB")
    for preset in ("small", "speedrun", "gsm8k-rl"):
        for name, stage in resolve(PROJECT / "pipeline.yaml", preset, machine=machine).pipeline.stages.items():
            for section in (stage, getattr(stage, "sampler", None)):
                assert getattr(section, "precision", "fp32") == "fp32", name
