"""`nanodag sampler serve`: the command that it becomes, for either engine."""

import os
import sys
from pathlib import Path

import pytest
from nanodag.inference.serve_command import Served, serve_command

from nanodag.errors import ConfigError
from nanodag.inference import serve_command as module

MODEL = Path("/model")


def served(**values):
    return Served(**{
        "engine": "embedded", "model": MODEL, "device": "cpu", "dtype": "float32", "host": "127.0.0.1", "port": 30000,
        **values,
    })  # fmt: skip


def test_an_embedded_server_becomes_the_samplers_own_command_and_gets_its_key_unseen(tmp_path):
    (tmp_path / "key").write_text("# mine\n0123456789abcdef\nanother-0123456789\n")
    command, environment = serve_command(
        served(
            host="0.0.0.0",
            key_file=str(tmp_path / "key"),
            context=64,
            is_deterministic=True,
            names=("node2.example.org",),
            options={"cache-bytes": "1000"},
        )
    )
    assert command[:3] == [sys.executable, "-m", "nanodag.sampler"]
    assert set(command[3:]) == {
        "--model-path=/model", "--host=0.0.0.0", "--port=30000", "--device=cpu", "--dtype=float32", "--deterministic",
        "--cache-bytes=1000", "--context-length=64", "--allow-host=node2.example.org",
    }  # fmt: skip
    assert environment["NANODAG_SAMPLER_TOKEN"] == "0123456789abcdef" and environment["PATH"] == os.environ["PATH"]


def test_an_sglang_server_gets_room_for_its_reserve_and_what_a_cpu_needs(monkeypatch):
    monkeypatch.setattr(module, "find_python", lambda configured, device: Path("/sglang/python"))
    command, environment = serve_command(
        served(engine="sglang", context=64, options={"mem_fraction_static": "0.5", "enable-metrics": True})
    )
    assert command[0] == "/sglang/python" and command[1].endswith("sglang_shim.py")
    assert {"--context-length=72", "--mem-fraction-static=0.5", "--enable-metrics", "--device=cpu"} <= set(command)
    assert environment["NANODAG_SAMPLER_TOKEN"] == "" and "NANODAG_SERVER_PARENT" not in environment
    command, _ = serve_command(served(engine="sglang", device="cuda", dtype="bfloat16"))
    assert not any(part.startswith(("--device", "--context-length")) for part in command)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"host": "0.0.0.0"}, "--host 0.0.0.0 is within reach of others"),
        ({"options": {"api_key": "x"}}, "--option api_key is said otherwise"),
        ({"engine": "sglang", "is_deterministic": True}, "of engine embedded"),
        ({"key_file": "/nowhere/key"}, "--api-key-file /nowhere/key cannot be read"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_reason(values, said):
    with pytest.raises(ConfigError, match=said):
        serve_command(served(**values))
