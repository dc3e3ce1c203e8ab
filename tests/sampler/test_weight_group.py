"""Groups of weights: who may come, and how one is left that lost a member. NCCL's own group is a stand-in."""

import os
import pickle
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from torch import distributed
from torch.multiprocessing import reductions

from nanodag.inference.bound_store import BoundStore
from nanodag.sampler.shared_tensors import opened
from nanodag.sampler.weight_group import BLOCKING_WAIT, WeightGroup, in_time, open_store


def found(port):
    """The store that rank 0 has opened, as another member finds it."""
    return BoundStore("127.0.0.1", port, None, False, timedelta(seconds=20.0), wait_for_workers=False)


def test_whoever_has_another_nccl_than_rank_0_is_refused_with_both_versions_and_the_way_out():
    store = open_store("127.0.0.1", 20.0, nccl="2.29.7")
    with pytest.raises(
        RuntimeError, match=r"two versions: the trainer's torch has 2\.29\.7, the sampler's none\. .*disk"
    ):
        found(store.port)


def test_a_group_of_gloo_asks_for_no_version():
    store = open_store("127.0.0.1", 20.0)
    store.set("key", "value")
    assert found(store.port).get("key") == b"value"


@pytest.fixture
def of_nccl(monkeypatch):
    """A group of NCCL whose communicator notes what it is told; its first call fails."""

    class Communicator:
        Options = SimpleNamespace

        def __init__(self, store, rank, size, options):
            self.told, self.blocking_wait = [], os.environ.get(BLOCKING_WAIT)

        def abort(self):
            self.told.append("abort")
            raise RuntimeError("what is under way could not be ended in time")

    monkeypatch.setattr(distributed, "ProcessGroupNCCL", Communicator, raising=False)
    store = open_store("127.0.0.1", 20.0)
    return WeightGroup(store, name="one", rank=0, size=2, timeout_s=1.0, backend="nccl")


def test_nccls_group_is_made_without_the_watchdog_that_ends_a_process_and_left_by_aborting(of_nccl):
    communicator = of_nccl._group
    assert communicator.blocking_wait == "1" and BLOCKING_WAIT not in os.environ
    of_nccl.close()
    assert communicator.told == ["abort"]
    with pytest.raises(RuntimeError, match="was left"):
        of_nccl.broadcast(torch.zeros(1))


def test_a_call_that_never_returns_is_left_alone_and_one_that_fails_says_why():
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"not all members took part within 0\.05 s"):
        in_time(lambda: time.sleep(5), 0.05)
    assert time.monotonic() - began < 2

    def fail():
        raise RuntimeError("Duplicate GPU detected")

    with pytest.raises(RuntimeError, match="Duplicate GPU detected"):
        in_time(fail, 20.0)
    in_time(lambda: None, 20.0)


class OfGPU:
    """A tensor as it is pickled on a GPU, of which only the GPU's name matters here."""

    def __reduce__(self):
        values = (torch.Tensor, (1,), (1,), 0, torch.UntypedStorage, torch.uint8, "GPU-6f1a")
        return reductions.rebuild_cuda_tensor, values


def test_a_handle_of_another_gpu_is_refused_by_name():
    handle = pickle.dumps({"flattened_tensor": OfGPU(), "metadata": []})
    with pytest.raises(RuntimeError, match=r"memory is of GPU GPU-6f1a, and this sampler is on cpu"):
        opened(handle, torch.device("cpu"))
