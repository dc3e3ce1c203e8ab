"""Devices of the machine: who gets them, who waits, and that the dead hold none."""

import contextlib
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from nanodag.config import resolve
from nanodag.config.kinds.evaluation import EvalStage
from nanodag.config.kinds.rl import RLStage
from nanodag.config.stage_base import Resources
from nanodag.errors import ConfigError, StageStopped
from nanodag.host.folders import PROJECT
from nanodag.host.machine import machine_of
from nanodag.inference.engine_settings import EngineSettings
from nanodag.run.build_stage import steps_back_s
from nanodag.worker import devices as module
from nanodag.worker.devices import Devices, devices_for, hold, holders, named_gpus

HOLDER = """
import sys, time
from pathlib import Path
from nanodag.worker.devices import Devices, hold
with hold(Path(sys.argv[1]), Devices(name="gpu", capacity=2, wanted=2)):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def four_cores(monkeypatch):
    monkeypatch.setattr(module, "usable_cores", lambda: 4)


def taken(folder, devices, timeout_s=0.5):
    """The devices that are got within a while; None for none."""
    stop = threading.Event()
    threading.Timer(timeout_s, stop.set).start()
    try:
        with hold(folder, devices, stop=stop) as held:
            return tuple(held)
    except StageStopped:
        return None


def test_who_wants_several_gets_them_all_or_waits(tmp_path):
    two, three = Devices(name="gpu", capacity=4, wanted=2), Devices(name="gpu", capacity=4, wanted=3)
    with hold(tmp_path, two) as first:
        assert tuple(first) == (0, 1)
        assert taken(tmp_path, three) is None
        assert taken(tmp_path, two) == (2, 3)
    assert taken(tmp_path, three) == (0, 1, 2)


def test_stages_that_score_do_not_take_the_device_of_those_that_train(tmp_path):
    train, score = (devices_for(device="cpu", num_gpus=1, is_beside=beside) for beside in (False, True))
    with hold(tmp_path, train), hold(tmp_path, score):
        assert taken(tmp_path, train) is None
        assert taken(tmp_path, score) is None


def test_who_may_train_several_at_once_leaves_the_first_device_to_others(tmp_path, four_cores):
    one, three = (devices_for(device="cpu", num_gpus=1, is_beside=False, at_once=n) for n in (1, 3))
    with hold(tmp_path, one), hold(tmp_path, three) as second, hold(tmp_path, three) as third:
        assert (tuple(second), tuple(third)) == ((4, 5, 6, 7), (8, 9, 10, 11))
        assert taken(tmp_path, three) is None


def test_on_a_cpu_stages_go_side_by_side_as_far_as_their_cores_reach(tmp_path, four_cores):
    one, two, more = (devices_for(device="cpu", num_gpus=1, is_beside=False, cores=n) for n in (1, 2, 64))
    with hold(tmp_path, one):
        with hold(tmp_path, two):
            assert taken(tmp_path, more) is taken(tmp_path, two) is None
            assert taken(tmp_path, one) == (3,)
        assert taken(tmp_path, more) is None  # which takes all there are, and so nothing beside it
    with hold(tmp_path, more):
        assert taken(tmp_path, one) is None


def test_a_killed_holder_holds_nothing(tmp_path):
    devices = Devices(name="gpu", capacity=2, wanted=2)
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    assert taken(tmp_path, devices) is None
    holder.kill()
    holder.wait()
    holder.stdout.close()
    assert taken(tmp_path, devices) == (0, 1)


def test_who_waits_hears_who_holds_what_it_waits_for(tmp_path):
    two, stop, said = Devices(name="cpu", capacity=2, wanted=2), threading.Event(), []
    with hold(tmp_path, Devices(name="cpu", capacity=2), holder="sft of run a"), pytest.raises(StageStopped):
        threading.Timer(0.5, stop.set).start()
        with hold(tmp_path, two, stop=stop, say=said.append):
            raise AssertionError("one of them was held")
    assert said == ["waits for 2 of 2 cores, held by sft of run a"] and holders(tmp_path, "cpu") == {}


class Clock:
    """Stands in for the module `time`: sleeping moves it on, and what is due by then happens."""

    def __init__(self, due):
        self.now, self.due = 0.0, due

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        while self.due and self.due[0][0] <= self.now:
            self.due.pop(0)[1]()


def test_training_that_comes_after_a_device_was_released_goes_before_who_steps_back(tmp_path, monkeypatch):
    gpu, training = Devices(name="gpu", capacity=1), contextlib.ExitStack()

    def train():
        training.enter_context(hold(tmp_path, gpu))

    train()
    clock = Clock([(30.0, training.close), (34.0, train), (50.0, training.close)])
    monkeypatch.setattr(module, "time", clock)
    with hold(tmp_path, gpu, step_back_s=5.0):
        assert not clock.due and clock.now == pytest.approx(55.0, abs=0.3)


@pytest.mark.parametrize(
    ("to_do", "seconds"),
    [
        (("pretrain", "eval_base", "midtrain", "eval_mid", "sft"), (0, 0, 5, 0, 5)),
        (("eval_base", "eval_mid"), (15, 15)),  # as at night: another run's training comes first, that of 5 s too
        (("pretrain", "midtrain", "sft"), (0, 0, 0)),
    ],
)
def test_on_gpus_training_leaves_them_to_the_evaluation_of_the_model_that_it_trains_on(to_do, seconds):
    pipeline = resolve(PROJECT / "pipeline.yaml", "speedrun", [], machine=machine_of("8xH100")).pipeline
    run = SimpleNamespace(pipeline=pipeline, to_do=to_do)
    assert tuple(steps_back_s(run, pipeline.stages[name]) for name in to_do) == seconds


def test_who_steps_back_can_be_stopped(tmp_path):
    stop = threading.Event()
    threading.Timer(0.2, stop.set).start()
    began = time.monotonic()
    with hold(tmp_path, Devices(name="gpu", capacity=1)), pytest.raises(StageStopped):
        with hold(tmp_path, Devices(name="gpu", capacity=1), stop=stop, step_back_s=30.0):
            raise AssertionError("there was no device")
    assert time.monotonic() - began < 30.0  # so long it would have stepped back


def test_gpus_are_those_that_this_process_may_use_and_more_than_there_are_is_an_error(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    devices = devices_for(device="cuda", num_gpus=2, is_beside=False)
    assert (devices.capacity, devices.wanted) == (3, 2)
    assert named_gpus((0, 2)) == "4,7"
    with pytest.raises(ConfigError, match="takes 4 GPUs and this machine has 3"):
        devices_for(device="cuda", num_gpus=4, is_beside=False)


def on_gpus(kind, num_ranks=1, nodes=1, tensor_parallel=1, **sampler):
    resources = Resources(num_ranks=num_ranks, nodes=nodes, device="cuda")
    servers = SimpleNamespace(tensor_parallel=tensor_parallel, **sampler)
    return kind.model_construct(resources=resources, sampler=servers)


def test_the_gpus_of_sglangs_servers_count_where_they_are_more_than_the_ranks():
    assert on_gpus(RLStage, engine="sglang", replicas=2, tensor_parallel=2).num_gpus(8) == 4
    assert on_gpus(RLStage, num_ranks=4, engine="sglang", replicas=1, tensor_parallel=2).num_gpus(8) == 4
    assert on_gpus(RLStage, num_ranks=16, nodes=2, engine="sglang", replicas=4).num_gpus(2) == 8


def test_embedded_samplers_take_a_gpu_each_and_share_where_there_are_fewer(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    assert [on_gpus(RLStage, engine="embedded", replicas=n).num_gpus(3) for n in (1, 2, 8)] == [1, 2, 3]
    settings = EngineSettings(device="cuda")
    assert [settings.of_replica(number, Path(), 0).gpus for number in range(5)] == ["4", "6", "7", "4", "6"]


def test_an_evaluation_takes_the_gpus_of_one_server_and_those_of_the_others_where_they_are_free(tmp_path, monkeypatch):
    stage = on_gpus(EvalStage, replicas=3, tensor_parallel=2)
    assert (stage.num_gpus(8), stage.spare_gpus) == (2, 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    stage = on_gpus(EvalStage, replicas=8)
    devices = devices_for(device="cuda", num_gpus=stage.num_gpus(4), spare_gpus=stage.spare_gpus, is_beside=True)
    three = Devices(name="gpu", capacity=4, wanted=3)
    assert taken(tmp_path, devices) == (0, 1, 2, 3)
    with hold(tmp_path, three):
        assert taken(tmp_path, devices) == (3,)
        with hold(tmp_path, devices) as last:
            assert tuple(last) == (3,)
            assert taken(tmp_path, devices) is None
