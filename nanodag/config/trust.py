"""Which code of a user's own a pipeline may name: modules beside its file, and those of its `trusted_modules`.

Sources (`python:`), adapters, rewards and the other entries of RL name functions as `module:function`. Presets and
overrides come from elsewhere too, as a flow run's parameters do; they are data, so they may choose among functions that
the pipeline file vouches for, and no others. `trusted_modules` stands in the file alone (nanodag.config.resolve).
"""

import os
import stat
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from nanodag import registry
from nanodag.config.kinds.evaluation import EvalStage
from nanodag.config.kinds.rl import RLStage
from nanodag.config.pipeline import Pipeline
from nanodag.config.rl_entries import entries_in
from nanodag.config.section import found_in
from nanodag.data.config import SourceConfig
from nanodag.data.lists import GENERATORS
from nanodag.data.urls import parse_url
from nanodag.errors import ConfigError
from nanodag.host.folders import PROJECT
from nanodag.own_code.find import file_of

SHIPPED = frozenset(f"nanodag.data.lists:{name}" for name in GENERATORS)
OURS = ("nanodag", "flows", "tasks", "tests", "benchmarks")  # beside the pipeline file that comes with nanodag


def check_trust(pipeline: Pipeline, file: Path) -> None:
    """Raise ConfigError for the first function that a pipeline names without its file vouching for the module."""
    check_forms(pipeline, file)
    for where, name in named_functions(pipeline):
        if name in SHIPPED or registry.is_shipped(name):
            continue
        module = name.partition(":")[0]
        if _is_below(module, pipeline.trusted_modules) or is_beside(module, file.parent):
            continue
        if module.partition(".")[0] in sys.stdlib_module_names:
            raise ConfigError(f"{where}: {name!r} names {module}, a module of Python's own, and no function of yours.")
        if file_of(module, [file.parent]) is None:
            raise ConfigError(
                f"{where}: {name!r} cannot be had: there is no module {module} beside {file}, on PYTHONPATH or among "
                "the installed packages."
            )
        raise ConfigError(
            f"{where} names {name!r}, and the module {module} neither stands beside {file} nor is one of its "
            f"trusted_modules. Put the function into a module there; or, if whatever {module} can do may be done here, "
            f"write trusted_modules: [{module}] into that file: an override cannot say so."
        )


def check_forms(pipeline: Pipeline, file: Path) -> None:
    """Raise ConfigError for a benchmark's form that is a YAML file from elsewhere: such a file names functions, which
    are imported from beside it."""
    for name, stage in pipeline.stages.items():
        for benchmark in stage.benchmarks if isinstance(stage, EvalStage) else ():
            form = benchmark.form
            of_lm_eval = form.startswith("lm_eval:")
            parts = Path(form.removeprefix("lm_eval:")).parts
            is_elsewhere = (
                (".." in parts or form.removeprefix("lm_eval:").startswith("/"))
                if of_lm_eval
                else form.endswith(".yaml") and not Path(form).resolve().is_relative_to(file.parent.resolve())
            )
            if is_elsewhere:
                raise ConfigError(
                    f"stage {name}: the form {form} of benchmark {benchmark.name} lies elsewhere, and a form may name "
                    f"functions. Put it below {file.parent}, or name one of lm-eval's as lm_eval:folder/file.yaml."
                )


def check_owner(file: Path) -> None:
    """Raise ConfigError for a pipeline file that another user wrote, or may write: it says which code may run."""
    found = file.stat()
    if found.st_uid not in (os.getuid(), 0) or found.st_mode & stat.S_IWOTH:
        raise ConfigError(
            f"{file} belongs to user {found.st_uid} with mode {stat.filemode(found.st_mode)}; a pipeline file says "
            "which code may run, so it must be yours, and not writable by everybody."
        )


def named_functions(pipeline: Pipeline) -> Iterator[tuple[str, str]]:
    """Where in a pipeline a function stands, and its `module:function`."""
    for source in sources_in(pipeline):
        if (url := parse_url(source.url)).kind == "python":
            yield source.url, url.path
        if ":" in source.adapter:
            yield f"adapter of {source.url}", source.adapter
    for name, stage in pipeline.stages.items():
        if isinstance(stage, RLStage):
            for function in functions_in(stage):
                yield f"stage {name}", function


def sources_in(value: Any) -> list[SourceConfig]:
    """Every source that a config names, at any depth."""
    return [source for _, source in found_in(value, SourceConfig)]


def functions_in(stage: Any) -> list[str]:
    """The functions of the user's own that a stage names, as `package.module:function`, wherever in it."""
    return [own for _, one in entries_in(stage) if (own := one.own_function)]


def is_beside(module: str, folder: Path) -> bool:
    """True when the module that Python would import under that name lies in a folder, or in a package of it."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or (top in OURS and folder.resolve() == PROJECT.resolve()):
        return False
    elsewhere = [path for path in sys.path if Path(path).resolve() != folder.resolve()]
    return PathFinder.find_spec(top, [str(folder)]) is not None and PathFinder.find_spec(top, elsewhere) is None


def _is_below(module: str, packages: Sequence[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)
