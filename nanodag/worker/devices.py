"""Devices of this machine: how many stages train, score, or hold a GPU at once, over all runs and all processes.

A device is a GPU or a core of the machine, and a locked file. Its holder hands the lock on to the worker's
watchdog, so the device is free again when the last process of the stage is gone, and not before; a process that is
dead holds none.
"""

import contextlib
import fcntl
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nanodag.errors import ConfigError, StageStopped
from nanodag.errors.words import counted, listed
from nanodag.host.machine import visible_gpus
from nanodag.host.processor import usable_cores
from nanodag.store import Store

log = logging.getLogger(__name__)

POLL_S = 0.1
WORDS = {"cpu": "cores", "cpu-beside": "places for evaluations", "gpu": "GPUs"}
# GPUs are taken only when they were free for so long: by training that leaves them to an evaluation, and by whatever
# leaves them to training, which may be waiting for the first.
STEP_BACK_S, LAST_S = 5.0, 15.0


@dataclass(frozen=True, kw_only=True)
class Devices:
    """Devices of one kind. name: of their files. capacity: how many there are. wanted: how many a stage takes. least:
    with how many it makes do where others hold the rest; 0 for no fewer than it wants."""

    name: str
    capacity: int
    wanted: int = 1
    least: int = 0


def devices_for(
    *, device: str, num_gpus: int, is_beside: bool, cores: int = 0, at_once: int = 1, spare_gpus: int = 0
) -> Devices:
    """Devices that a stage occupies: num_gpus GPUs, and up to spare_gpus more that are free; on CPUs its cores, 0 for
    all, of those of the machine, or of so many that at_once such stages have room; or the one for stages beside those.

    Raises ConfigError when this machine has fewer GPUs: it would wait for ever.
    """
    if device == "cuda":
        capacity = len(visible_gpus())
        if num_gpus > capacity:
            raise ConfigError(
                f"The stage takes {counted(num_gpus, 'GPU')} and this machine has {capacity} for it "
                "(CUDA_VISIBLE_DEVICES, else nvidia-smi); lower its resources.num_ranks (or "
                "gpus_per_node), or for rl sampler.replicas or sampler.tensor_parallel."
            )
        return Devices(name="gpu", capacity=capacity, wanted=min(num_gpus + spare_gpus, capacity), least=num_gpus)
    if is_beside:
        return Devices(name="cpu-beside", capacity=1)
    there = usable_cores()
    wanted = min(cores or there, there)
    return Devices(name="cpu", capacity=max(there, at_once * wanted), wanted=wanted)


def devices_folder(store: Store) -> Path:
    """Folder of the devices of this machine, for `hold`: several machines may share a store's local folder."""
    return store.local / "locks" / "devices" / socket.gethostname()


@contextlib.contextmanager
def hold(
    folder: Path,
    devices: Devices,
    *,
    stop: threading.Event | None = None,
    step_back_s: float = 0.0,
    holder: str = "another process",
    say: Callable[[str], None] = log.info,
) -> Iterator[dict[int, int]]:
    """Hold `wanted` devices at once, or `least` of them where others hold the rest, waiting for them; all or none, so
    that two who wait do not block each other. Yields the descriptor of each one's lock by its number, from 0.

    folder: where their files lie. stop: set to give up. step_back_s: take only what was free for so long at a stretch,
    so that others go first. holder: who it is, for others who wait. say: hears what is waited for, and who holds it.

    Raises StageStopped once `stop` is set.
    """
    folder.mkdir(parents=True, exist_ok=True)
    said, awaited = "", f"{devices.wanted} of {devices.capacity} {WORDS[devices.name]}"
    free_since: dict[int, float] = {}
    with contextlib.ExitStack() as stack:
        while True:
            numbers, others = list(range(devices.capacity)), dict[int, str]()
            if step_back_s:
                now, others = time.monotonic(), holders(folder, devices.name)
                free = set(numbers).difference(others)
                free_since = {number: free_since.get(number, now) for number in sorted(free)}
                numbers = [number for number, since in free_since.items() if now - since >= step_back_s]
            if (held := _try(folder, devices, numbers, stack, others)) is not None:
                break
            if stop is not None and stop.is_set():
                raise StageStopped(f"Was stopped while it waited for {awaited}.")
            if len(free_since) < (devices.least or devices.wanted):
                who = listed(dict.fromkeys(filter(None, others.values())))
                text = f"waits for {awaited}, held by {who}"
                if who and text != said:
                    say(text)
                    said = text
            time.sleep(POLL_S)
        for number in held:
            _lock_file(folder, devices, number).write_text(holder)
        yield held


def holders(folder: Path, name: str) -> dict[int, str]:
    """Number of each device of that name that is held now -> its holder, in words. Nothing is made for it."""
    held = {}
    for path in sorted(folder.glob(f"{name}-[0-9]*.lock")):
        with path.open() as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)  # who looks is in the way of nobody else who looks
            except BlockingIOError:
                held[int(path.stem.removeprefix(f"{name}-"))] = stream.read()
    return held


def named_gpus(numbers: Iterable[int]) -> str:
    """Devices as a value of CUDA_VISIBLE_DEVICES."""
    gpus = visible_gpus()
    return ",".join(gpus[number] for number in numbers)


def _lock_file(folder: Path, devices: Devices, number: int) -> Path:
    return folder / f"{devices.name}-{number}.lock"


def _try(
    folder: Path, devices: Devices, numbers: Sequence[int], stack: contextlib.ExitStack, others: dict[int, str]
) -> dict[int, int] | None:
    """others: gets the holders of those that are not to be had. To look at locks would be in others' way."""
    with contextlib.ExitStack() as attempt:
        got: dict[int, int] = {}
        for number in numbers:
            stream = attempt.enter_context(_lock_file(folder, devices, number).open("a+"))
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                got[number] = stream.fileno()
            except BlockingIOError:
                stream.seek(0)
                others[number] = stream.read()
            if len(got) == devices.wanted:
                break
        if len(got) < (devices.least or devices.wanted):
            return None
        stack.enter_context(attempt.pop_all())
        return got
