"""What listens while a stage of several ranks runs: loopback only, whatever this machine's other addresses are."""

import ipaddress
import os
import subprocess
import sys
import time
from datetime import timedelta

import psutil
import pytest
from torch.distributed import TCPStore

from nanodag.host.ports import address_towards, network_environment, own_address
from nanodag.inference.bound_store import BoundStore
from nanodag.inference.client import SamplerClient
from nanodag.rl.sync.broadcast_sync import address_for, is_here
from nanodag.worker.launch import worker_command
from tests.cluster.namespaces import TWO
from tests.fault.processes import listening
from tests.rl.stages import make_job as make_rl_job
from tests.rl.stages import metrics, start


def seen_until_end(process, *, seen=None) -> set[tuple[str, str]]:
    """seen: a file that is made once a process whose name has the file's stem listens."""
    found: set[tuple[str, str]] = set()
    while process.poll() is None:
        try:
            found |= listening(process.pid)
        except psutil.Error:
            break
        if seen is not None and any(seen.stem in command for command, _ in found):
            seen.touch()
        time.sleep(0.02)
    process.wait()
    return found


def assert_loopback_only(found, *who):
    outside = {entry for entry in found if not ipaddress.ip_address(entry[1]).is_loopback}
    assert not outside, outside
    for name in who:
        assert any(name in command for command, _ in found), (name, found)


@pytest.mark.slow
def test_an_rl_stage_of_two_ranks_that_broadcasts_listens_on_loopback_only(tmp_path):
    job = make_rl_job(tmp_path, resources=TWO, sync="distributed", sync_bucket_bytes=4000)
    process = start(job, fresh=True)
    found = seen_until_end(process)
    assert process.returncode == 0, (job.workspace / "worker.log").read_text()[-4000:]
    assert len(metrics(job)) == 2
    assert_loopback_only(found, "nanodag.rl.trainer.trainer", "nanodag.sampler", "nanodag.rl")


def test_a_store_listens_on_its_address_only_and_is_found_there():
    store = BoundStore("localhost", 0, None, True, timedelta(seconds=20), wait_for_workers=False, multi_tenant=True)
    ours = [entry.laddr for entry in psutil.Process().net_connections("inet") if entry.status == psutil.CONN_LISTEN]
    assert {address.ip for address in ours if address.port == store.port} == {"127.0.0.1"}
    store.set("key", "value")
    assert TCPStore("127.0.0.1", store.port, None, False, timedelta(seconds=20)).get("key") == b"value"


RANK = """
import sys, torch, torch.distributed as dist
from nanodag.train.deepspeed_engine import leave, start_ranks
start_ranks("cpu")
found = torch.ones(1)
dist.all_reduce(found)
assert found.item() == 2.0
print("met", flush=True)
import pathlib, time
begin = time.monotonic()
while not pathlib.Path(__file__).with_suffix(".seen").exists() and time.monotonic() < begin + 60:
    time.sleep(0.05)  # a test that is slow to look, on a busy machine, would come too late
leave()
"""


def test_torchrun_and_its_ranks_listen_on_loopback_only_and_leave_no_files(tmp_path):
    (tmp_path / "a_rank.py").write_text(RANK)
    (tmp_path / "temporary").mkdir()
    paths = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.getcwd()}", "TMPDIR": str(tmp_path / "temporary")}
    environment = {**os.environ, **network_environment(), **paths}
    command = worker_command("a_rank", tmp_path / "job.json", num_ranks=2)
    assert command[0] == sys.executable
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        found = seen_until_end(process, seen=tmp_path / "a_rank.seen")
    text = (tmp_path / "log").read_text()
    assert process.returncode == 0 and text.count("met") == 2, text[-3000:]
    assert_loopback_only(found, "nanodag.train.torchrun", "a_rank")
    assert list((tmp_path / "temporary").iterdir()) == []


def test_an_address_is_found_by_its_interface_and_by_whom_it_reaches_and_others_are_refused():
    assert own_address("lo") == own_address("127.0.0.1") == address_towards("127.0.0.1") == "127.0.0.1"
    with pytest.raises(ValueError, match=r"'192\.0\.2\.1' is neither an address nor an interface.*lo 127\.0\.0\.1"):
        own_address("192.0.2.1")


def test_weights_go_out_on_loopback_unless_a_sampler_is_elsewhere():
    ours = SamplerClient("http://localhost:1")
    assert is_here(ours) and is_here(SamplerClient("http://127.0.0.1:1")) and not is_here(SamplerClient("http://a:1"))
    assert address_for([ours]) == "127.0.0.1"
    elsewhere = [entry.address for entries in psutil.net_if_addrs().values() for entry in entries if entry.family == 2]
    for address in elsewhere:
        assert address_for([ours, SamplerClient(f"http://{address}:1")]) == address
