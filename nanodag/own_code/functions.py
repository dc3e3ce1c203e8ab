"""Functions that a config names as `module:function`, or a form as `module.function`."""

import importlib.util
import inspect
import sys
from pathlib import Path
from typing import Any

from nanodag.errors import ConfigError
from nanodag.own_code.find import search_given


def function_at(path: str) -> Any:
    """The object that `module:name` names.

    A function or class must come from that module's own package: the config vouches for a module
    (nanodag.config.trust), not for all that it imports, such as `subprocess.getoutput`.

    Raises ImportError or AttributeError when there is no such thing, ConfigError when it comes from elsewhere.
    """
    search_given()  # a fresh interpreter, as a reward's or an environment's
    module, _, name = path.partition(":")
    target = getattr(importlib.import_module(module), name)
    home = getattr(target, "__module__", None) or "builtins"  # None of some functions in C
    if inspect.ismodule(target) or (
        (inspect.isroutine(target) or inspect.isclass(target)) and home.partition(".")[0] != module.partition(".")[0]
    ):
        raise ConfigError(
            f"{path!r} comes from {home}, and is only imported by {module}. Name it where it is defined, or write a "
            f"function in {module} that calls it."
        )
    return target


def function_in(file: Path, name: str) -> Any:
    """The object called `name` in a Python file, which this process runs once. Raises AttributeError when there is no
    such thing, and whatever the file raises."""
    module = str(file.with_suffix(""))  # as lm-eval calls it
    if module not in sys.modules:
        spec = importlib.util.spec_from_file_location(module, file)
        assert spec is not None and spec.loader is not None
        loaded = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
        sys.modules[module] = loaded
    return getattr(sys.modules[module], name)
