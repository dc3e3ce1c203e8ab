"""Runs SGLang's server, in SGLang's own environment: `<its python> sglang_shim.py PARENT -- OPTIONS`.

This is `python -m sglang.launch_server OPTIONS` of SGLang 0.5.23, and before it three things, the first two only where
NANODAG_SGLANG_CPU=1:

1. `sgl_kernel`: the CUDA kernels are imported when SGLang starts, and want libcuda. A stand-in is put in their place
   whose functions raise when they are called. With the options that nanodag gives on a CPU none is called.
2. torchvision's operators: torchvision gives shape rules to `torchvision::nms` and `qnms`, operators of its compiled
   library, which a CPU build of torch may not load. They are declared, without being implemented.
3. The server ends when the process of that number ends, which started it, so that none is left behind.

SGLang starts its parts with multiprocessing's `spawn`, which runs the top of this file again in each of them: that is
why 1 and 2 happen at import. Nothing else of SGLang is changed. This file may import nothing of nanodag.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import threading
import time
import types
from collections.abc import Sequence

CPU_VARIABLE = "NANODAG_SGLANG_CPU"
TOKEN_VARIABLE = "NANODAG_SAMPLER_TOKEN"  # nanodag.inference.doors
POLL_S = 0.5
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


class _StandIn(types.ModuleType):
    """Has every attribute that is asked for."""

    def __getattr__(self, name: str) -> _Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds sgl_kernel and everything below it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] != STAND_IN:
            return None
        return importlib.util.spec_from_loader(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _declare_operators() -> object:
    """The library must be kept: the operators go with it."""
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for operator in OPERATORS:
        library.define(operator)
    return library


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_S)
    sys.stderr.write(f"the parent process {parent} is gone\n")
    sys.stderr.flush()
    os._exit(1)  # its parts end with it: SGLang asks the kernel for that


if os.environ.get(CPU_VARIABLE) == "1":
    sys.meta_path.insert(0, _Finder())
    _KEPT = _declare_operators()


def main() -> None:
    """Serve until a signal ends it."""
    split = sys.argv.index("--")
    own, options = sys.argv[1:split], sys.argv[split + 1 :]
    threading.Thread(target=_end_with_parent, args=(int(own[0]),), daemon=True).start()
    if token := os.environ.pop(TOKEN_VARIABLE, ""):
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
