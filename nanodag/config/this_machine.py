"""This machine as `auto` sees it: its hardware, and whether SGLang is installed for its GPUs."""

import os
from dataclasses import replace

from nanodag.host.machine import Machine, detect
from nanodag.inference.sglang_install import PYTHON_VARIABLE, default_folder, is_installed


def this_machine() -> Machine:
    """What a run's record keeps, so that SGLang, installed later, does not change a run that is under way."""
    machine = detect()
    return replace(machine, sglang=machine.gpu is not None and _has_sglang())


def _has_sglang() -> bool:
    """Whether SGLang for GPUs is installed here, or its interpreter named."""
    return bool(os.environ.get(PYTHON_VARIABLE)) or is_installed(default_folder("cuda"), "cuda")
