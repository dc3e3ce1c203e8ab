"""`precision: auto`: what a machine's processor and GPUs decide."""

import pytest

from nanodag.config import resolve
from nanodag.host import processor as host
from nanodag.host.folders import PROJECT

FLAGS = {"avx2": {"avx2"}, "avx512": {"avx512f"}, "avx512_bf16": {"avx512f", "avx512_bf16"}, "amx": {"amx_bf16"}}


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """Gives this machine another processor and other GPUs."""
    for name in host.ISA_LIMITS:
        monkeypatch.delenv(name, raising=False)

    def describe(flags=(), capabilities=()):
        monkeypatch.setattr(host, "processor_flags", lambda: frozenset(flags))
        monkeypatch.setattr(host, "gpu_capabilities", lambda: tuple(capabilities))

    return describe


@pytest.mark.parametrize(
    ("processor", "expected"), [("avx2", "fp32"), ("avx512", "fp32"), ("avx512_bf16", "bf16"), ("amx", "bf16")]
)
def test_auto_precision_is_what_the_processor_multiplies_fast(processor, expected, machine):
    machine(FLAGS[processor])
    resolved = resolve(PROJECT / "pipeline.yaml", "pocket", ["pretrain.resources.device=cpu"])
    assert resolved.pipeline.stages["pretrain"].precision == expected
    assert resolved.pipeline.stages["sft"].precision == expected
    assert resolved.origins["pretrain.precision"].startswith("derived: this machine's cpu multiplies bf16")
    assert resolved.pipeline.stages["rl"].optimizer.precision == "fp32", "what a preset says is kept"


def test_a_processor_told_to_work_as_one_without_bf16_counts_as_one(machine, monkeypatch):
    machine(FLAGS["amx"])
    assert host.multiplies_bf16_fast("cpu")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert not host.multiplies_bf16_fast("cpu")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "avx512_core_bf16")
    assert host.multiplies_bf16_fast("cpu")


@pytest.mark.parametrize(("capabilities", "is_fast"), [((9.0, 9.0), True), ((8.0,), True), ((9.0, 7.5), False)])
def test_gpus_take_bf16_from_ampere_on(capabilities, is_fast, machine):
    machine(capabilities=capabilities)
    assert host.multiplies_bf16_fast("cuda") == is_fast


def test_every_stage_of_every_preset_has_a_precision_when_it_begins(machine):
    machine(FLAGS["avx2"])
    for preset in ("small", "speedrun", "gsm8k-rl"):
        for name, stage in resolve(PROJECT / "pipeline.yaml", preset).pipeline.stages.items():
            for section in (stage, getattr(stage, "sampler", None)):
                assert getattr(section, "precision", "fp32") == "fp32", name
