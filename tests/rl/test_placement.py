"""Which GPU a sampler gets, and how much: the stage's services with processes that are only noted."""

import json
import socket
import sys
from contextlib import closing
from unittest.mock import Mock

import psutil
import pytest

from nanodag.engines.start import ServerProcess, command_of, start_engine
from nanodag.errors import ConfigError
from nanodag.inference.engine_settings import EngineSettings
from nanodag.rl.control import services as services_module
from nanodag.rl.control.services import Places, Services, places_of
from tests.rl.stages import make_job, on

GPUS = {"num_ranks": 8, "threads": 1, "device": "cuda"}


@pytest.mark.parametrize(
    ("sampler", "gpus", "settings"),
    [
        ({"max_batch": 60}, list("01234567"), {"device": "cuda", "max_batch": 8, "deterministic": False}),
        (  # 2 layers of 2 heads of 8 numbers, keys and values, 4 bytes each: 256 bytes a token
            {"engine": "sglang", "tensor_parallel": 2, "cache_bytes": 256 * 1000, "deterministic": False},
            ["0,1", "2,3", "4,5", "6,7"],
            {"cache_tokens": 1000, "memory_fraction": 0.9},
        ),
    ],
)
def test_each_sampler_on_eight_gpus_has_its_own_and_its_share(tmp_path, monkeypatch, sampler, gpus, settings):
    monkeypatch.setenv("NANODAG_SGLANG_PYTHON", sys.executable)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    found = []
    monkeypatch.setattr(services_module, "start_engine", lambda settings, **where: found.append(settings))
    services = Services(make_job(tmp_path, resources=GPUS, sampler={"context": 64, **sampler}))
    with closing(services.link):
        for number in range(services.num_samplers):
            services._launch(number, tmp_path / "model", 0)
    assert [started.gpus for started in found] == gpus
    assert all({name: getattr(started, name) for name in settings} == settings for started in found)


EIGHT = tuple("01234567")
TABLE = [
    # gpus, own, ranks, replicas, tensor_parallel -> the trainer's, the samplers'
    (EIGHT, (), 8, 8, 1, "0,1,2,3,4,5,6,7", list(EIGHT)),
    (EIGHT, (4, 5, 6, 7), 4, 4, 1, "0,1,2,3", ["4", "5", "6", "7"]),
    (EIGHT, (6, 7), 6, 2, 1, "0,1,2,3,4,5", ["6", "7"]),
    (EIGHT, (4, 5, 6, 7), 4, 2, 2, "0,1,2,3", ["4,5", "6,7"]),
    (EIGHT, (0, 3, 5, 6), 2, 2, 2, "1,2,4,7", ["0,3", "5,6"]),
    (EIGHT, (), 8, 4, 2, "0,1,2,3,4,5,6,7", ["0,1", "2,3", "4,5", "6,7"]),
    (("8", "GPU-a", "11"), (2,), 2, 1, 1, "8,GPU-a", ["11"]),
    (("3",), (), 1, 3, 1, "3", ["3", "3", "3"]),
    (("0", "2"), (1,), 1, 2, 1, "0", ["2", "2"]),
]


@pytest.mark.parametrize(("gpus", "own", "ranks", "replicas", "parallel", "trainer", "samplers"), TABLE)
def test_each_side_sees_its_gpus(gpus, own, ranks, replicas, parallel, trainer, samplers):
    found = places_of(gpus, own=own, num_ranks=ranks, replicas=replicas, tensor_parallel=parallel)
    assert found == Places(trainer, tuple(samplers))


@pytest.mark.parametrize(
    ("places", "num_ranks", "senders"),
    [
        (Places("0,1,2,3", ("0", "1", "2", "3")), 4, [[0], [1], [2], [3]]),
        (Places("0,1,2,3", ("0,1", "2,3")), 4, [[0, 1], [2, 3]]),
        (Places("8,GPU-a,11", ("11", "8,GPU-a")), 3, [[2], [0, 1]]),
        (Places("3", ("3", "3")), 1, [[0], [0]]),
        (Places("0,1,2,3", ("1", "0")), 2, [[1], [0]]),
    ],
)
def test_each_rank_of_a_sampler_gets_memory_of_its_gpu_from_the_trainers_rank_there(places, num_ranks, senders):
    assert places.senders(num_ranks) == senders


def test_a_sampler_on_a_gpu_without_a_rank_gets_no_memory():
    with pytest.raises(ConfigError, match=r"a sampler is on GPU 2, where no rank of the trainer is \(they are on 0, 1"):
        Places("0,1,2,3", ("0", "1", "2")).senders(2)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"sync": "disk", "sampler": {"urls": ["http://ELSEWHERE:1"]}}, "lo"),
        ({"sync": "distributed", "sampler": {"urls": ["http://127.0.0.1:1"]}}, "lo"),
        ({"sync": "distributed", "sampler": {"urls": ["http://ELSEWHERE:1"]}}, "there"),
        ({"sync": "distributed", "sampler": {"urls": ["http://127.0.0.1:1"]}, "sync_address": "ELSEWHERE"}, "there"),
        ({"sync": "distributed", "sampler": {"urls": ["http://no-such-host.invalid:1"]}}, "lo"),
    ],
)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_nccl_is_on_loopback_where_all_samplers_are_here_alone(tmp_path, monkeypatch, settings, expected, num_ranks):
    address, interface = outward()
    settings = json.loads(json.dumps(settings).replace("ELSEWHERE", address))
    settings["sampler"] |= {"context": 64, "replicas": 1, "engine": "sglang", "deterministic": False}
    monkeypatch.setenv("NANODAG_SGLANG_PYTHON", sys.executable)
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    services = Services(make_job(tmp_path, **on(num_ranks), **settings))
    seen = []
    monkeypatch.setattr(services.children, "start", lambda name, command, env: seen.append(env))
    with closing(services.link):
        services._start_trainer()
        environment = command_of(services._engine_settings(0))[1]
    wanted = interface if expected == "there" else "lo"
    assert {env["NCCL_SOCKET_IFNAME"] for env in seen} == {wanted} and seen[0]["GLOO_SOCKET_IFNAME"] == "lo"
    assert environment["NCCL_SOCKET_IFNAME"] == environment["GLOO_SOCKET_IFNAME"] == wanted


def outward():
    """An address of this machine that is not loopback, and its interface. The test is skipped where there is none."""
    for interface, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family == socket.AF_INET and not entry.address.startswith("127."):
                return entry.address, interface
    pytest.skip("this machine has loopback alone")


def test_a_side_without_gpus_enough_is_refused():
    for settings, why in (
        ({"own": (2,), "num_ranks": 1}, "names GPU 2, and the stage has 2"),
        ({"own": (1,), "num_ranks": 2}, "2 ranks have 1 GPUs beside the samplers' 1"),
        ({"own": (1,), "num_ranks": 1, "tensor_parallel": 2}, "more than the 1 GPUs"),
    ):
        with pytest.raises(ConfigError, match=why):
            places_of(("0", "1"), replicas=1, **settings)


def test_ranks_of_a_separate_stage_see_the_gpus_that_samplers_leave(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "8,9,10,11")
    resources = {"num_ranks": 2, "threads": 1, "device": "cuda"}
    sampler = {"context": 64, "gpus": (1, 3), "replicas": 2}
    services = Services(make_job(tmp_path, resources=resources, sampler=sampler, placement="separate"))
    seen = {}
    monkeypatch.setattr(services.children, "start", lambda name, command, env: seen.update({name: env}))
    with closing(services.link):
        services._start_trainer()
    assert {env["CUDA_VISIBLE_DEVICES"] for env in seen.values()} == {"8,10"}
    assert [env["LOCAL_RANK"] for env in seen.values()] == ["0", "1"]


@pytest.mark.parametrize(("gpu", "expected"), [("3", "3"), ("", "0,1")])
def test_a_sampler_sees_its_own_gpu_alone(tmp_path, monkeypatch, gpu, expected):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    spawn = Mock(side_effect=InterruptedError)  # once the environment is known
    monkeypatch.setattr(ServerProcess, "spawn", spawn)
    with pytest.raises(InterruptedError):
        start_engine(EngineSettings(model=tmp_path, device="cuda", gpus=gpu), log_path=tmp_path / "log")
    assert spawn.call_args.kwargs["env"]["CUDA_VISIBLE_DEVICES"] == expected
