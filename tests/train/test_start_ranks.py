"""How a rank joins the others on a GPU, where there is none: what is called, and in which order."""

import pytest
import torch
from torch import distributed as dist

from nanodag.train import deepspeed_engine


@pytest.mark.parametrize(("variables", "gpu"), [({}, 0), ({"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1"}, 1)])
def test_a_rank_takes_its_own_gpu_before_nccl_starts_and_names_it_to_nccl(monkeypatch, variables, gpu):
    monkeypatch.setattr(deepspeed_engine.os, "environ", dict(variables))
    called = []
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(deepspeed_engine, "_store", lambda rank, world: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: called.append(("gpu", device)))
    monkeypatch.setattr(dist, "init_process_group", lambda **options: called.append((options["backend"], options)))
    device = torch.device("cuda", gpu)
    assert deepspeed_engine.start_ranks("cuda") == device
    (first, set_to), (second, options) = called
    assert (first, set_to) == ("gpu", device)
    assert second == "nccl" and options["device_id"] == device
    assert (options["rank"], options["world_size"]) == ((9, 16) if variables else (0, 1))
