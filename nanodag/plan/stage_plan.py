"""Plan of a stage: its size, its processes and their memory, its time, and its faults."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Setting that would not work, or make results void. setting: its dotted name without the stage, or `store.url`.
    found: its value. why: in a clause. mend: changes that work together, as `micro_batch_tokens=2048`; none where no
    setting helps."""

    setting: str
    found: str
    why: str
    mend: tuple[str, ...] = ()

    def text(self, stage: str) -> str:
        """One line, as `pretrain.micro_batch_tokens: 32768 ...; set pretrain.micro_batch_tokens=8192`."""
        settings = " ".join(f"{stage}.{setting}" for setting in self.mend)
        name = self.setting if self.setting == "store.url" else f"{stage}.{self.setting}"
        return f"{name}: {self.found} {self.why}{f'; set {settings}' if settings else ''}"


@dataclass(frozen=True, kw_only=True)
class Process:
    """Processes of one kind, side by side on a node.

    count: how many. device: bytes that each takes of its GPU, by what holds them; empty where it has none. host: the
    same of host memory. reserve: bytes of host memory that only longer prompts than most would make it take. gpus: how
    many a process has. resting: bytes that it keeps of its GPU while processes of another kind have their turn; None
    where all work at once. own_gpus: that these processes share with no others; 0 for those of the stage.
    """

    name: str
    count: int = 1
    device: Mapping[str, int] = field(default_factory=dict)
    host: Mapping[str, int] = field(default_factory=dict)
    reserve: int = 0
    gpus: int = 0
    resting: int | None = None
    own_gpus: int = 0

    @property
    def on_device(self) -> int:
        """Bytes of one process on its GPU."""
        return sum(self.device.values())

    def on_gpu(self, num_gpus: int, *, is_working: bool = True) -> int:
        """Bytes of the fullest of so many GPUs that all of these processes share."""
        each = self.on_device if is_working or self.resting is None else self.resting
        return each * math.ceil(self.count * max(1, self.gpus) / max(1, num_gpus))

    @property
    def on_host(self) -> int:
        """Bytes of one process in host memory."""
        return sum(self.host.values())


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """One stage. What is None is not known beforehand.

    parameters: of its model. tokens: trained, or read and written by an evaluation. steps: of the optimizer, in RL
    rounds. flops: model FLOPs of all devices. read_bytes: text or rows that the stage reads. processes: what runs
    on a node at once. at_once: samples decoded together. longest_prompt: tokens that fit beside the longest answer.
    disk_bytes: artifact and checkpoints at their most. kept_bytes: the artifact, which stays. seconds: by the
    clock, with no other run on the machine. share: of the peak,
    for its main work. is_beside: it runs while another stage trains, and adds nothing to the run's time. num_gpus:
    of a node, that it holds and its processes share. notes: what was assumed.
    """

    name: str
    kind: str
    device: str
    parameters: int | None = None
    tokens: int | None = None
    steps: int | None = None
    flops: float | None = None
    read_bytes: int | None = None
    processes: Sequence[Process] = ()
    at_once: int | None = None
    longest_prompt: int | None = None
    disk_bytes: int | None = None
    kept_bytes: int = 0
    seconds: float | None = None
    share: float | None = None
    is_beside: bool = False
    num_gpus: int = 0
    notes: Sequence[str] = ()
    faults: Sequence[Fault] = ()

    @property
    def device_bytes(self) -> int:
        """Bytes on the fullest GPU, at the fullest moment: processes that share one add up, but those that have it in
        turns keep only what rests. 0 without a GPU."""
        held = [process for process in self.processes if process.device]
        together = [p for p in held if not p.own_gpus]
        turns: list[Process | None] = [p for p in together if p.resting is not None]
        shared = max(
            sum(p.on_gpu(self.num_gpus, is_working=turn in (None, p)) for p in together) for turn in turns or [None]
        )
        return max([shared, *(p.on_gpu(p.own_gpus) for p in held if p.own_gpus)])

    @property
    def host_bytes(self) -> int:
        """Bytes in a node's memory, all processes together, as they are expected to take it."""
        return sum(process.count * process.on_host for process in self.processes)

    @property
    def most_host_bytes(self) -> int:
        """Host bytes with prompts as long as the context has room for."""
        return self.host_bytes + sum(process.count * process.reserve for process in self.processes)

    def as_json(self) -> dict[str, Any]:
        more = {"device_bytes": self.device_bytes, "host_bytes": self.host_bytes}
        return {**asdict(self), **more, "faults": [fault.text(self.name) for fault in self.faults]}
