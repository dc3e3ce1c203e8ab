"""One description of a machine: of this one, and of others by a text."""

import pytest

from nanodag.errors import ConfigError
from nanodag.host import machine as host
from nanodag.host import processor
from nanodag.host.machine import GIB, detect, machine_of

MACHINES = (
    *("8xH100", "1xH200", "1x24GB", "2x8xH100", "cpu:2:avx2:16GiB", "cpu:8:amx:64GiB", "4xA100-40GB", "1xH100_PCIe"),
    *("1xH100:16:avx512_bf16:128GiB", "4xcpu:2:avx512:7.75GiB", "1xGB10@119.5GiB@12.1:20:other:119.5GiB"),
    *("8xH100:64:avx512_bf16:768GiB+sglang", "8xH100:224:amx:503.25GiB", "1xH100:64:amx:10240GiB"),
    *("8x96GB:500", "1x24GB:16:avx2:64GiB", "2x8x96GB:500:64:avx512:512GiB+sglang", "72xGB200", "8xH20", "1x5090"),
)


@pytest.mark.parametrize("text", MACHINES)
def test_a_machine_is_told_from_its_text_and_the_text_from_it(text):
    machine = machine_of(text)
    assert machine_of(str(machine)) == machine
    assert str(machine).startswith(text)


def test_the_text_says_what_counts():
    machine = machine_of("2x8xH100")
    assert (machine.nodes, machine.num_gpus, machine.device, machine.gpu.capability) == (2, 8, "cuda", 9.0)
    assert 79 * GIB <= machine.gpu.memory < 80 * GIB
    machine = machine_of("cpu:2:avx2:16GiB")
    assert (machine.cores, machine.memory, machine.device, machine.num_gpus) == (2, 16 * GIB, "cpu", 0)
    assert 22 * GIB < machine_of("1x24GB").gpu.memory < 24 * GIB


@pytest.mark.parametrize(("text", "why"), [
    ("", "is of neither form"), ("cpu", "is of neither form"), ("cpu:2", "names 1 things of the host"),
    ("8xH9", "names the GPU 'H9'; known are GB200"), ("0x8xH100", "has none of something"),
    ("cpu:a:avx2:1GiB", "has 'a' cores"),
    ("cpu:2:sse:1GiB", "instruction set 'sse', and there are amx, avx512_bf16"),
    ("cpu:2:avx2:lots", "has 'lots' memory"),
    (f"cpu:2:avx2:{'9' * 5000}GiB", "memory, and not some GiB"),
    (f"cpu:{'9' * 5000}:avx2:8GiB", "cores"), (f"1x{'9' * 5000}GB", "names the GPU"),
    ("1xFoo@1.2.3GiB@9.0", "names the GPU"), ("1xV100", "describe it by memory and TFLOPS, as 96GB:500"),
    ("1x24GB:0", "names the GPU"), ("1x24GB:5:6", "names 2 things of the host"),
])  # fmt: skip
def test_a_wrong_text_is_refused_with_the_part_that_is_wrong(text, why):
    with pytest.raises(ConfigError, match=why):
        machine_of(text)


def test_a_gpu_that_is_described_has_its_memory_its_flops_and_the_bandwidth_that_goes_with_them():
    gpu, smaller = (machine_of(text).gpu for text in ("8x96GB:500", "1x24GB:16:avx2:64GiB"))
    assert 92 * GIB < gpu.memory < 96 * GIB and (gpu.peak, gpu.bandwidth) == (500e12, pytest.approx(1700e9))
    assert (smaller.peak, machine_of("1x24GB:16:avx2:64GiB").cores) == (71e12, 16)


@pytest.mark.parametrize(("name", "gib", "capability", "found"), [
    ("NVIDIA GB200", 185, 10.0, "GB200"), ("NVIDIA B200", 179, 10.0, "B200"), ("NVIDIA H20", 95.6, 9.0, "H20"),
    ("NVIDIA H200", 140.4, 9.0, "H200"), ("NVIDIA L4", 22.5, 8.9, "L4"), ("NVIDIA L40", 45, 8.9, "L40"),
    ("NVIDIA L40S", 45, 8.9, "L40S"), ("NVIDIA RTX A6000", 48, 8.6, "A6000"), ("NVIDIA A10", 22.5, 8.6, "A10"),
    ("NVIDIA GeForce RTX 5090", 31.8, 12.0, "5090"), ("NVIDIA GeForce RTX 5090 Laptop GPU", 23.9, 12.0, ""),
    ("Tesla V100-SXM2-16GB", 16, 7.0, ""), ("NVIDIA H20-3e", 141, 9.0, ""),
])  # fmt: skip
def test_cudas_name_and_memory_say_which_gpu_it_is_and_others_are_described(name, gib, capability, found):
    gpu = host.gpu_of_cuda(name, int(gib * GIB), capability)
    assert (gpu.name if gpu.peak else "", gpu.capability) == (found, capability)
    machine = host.Machine(cores=8, instruction_set="avx2", memory=64 * GIB, gpu=gpu, num_gpus=1)
    assert machine_of(str(machine)) == machine


SMI = (
    "0, GPU-aaa, NVIDIA H100 80GB HBM3, 81559, 9.0, 580.65.06\n"
    "1, GPU-bbb, NVIDIA GeForce RTX 3090, 24576, 8.6, 580.65.06\n"
)


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    script = tmp_path / "nvidia-smi"
    script.write_text(f"#!/bin/sh\nprintf '{SMI}'\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    host._listed_gpus.cache_clear()
    yield
    host._listed_gpus.cache_clear()


@pytest.mark.parametrize(
    ("visible", "expected"), [(None, ("3090", 2)), ("0", ("H100", 1)), ("GPU-bb", ("3090", 1)), ("", (None, 0))]
)
def test_gpus_count_as_the_weakest_that_cuda_may_use(visible, expected, nvidia_smi, monkeypatch):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    machine = detect()
    assert (machine.gpu and machine.gpu.name, machine.num_gpus) == expected
    assert host.visible_gpus() == (["0", "1"] if visible is None else [visible] if visible else [])


@pytest.mark.parametrize(("quota", "cores"), [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1), ("", 8)])
def test_a_control_group_with_a_quota_has_fewer_cores(quota, cores, tmp_path, monkeypatch):
    (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(processor, "control_group_files", lambda name: [tmp_path / name])
    monkeypatch.setattr(processor.os, "sched_getaffinity", lambda pid: set(range(8)))
    assert processor.usable_cores() == cores


def test_a_control_group_with_a_limit_has_less_memory_and_its_text_says_so(tmp_path, monkeypatch):
    (tmp_path / "memory.max").write_text(str(13 * GIB // 4))
    monkeypatch.setattr(host, "control_group_files", lambda name: [tmp_path / name])
    assert detect().memory == machine_of(str(detect())).memory == 13 * GIB // 4


def test_an_nvidia_smi_that_fails_is_no_gpu_and_said(nvidia_smi, tmp_path, caplog):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho no driver; exit 9\n")
    host._listed_gpus.cache_clear()
    assert detect().num_gpus == 0
    assert "counts as one without: no driver" in caplog.text


FLAGS = {
    "other": {"sse4_2"}, "avx2": {"avx2"}, "avx512": {"avx2", "avx512f"},
    "avx512_bf16": {"avx2", "avx512f", "avx512_bf16"}, "amx": {"avx2", "avx512f", "avx512_bf16", "amx_bf16"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "limit", "expected"),
    [*((name, "", name) for name in FLAGS), ("amx", "AVX2", "avx2"), ("amx", "avx512_core_bf16", "avx512_bf16"),
     ("amx", "ALL", "amx")],
)  # fmt: skip
def test_the_instruction_set_is_the_widest_that_is_there_or_allowed(flags, limit, expected, monkeypatch):
    for name in processor.ISA_LIMITS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(processor, "processor_facts", lambda: {"flags": " ".join(FLAGS[flags])})
    if limit:
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    assert detect().instruction_set == expected
