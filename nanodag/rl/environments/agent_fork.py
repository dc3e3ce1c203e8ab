"""An agent's function in a fork, in whichever interpreter has its packages. Standard library only."""

import asyncio
import importlib
import inspect
import os
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from nanodag.children.fork_server import Line, answering


def make(path: str, folders: Sequence[str]) -> tuple[None, Callable[[Line], None]]:
    """Import the function's module, and serve a task by what the function returns. path: `module:function`. folders:
    where the module is looked for, after the interpreter's own."""
    sys.path += [folder for folder in folders if folder not in sys.path]
    module, _, name = path.partition(":")
    return None, answering(partial(_returned, getattr(importlib.import_module(module), name)))


def _returned(function: Callable[[Any], Any], task: Mapping[str, Any]) -> dict[str, Any]:
    os.environ |= {
        "OPENAI_BASE_URL": task["base_url"],
        "OPENAI_API_KEY": task["api_key"],
        "NANODAG_SEED": str(task["seed"]),
    }
    random.seed(task["seed"])
    returned = function(SimpleNamespace(**task))
    return {"returned": asyncio.run(returned) if inspect.iscoroutine(returned) else returned}
