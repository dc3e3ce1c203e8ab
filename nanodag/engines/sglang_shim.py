"""Runs SGLang's server, in SGLang's own environment: `<its python> sglang_shim.py OPTIONS`.

This is `python -m sglang.launch_server OPTIONS` of SGLang 0.5.23, and before it four things, the first two only where
NANODAG_SGLANG_CPU=1:

1. `sgl_kernel`: the CUDA kernels are imported when SGLang starts, and want libcuda. A stand-in is put in their place
   whose functions raise when they are called. With the options that nanodag gives on a CPU none is called.
2. torchvision's operators: torchvision gives shape rules to `torchvision::nms` and `qnms`, operators of its compiled
   library, which a CPU build of torch may not load. They are declared, without being implemented.
3. Each process ends when the one that started it ends. SGLang asks the kernel for that too, but only once a part has
   imported all that it needs: parts of a server that was killed while it started stayed for ever.
4. The store where ranks meet listens on their address only; torch's own listens on every address of the machine. And a
   rank joins no trainer's group of NCCL that has another version of it.

SGLang starts its parts with multiprocessing's `spawn`, which runs the top of this file again in each of them: that is
why all four happen at import. Nothing else of SGLang is changed. Of nanodag this file may import only what needs no
more than the standard library and torch.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Sequence
from pathlib import Path

_ROOT = str(Path(__file__).resolve().parents[2])  # where nanodag is: not installed in SGLang's environment
_WAS_THERE = _ROOT in sys.path
if not _WAS_THERE:
    sys.path.append(_ROOT)
from nanodag.inference.server_variables import end_with_starter, take_token  # noqa: E402 - it is found by that path

CPU_VARIABLE = "NANODAG_SGLANG_CPU"
STAND_IN = "sgl_kernel"
OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


class _Missing:
    """A function or class of a package that is not there: says so when it is used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *arguments: object, **keywords: object) -> None:
        raise RuntimeError(f"{self._name} needs CUDA; this server was started for a CPU (--device cpu)")

    def __getattr__(self, name: str) -> "_Missing":
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self._name}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds sgl_kernel and everything below it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] != STAND_IN:
            return None
        return importlib.util.spec_from_loader(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        """As usual."""

    def exec_module(self, module: types.ModuleType) -> None:
        """Give it every attribute."""
        module.__dict__["__getattr__"] = _Missing(module.__name__).__getattr__


if os.environ.get(CPU_VARIABLE) == "1":
    sys.meta_path.insert(0, _Finder())
    import torch

    LIBRARY = torch.library.Library("torchvision", "DEF")  # kept: the operators go with it
    for operator in OPERATORS:
        LIBRARY.define(operator)
if __name__ in ("__main__", "__mp_main__"):  # the server, and what it spawns
    end_with_starter()
    import sglang  # noqa: F401 - it sets variables that torch reads when it is imported

    from nanodag.inference.bound_store import BoundStore

    # Not by its attribute: torch.distributed has a function of that name in the module's place.
    sys.modules["torch.distributed.rendezvous"].TCPStore = BoundStore  # type: ignore[attr-defined]
if not _WAS_THERE:
    sys.path.remove(_ROOT)  # by its name: what was imported since may have added others


def main() -> None:
    """Serve until a signal ends it."""
    options = sys.argv[1:]
    if token := take_token():
        options.append(f"--api-key={token}")  # here, where no other user can read it
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    try:
        run_server(prepare_server_args(options))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
