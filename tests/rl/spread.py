"""What one of two ranks does with a model that is spread over them: in a module of its own, which a process imports."""

from pathlib import Path

import torch

from nanodag.config.rl_sections import WeightsSection
from nanodag.rl.trainer.weight_sender import WeightGiver
from nanodag.sampler.fingerprints import Fingerprints
from nanodag.train.deepspeed_engine import leave
from nanodag.train.shares import Shares

BIG = 1 << 26
"""Bytes of a tensor, of which each rank has half."""


def resident(field):
    """VmRSS or VmHWM, the most since `clear_refs`, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def peak_of_big(rank):
    """Bytes that bringing a big tensor together takes at most, beside this rank's share."""
    model = torch.nn.Module()
    model.register_parameter("big", torch.nn.Parameter(torch.empty(0)))
    model.big.ds_tensor = torch.ones(BIG // 8)
    shares = Shares(model, {"big": (BIG // 4,)}, dtype=torch.float32, is_spread=True)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    whole = shares.together(["big"])
    assert (whole is None) == (rank == 1)
    return resident("VmHWM") - before


def _halves(rank):
    """A (3,) and a (2, 2) tensor in halves, the first filled up."""
    model = torch.nn.Module()
    for name, whole in (("a", [1.0, 2.0, 3.0, 9.0]), ("b", [4.0, 5.0, 6.0, 7.0])):
        parameter = torch.nn.Parameter(torch.empty(0))
        parameter.ds_tensor = torch.tensor(whole).split(2)[rank].clone()
        model.register_parameter(name, parameter)
    return model, Shares(model, {"a": (3,), "b": (2, 2)}, dtype=torch.float32, is_spread=True)


def shared_by(rank, path, done, may_end):
    """What a rank replies that shares both tensors with one sampler on rank 0's GPU and two on rank 1's, and then with
    two on rank 0's; it holds the memory until it may end."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    _, shares = _halves(rank)
    options = {"rank": rank, "prefix": "", "config": WeightsSection(sync_bucket_bytes=1000)}
    first, second = (
        WeightGiver(shares, **options, make_fingerprints=lambda: Fingerprints("checkpoint")) for _ in range(2)
    )
    found = [first.share(0, counts=[1, 2], fingerprint=True), second.share(0, counts=[2], fingerprint=False)]
    done.put((rank, found))
    may_end.wait(60)
    leave()


def two_shares(rank, path, done):
    """Rank 0 says what comes together of two tensors in halves, and how much a bucket takes."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    model, shares = _halves(rank)
    shares.keep()
    first = shares.together(["a", "b"])
    model.a.ds_tensor += 10
    second, kept = shares.together(["a"]), shares.together(["a", "b"], kept=True)
    peak = peak_of_big(rank)
    if rank == 0:
        done.put([[found.view(torch.float32).tolist() for found in (first, second, kept)], peak])
    else:
        assert first is second is kept is None
    leave()  # a normal exit may end with SIGABRT
