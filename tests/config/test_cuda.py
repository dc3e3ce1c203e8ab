"""torch, driver, NCCL and SGLang of a machine with GPUs: what does not go together is said before the first stage, and
the lists of packages name one torch."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tomllib

import pytest
import torch
from packaging.requirements import Requirement

from nanodag.config import resolve
from nanodag.errors import ConfigError
from nanodag.host.cuda import TorchBuild, gpu_faults, torch_build, version_fault
from nanodag.host.folders import PROJECT
from nanodag.host.machine import GIB, Gpu, ListedGpu, machine_of
from nanodag.inference.engine_install import engine_environment, why_not_on
from nanodag.run import preflight
from tests.guest_pythons import sglang_python


def listed(index: str = "0", *, name: str = "H100", capability: float = 9.0, driver: str = "580.65.06") -> ListedGpu:
    return ListedGpu(index, "GPU-a", Gpu(name=name, memory=79 * GIB, capability=capability), driver)


FOR_13 = TorchBuild(version="2.14.1", cuda="13.0", nccl="2.30.7")


@pytest.mark.parametrize(
    ("gpus", "build", "expected"),
    [
        ([listed()], FOR_13, []),
        ([listed(), listed("1", driver="570.124.06")], FOR_13, ["GPU 1 (H100) has the driver 570.124.06"]),
        ([listed(driver="550.54.15")], TorchBuild(version="2.9.0", cuda="12.8"), []),
        ([listed(name="V100", capability=7.0)], FOR_13, ["GPU 0 (V100) has compute capability 7.0, and CUDA 13.0"]),
        ([listed(driver="550"), listed("1", capability=7.0)], FOR_13, ["the driver 550", "capability 7.0"]),
        ([listed()], TorchBuild(version="2.13.0+cpu"), ["torch 2.13.0+cpu of /x is built for a CPU"]),
        ([listed(driver="[N/A]")], FOR_13, []),
        ([listed(driver="1")], TorchBuild(version="9.0", cuda="99.0"), []),
    ],
)
def test_what_torch_cannot_use_of_a_gpu_is_named(gpus, build, expected):
    faults = gpu_faults(gpus, build, "/x")
    assert len(faults) == len(expected) and all(part in fault for part, fault in zip(expected, faults))


@pytest.mark.parametrize(
    ("theirs", "fits"),
    [
        (FOR_13, True),
        (TorchBuild(version="2.14.1+cu130", cuda="13.0", nccl="2.30.7"), True),
        (TorchBuild(version="2.14.1", cuda="13.0"), True),
        (TorchBuild(version="2.13.0", cuda="13.0", nccl="2.30.7"), False),
        (TorchBuild(version="2.14.1", cuda="13.0", nccl="2.29.7"), False),
    ],
)
def test_two_environments_share_gpus_with_one_torch_and_one_nccl_only(theirs, fits):
    fault = version_fault(FOR_13, theirs, "weights.sync=ipc", "SGLang")
    assert (fault == "") is fits
    assert fits or ("torch 2.14.1 with NCCL 2.30.7" in fault and str(theirs) in fault and "sync=disk" in fault)


def test_a_build_of_torch_is_read_off_its_packages_as_torch_itself_says_it():
    build = torch_build(sys.executable)
    assert build is not None
    assert (build.version, build.cuda) == (importlib.metadata.version("torch"), torch.version.cuda or "")
    assert torch_build("/no/such/python") is None


@pytest.mark.parametrize(
    ("gpus", "glibc", "reason"),
    [
        ([listed()], "2.36", ""),
        ([], "2.36", "there is no NVIDIA GPU here"),
        ([listed(), listed("1", capability=7.5)], "2.36", "compute capability 7.5, and SGLang needs 8.0"),
        ([listed()], "2.31", "glibc is 2.31, and SGLang's wheel needs 2.34"),
        ([listed()], "0.0", "glibc is 0.0"),
        ([listed(driver="550.54")], "2.36", "driver 550.54, and torch 2.14.1 is built for CUDA 13.0, which needs 580"),
    ],
)
def test_sglang_is_not_for_every_machine_with_a_gpu(gpus, glibc, reason):
    found = why_not_on(gpus, glibc)
    assert reason in found and bool(reason) == bool(found)


def stages_on_gpus(*overrides: str):
    machine = machine_of("2xH100:16:avx512_bf16:128GiB+sglang")
    return resolve(PROJECT / "pipeline.yaml", "gsm8k-rl", overrides, machine=machine).pipeline.stages


@pytest.fixture
def builds(monkeypatch):
    """This machine has two GPUs, a trainer's torch for them, and an older one in SGLang's environment."""
    builds = {sys.executable: FOR_13, "/sglang": TorchBuild(version="2.13.0", cuda="13.0", nccl="2.29.7")}
    monkeypatch.setattr(preflight, "usable_gpus", lambda: (listed(), listed("1")))
    monkeypatch.setattr(preflight, "torch_build", builds.get)
    monkeypatch.setattr(preflight, "find_python", lambda configured, device, guest: "/sglang")
    return builds


def test_a_driver_that_is_too_old_is_refused_before_the_first_stage(builds, monkeypatch):
    stages = stages_on_gpus("rl.sync=disk")
    preflight.check_cuda(stages)
    monkeypatch.setattr(preflight, "usable_gpus", lambda: (listed(driver="550.54.15"),))
    with pytest.raises(ConfigError, match=r"resources\.device=cuda: GPU 0 .*driver 550.54.15.*580 or newer"):
        preflight.check_cuda(stages)
    monkeypatch.setattr(preflight, "usable_gpus", lambda: ())  # the head of a cluster: its nodes are not known here
    preflight.check_cuda(stages)


def test_another_torch_of_sglang_is_refused_before_the_first_stage_where_weights_go_from_gpu_to_gpu(builds):
    by_nccl = stages_on_gpus("rl.placement=separate", "rl.sync=distributed", "rl.sync_backend=nccl")
    for way, stages in (("distributed", by_nccl), ("ipc", stages_on_gpus())):
        with pytest.raises(ConfigError, match=rf"rl\.weights\.sync={way} needs one torch.*NCCL 2.30.7.*NCCL 2.29.7"):
            preflight.check_cuda(stages)
    preflight.check_cuda(stages_on_gpus("rl.sync=disk"))  # through a folder, any two will do
    builds["/sglang"] = FOR_13
    preflight.check_cuda(by_nccl)


def test_lists_of_packages_name_one_torch_and_one_nccl():
    on_cuda, on_cpu = pins_of(PROJECT / "constraints-cuda.txt"), pins_of(PROJECT / "constraints.txt")
    for_cuda, for_cpu = (pins_of(engine_environment(device).listed) for device in ("cuda", "cpu"))
    assert on_cuda.items() <= for_cuda.items() and "nvidia-nccl-cu13" in on_cuda
    assert on_cuda.keys() & on_cpu.keys() == {"torch"}, "pip refuses two pins of a package"
    assert for_cpu.keys() < for_cuda.keys()
    assert {name for name in for_cpu if for_cpu[name] != for_cuda[name]} == {"torch", "torchvision", "triton"}
    assert for_cpu["torch"] == on_cpu["torch"], "one torch on a CPU, too"
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    allowed = next(Requirement(text) for text in project["dependencies"] if text.startswith("torch"))
    assert all(allowed.specifier.contains(pins["torch"]) for pins in (on_cuda, on_cpu))


def pins_of(path) -> dict[str, str]:
    lines = [line.partition("==") for line in path.read_text().splitlines() if line and line[0] != "#"]
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, _, version in lines}


@pytest.mark.slow
def test_the_list_for_cuda_is_what_sglang_asks_for():
    code = "import importlib.metadata as m, json; print(json.dumps([m.version('sglang'), m.requires('sglang')]))"
    done = subprocess.run([str(sglang_python()), "-c", code], capture_output=True, text=True, check=True)
    version, texts = json.loads(done.stdout)
    pins = pins_of(engine_environment("cuda").listed)
    assert pins["sglang"] == version
    machine = {"sys_platform": "linux", "platform_machine": "x86_64", "extra": ""}
    asked = [one for one in map(Requirement, texts) if one.marker is None or one.marker.evaluate(machine)]
    assert len(asked) > 50
    unmet = [str(one) for one in asked if not one.specifier.contains(pins[re.sub(r"[-_.]+", "-", one.name).lower()])]
    assert unmet == []


FAKE = """#!/bin/sh
case "$1 $2" in
  "-m venv") mkdir -p "$3/bin"; for name in python nanodag; do cp "$0" "$3/bin/$name"; done ;;
  "sampler install") [ ! -e "$HOME/no-network" ] || exit 1 ;;
esac
echo "$(basename "$0") $*" >> "$HOME/calls"
"""


@pytest.fixture
def gpu_machine(tmp_path):
    """A fresh machine whose nvidia-smi is there, with a Python that notes what it is called with."""
    for name in ("speedrun.sh", "pyproject.toml", "constraints.txt", "constraints-cuda.txt"):
        (tmp_path / name).write_bytes((PROJECT / name).read_bytes())
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("python3.11", "nvidia-smi", "g++"):
        (tools / name).write_text(FAKE)
        (tools / name).chmod(0o755)
    return tmp_path


def speedrun(folder, **variables: str) -> tuple[int, str]:
    environment = {"PATH": f"{folder / 'tools'}:{os.environ['PATH']}", "HOME": str(folder), **variables}
    command = ["bash", str(folder / "speedrun.sh"), "status"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


def test_speedrun_on_a_gpu_machine_installs_sglangs_torch_and_sglang_and_goes_on_after_a_failure(gpu_machine):
    (gpu_machine / "no-network").touch()
    code, said = speedrun(gpu_machine)
    assert code == 1 and "call again to go on, or with NANODAG_SGLANG=no" in said
    torches = [line for line in (gpu_machine / ".venv/constraints.txt").read_text().splitlines() if "torch=" in line]
    assert torches == ["torch==2.14.1"]
    (gpu_machine / "no-network").unlink()
    assert speedrun(gpu_machine)[0] == 0
    assert speedrun(gpu_machine)[0] == 0
    calls = (gpu_machine / "calls").read_text().splitlines()
    assert calls[-3:] == ["nanodag sampler install --if-supported", "nanodag status", "nanodag status"]


def test_speedrun_leaves_sglang_out_where_that_is_asked_for(gpu_machine):
    assert speedrun(gpu_machine, NANODAG_SGLANG="no")[0] == 0
    assert "sampler" not in (gpu_machine / "calls").read_text()
