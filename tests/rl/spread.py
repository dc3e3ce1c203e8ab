"""What one of two ranks does with a model that is spread over them: in a module of its own, which a process imports."""

from pathlib import Path

import torch

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


def two_shares(rank, path, done):
    """A (3,) and a (2, 2) tensor in halves, the first filled up; rank 0 says what comes together, and how
    much a bucket takes."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    model = torch.nn.Module()
    for name, whole in (("a", [1.0, 2.0, 3.0, 9.0]), ("b", [4.0, 5.0, 6.0, 7.0])):
        parameter = torch.nn.Parameter(torch.empty(0))
        parameter.ds_tensor = torch.tensor(whole).split(2)[rank].clone()
        model.register_parameter(name, parameter)
    shares = Shares(model, {"a": (3,), "b": (2, 2)}, dtype=torch.float32, is_spread=True)
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
