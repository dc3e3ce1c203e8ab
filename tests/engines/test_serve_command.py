"""`nanodag sampler serve`: the command that it becomes, for either engine."""

import os
import sys
from importlib import import_module
from pathlib import Path

import pytest

from nanodag.engines import start
from nanodag.engines.start import foreground_command
from nanodag.errors import ConfigError
from nanodag.inference.engine_settings import EngineSettings

MODEL = Path("/model")
serve_module = import_module("nanodag.cli.serve")  # the package has a command of that name


@pytest.fixture
def served(monkeypatch):
    """served(options of the command) -> the description of the server."""

    class Described(Exception):
        pass

    def describe(settings):
        raise Described(settings)

    monkeypatch.setattr(serve_module, "found_model", lambda *named: serve_module.FoundModel("model", MODEL, {}))
    monkeypatch.setattr("nanodag.model.architecture.check_sglang", lambda folder, context, setting: None)
    monkeypatch.setattr(start, "foreground_command", describe)

    def call(**options):
        with pytest.raises(Described) as caught:
            serve_module.serve_sampler(str(MODEL), **({"engine": "embedded", "dtype": "float32"} | options))
        return caught.value.args[0]

    return call


def test_an_embedded_server_gets_its_description_as_json_and_its_key_unseen(served, tmp_path):
    (tmp_path / "key").write_text("# mine\n0123456789abcdef\nanother-0123456789\n")
    settings = served(
        host="0.0.0.0", api_key_file=f"{tmp_path}/key", context_length=64, deterministic=True,
        allow_host=["node2.example.org"], option=["cache-bytes=1000", "threads=2"],
    )  # fmt: skip
    command, environment = foreground_command(settings)
    assert command[:3] == [sys.executable, "-m", "nanodag.sampler"] and "0123456789abcdef" not in command[3]
    assert EngineSettings.model_validate_json(command[3]) == EngineSettings(
        model=MODEL, host="0.0.0.0", port=30000, device="cpu", dtype="float32", deterministic=True, cache_bytes=1000,
        context_length=64, allow_host=("node2.example.org",), threads=2,
    )  # fmt: skip
    assert environment["NANODAG_SAMPLER_TOKEN"] == "0123456789abcdef" and environment["PATH"] == os.environ["PATH"]
    assert environment["OMP_NUM_THREADS"] == "2"


def test_an_sglang_server_gets_room_for_its_reserve_and_what_a_cpu_needs(served, monkeypatch):
    monkeypatch.setattr(start, "find_python", lambda configured, device, guest: Path("/sglang/python"))
    settings = served(engine="sglang", context_length=64, option=["mem_fraction_static=0.5", "enable-metrics"])
    command, environment = foreground_command(settings)
    assert command[0] == "/sglang/python" and command[1].endswith("sglang_shim.py")
    assert {"--context-length=72", "--mem-fraction-static=0.5", "--enable-metrics", "--device=cpu"} <= set(command)
    assert environment["NANODAG_SAMPLER_TOKEN"] == "" and "NANODAG_SERVER_PARENT" not in environment
    gpu = EngineSettings(engine="sglang", model=MODEL, device="cuda", dtype="bfloat16")
    given = ("--device", "--context-length", "--max-", "--mem-", "--random-seed")
    assert not any(part.startswith(given) for part in foreground_command(gpu)[0])


def test_an_sglang_server_begins_with_a_base_and_with_adapters_named_by_their_version(tmp_path, monkeypatch):
    monkeypatch.setattr(start, "find_python", lambda configured, device, guest: Path("/sglang/python"))
    given = {"engine": "sglang", "device": "cuda", "base": MODEL, "lora_rank": 16}
    named = {
        "--model-path=/model",
        "--enable-lora",
        "--max-lora-rank=16",
        "--lora-target-modules",
        "q_proj",
        "down_proj",
    }
    before = foreground_command(EngineSettings(model=MODEL, **given))[0]
    assert named <= set(before) and not any(part.startswith("--lora-paths") for part in before)
    (tmp_path / "adapter_config.json").write_text("{}")
    after = foreground_command(EngineSettings(model=tmp_path, weight_version="7", **given))[0]
    assert named | {f"--lora-paths=policy-7={tmp_path}", "--weight-version=7"} <= set(after)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"host": "0.0.0.0"}, "--host 0.0.0.0 is within reach of others"),
        ({"option": ["api_key=x"]}, "--option api_key is said otherwise"),
        ({"option": ["wieght=x"]}, "--option wieght: there is no such option here. There are: max_batch, "),
        ({"option": ["threads=many"]}, "--option threads: Input should be a valid integer"),
        ({"engine": "sglang", "deterministic": True}, "of engine embedded"),
        ({"api_key_file": "/nowhere/key"}, "--api-key-file /nowhere/key cannot be read"),
    ],
)
def test_a_server_that_cannot_be_is_refused_with_the_reason(served, values, reason):
    with pytest.raises(ConfigError, match=reason):
        served(**values)
