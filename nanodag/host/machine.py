"""One description of the hardware that a run has: of this machine, or of another one by a text. No torch.

`8xH100`, `1x24GB`, `8x96GB:500` (memory and TFLOPS), `2x8xH100` (two nodes), `cpu:2:avx2:16GiB` (cores, instruction
set, memory); `+sglang` behind it where SGLang is installed. What is `auto` in a pipeline follows from it alone
(nanodag.config.derive), so a run's record keeps it as such a text.
"""

import functools
import logging
import os
import re
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from nanodag.errors import ConfigError
from nanodag.host.beside import table_beside
from nanodag.host.processor import SETS, control_group_files, instruction_set, read_limit, usable_cores

log = logging.getLogger(__name__)

GIB = 1 << 30
FAST_BF16_CAPABILITY = 8.0  # NVIDIA's Ampere
FP8_CAPABILITY = 8.9  # NVIDIA's Ada
FP32_SHARE = 0.06  # of a GPU's bfloat16 peak: 67 of 989 TFLOPs on an H100
# What a GPU's host is taken to have where only the GPUs are named: less than any vendor sells with them.
CORES_PER_GPU = 8
MEMORY_PER_GPU = 96 * GIB
ASSUMED_DISK = 1 << 40
SGLANG_MARK = "+sglang"
NODES_VARIABLE = "NANODAG_NODES"
BYTES_PER_FLOP = 3.4e-3  # of memory bandwidth, where only TFLOPS are said: an H100's, less than most GPUs have


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A model of GPU. memory: bytes. capability: CUDA's, as 9.0. peak: dense bfloat16 FLOPs a second and bandwidth:
    bytes a second, from the vendor's data sheet; 0 where it is not known."""

    name: str
    memory: int
    capability: float
    peak: float = 0.0
    bandwidth: float = 0.0


@dataclass(frozen=True)
class ListedGpu:
    """One line of nvidia-smi. driver: its version, `580.65.06`."""

    index: str
    uuid: str
    gpu: Gpu
    driver: str


_UNITS = {"memory": GIB, "peak": 1e12, "bandwidth": 1e9}
GPUS = tuple(
    Gpu(**{name: value * _UNITS[name] if name in _UNITS else value for name, value in row.items()})
    for row in table_beside(__file__, "gpus.yaml")
)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One node's hardware, and how many such nodes there are.

    cores: usable, by affinity and quota. instruction_set: one of SETS. memory: bytes of host memory that
    may be used. disk: bytes free where the store lies. num_gpus: on each node, all of one model. sglang: whether SGLang
    for GPUs is installed, which decides settings as hardware does.
    """

    cores: int
    instruction_set: str
    memory: int
    disk: int = ASSUMED_DISK
    gpu: Gpu | None = None
    num_gpus: int = 0
    nodes: int = 1
    sglang: bool = False

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """`cuda` where it has GPUs, else `cpu`."""
        return "cuda" if self.gpu is not None else "cpu"

    def multiplies_bf16_fast(self, device: str) -> bool:
        """True where it multiplies bfloat16 at least twice as fast as float32 on a device, `cpu` or `cuda`."""
        if device == "cuda":
            return self.gpu is None or self.gpu.capability >= FAST_BF16_CAPABILITY
        return self.core_flops("bf16") >= 2 * self.core_flops("fp32")

    def multiplies_fp8(self, device: str) -> bool:
        """True where it multiplies float8, at twice the speed of bfloat16."""
        return device == "cuda" and (self.gpu is None or self.gpu.capability >= FP8_CAPABILITY)

    def core_flops(self, precision: Literal["fp32", "bf16"]) -> float:
        """FLOPs a second of one core."""
        return 1e9 * float(SETS[self.instruction_set][precision])

    @property
    def short(self) -> str:
        """Name as a person would call it: `8xH100`, or what `str` says of a machine without a GPU."""
        return str(self) if self.gpu is None else str(self).partition(":")[0]

    def __str__(self) -> str:
        """The text that `machine_of` reads as this machine, but for its disk."""
        host = f"{self.cores}:{self.instruction_set}:{_gib(self.memory)}{SGLANG_MARK if self.sglang else ''}"
        if self.gpu is None:
            return f"cpu:{host}" if self.nodes == 1 else f"{self.nodes}xcpu:{host}"
        gpu = self.gpu
        is_named = gpu in GPUS or re.fullmatch(r"\d+GB(:\d+)?", gpu.name)
        name = gpu.name if is_named else f"{gpu.name}@{_gib(gpu.memory)}@{gpu.capability}"
        nodes = f"{self.nodes}x" if self.nodes > 1 else ""
        return f"{nodes}{self.num_gpus}x{name.replace(' ', '_')}:{host}"


# TFLOPS and not the host's cores, behind which two more things would stand.
_GPU = r"\d+GB:\d+(?=$|(?::[^:]+){3}$)|[^:]+"
_MACHINE = re.compile(rf"(?:(?P<nodes>\d{{1,4}})x)?(?:(?P<count>\d{{1,3}})x(?P<gpu>{_GPU})|cpu)(?::(?P<host>.+))?")


def machine_of(text: str) -> Machine:
    """The machine that a text describes: `cpu:CORES:INSTRUCTIONS:MEMORY` or `COUNTxGPU`, with the host's
    `:CORES:INSTRUCTIONS:MEMORY` behind it where it is known, and `NODESx` before it. GPU: a name of GPUS, or the memory
    of any and its dense bfloat16 TFLOPS: `24GB`, `96GB:500`. `+sglang` may stand at the end. Raises ConfigError, naming
    the part."""
    if text.endswith(SGLANG_MARK):
        return replace(machine_of(text.removesuffix(SGLANG_MARK)), sglang=True)
    match = _MACHINE.fullmatch(text)
    if match is None or (not match["gpu"] and not match["host"]):
        raise _wrong(text, "is of neither form")
    nodes, count = int(match["nodes"] or 1), int(match["count"] or 0)
    assumed = f"{CORES_PER_GPU * count}:avx512_bf16:{_gib(MEMORY_PER_GPU * count)}"
    host = (match["host"] or assumed).split(":")
    if len(host) != 3:
        raise _wrong(text, f"names {len(host)} things of the host, and not its cores, instruction set and memory")
    gpu = _gpu_of(match["gpu"].replace("_", " "), text) if match["gpu"] else None
    if not nodes or (gpu is not None and not count):
        raise _wrong(text, "has none of something")
    if not re.fullmatch(r"[1-9]\d{0,3}", host[0]):
        raise _wrong(text, f"has {host[0]!r:.20} cores")
    if host[1] not in SETS:
        raise _wrong(text, f"has the instruction set {host[1]!r}, and there are {', '.join(SETS)}")
    return Machine(
        cores=int(host[0]),
        instruction_set=host[1],
        memory=_bytes(host[2], text),
        gpu=gpu,
        num_gpus=count,
        nodes=nodes,
    )


def _gpu_of(name: str, text: str) -> Gpu:
    for gpu in GPUS:
        if gpu.name == name:
            return gpu
    if said := re.fullmatch(r"([1-9]\d{0,4})GB(?::([1-9]\d{0,4}))?", name):
        memory = int(0.97 * int(said[1]) * GIB)  # a card's GB are GiB, less what CUDA takes
        peak = 1e12 * int(said[2] or 0)
        peak, bandwidth = (peak, BYTES_PER_FLOP * peak) if peak else (71e12, 600e9)
        return Gpu(name=name, memory=memory, capability=8.6, peak=peak, bandwidth=bandwidth)
    described = re.fullmatch(r"(.+)@(\d{1,6}(?:\.\d{1,2})?)GiB@(\d{1,2}\.\d)", name)
    if described is not None:
        return Gpu(name=described[1], memory=int(float(described[2]) * GIB), capability=float(described[3]))
    names = ", ".join(gpu.name.replace(" ", "_") for gpu in GPUS)
    raise _wrong(text, f"names the GPU {name!r}; known are {names}, or describe it by memory and TFLOPS, as 96GB:500")


def _bytes(size: str, text: str) -> int:
    match = re.fullmatch(r"(\d{1,7}(?:\.\d{1,6})?)(GiB|GB|TiB|TB)", size)
    if match is None or not float(match[1]):
        raise _wrong(text, f"has {size!r:.20} memory, and not some GiB")
    unit = {"GiB": GIB, "GB": 10**9, "TiB": GIB << 10, "TB": 10**12}[match[2]]
    return _rounded(int(float(match[1]) * unit))


def _wrong(text: str, why: str) -> ConfigError:
    return ConfigError(
        f"Machine {text!r:.80} {why}. Write it as in 8xH100, 1x24GB, 2x8xH100, cpu:2:avx2:16GiB or "
        "1xH100:16:avx512_bf16:128GiB."
    )


def detect(folder: Path | None = None) -> Machine:
    """This machine, and as many nodes like it as the job of a cluster's scheduler says that it has. folder: where the
    store lies, whose disk counts; it need not be there yet."""
    nodes, folder = os.environ.get(NODES_VARIABLE) or "1", (folder or Path.cwd()).absolute()
    if not re.fullmatch(r"[1-9]\d{0,3}", nodes):
        raise ConfigError(f"{NODES_VARIABLE} is {nodes!r:.20}; it says how many nodes a job has, 1 to 9999.")
    gpus = [device.gpu for device in usable_gpus()]
    return Machine(
        cores=usable_cores(),
        instruction_set=instruction_set(),
        memory=_rounded(usable_memory()),
        disk=shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free,
        gpu=min(gpus, key=lambda gpu: (gpu.memory, gpu.capability), default=None),  # the weakest model
        num_gpus=len(gpus),
        nodes=int(nodes),
    )


def usable_memory() -> int:
    """Bytes of memory that this process may use: the machine's, or less where its control group says so."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in control_group_files("memory.max"):
        text = read_limit(path)
        if text.isdecimal():
            limits.append(int(text))
    return min(limits)


def _gib(memory: int) -> str:
    """Memory as a machine's text has it, exact to a hundredth of a GiB."""
    return f"{memory / GIB:.2f}".rstrip("0").rstrip(".") + "GiB"


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them; one where nothing tells how many."""
    named = _named_gpus()
    return ([device.index for device in _listed_gpus()] or ["0"]) if named is None else named


def usable_gpus() -> tuple[ListedGpu, ...]:
    """The GPUs that CUDA may use here, as nvidia-smi lists them."""
    listed, names = _listed_gpus(), _named_gpus()
    if names is None:
        return listed
    uuids = tuple(name for name in names if name[:1] in ("G", "M"))  # GPU-..., MIG-...
    return tuple(device for device in listed if device.index in names or device.uuid.startswith(uuids))


def _named_gpus() -> list[str] | None:
    """GPUs that CUDA_VISIBLE_DEVICES names; None where it is not set."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if visible is None else [name.strip() for name in visible.split(",") if name.strip()]


@functools.cache
def _listed_gpus() -> tuple[ListedGpu, ...]:
    asked = "index,uuid,name,memory.total,compute_cap,driver_version"
    command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        rows = [[part.strip() for part in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
        return tuple(
            ListedGpu(row[0], row[1], gpu_of_cuda(row[2], int(row[3]) << 20, float(row[4])), row[5]) for row in rows
        )
    except FileNotFoundError:
        return ()
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        message = getattr(error, "stdout", None) or getattr(error, "stderr", None) or error
        log.warning("nvidia-smi is here and describes no GPU, so this machine counts as one without: %.300s", message)
        return ()


def gpu_of_cuda(name: str, memory: int, capability: float) -> Gpu:
    """The GPU that CUDA describes so: the one of GPUS whose name's parts are all in it (`A100-40GB` in
    `A100-SXM4-40GB`) and whose memory is like it, which a laptop's is not; else one without peak and bandwidth."""
    for gpu in GPUS:
        if all(part in name for part in re.split("[- ]", gpu.name)) and abs(gpu.memory - memory) < 0.1 * memory:
            return gpu
    return Gpu(name=re.sub(r"[^A-Za-z0-9 .-]", "", name), memory=_rounded(memory), capability=capability)


def _rounded(memory: int) -> int:
    """Down to a quarter of a GiB: what a machine's text can say, and the same however much the kernel took today."""
    return memory // (GIB // 4) * (GIB // 4)
