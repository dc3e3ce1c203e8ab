"""Modules of a user's own that may be imported: those beside the pipeline file, and those that it trusts."""

import stat
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from nanodag.errors import ConfigError
from nanodag.host.folders import PROJECT, may_be_of_others
from nanodag.own_code.find import OURS, required_file


@dataclass(frozen=True, kw_only=True)
class Voucher:
    """A pipeline file, which vouches for the modules beside it and for its trusted_modules."""

    file: Path
    trusted_modules: Sequence[str]

    def check(self, where: str, name: str) -> None:
        """Raise ConfigError for a `module:name` whose module the file does not vouch for."""
        module, folder = name.partition(":")[0], self.file.parent
        if module.partition(".")[0] in sys.stdlib_module_names:  # whatever trusted_modules say: some have no file
            raise ConfigError(f"{where}: {name!r} names {module}, a module of Python's own, and no function of yours.")
        if any(module == package or module.startswith(f"{package}.") for package in self.trusted_modules):
            return
        if is_beside(module, folder):
            if may_be_of_others(folder.stat()):
                raise ConfigError(
                    f"{where} names {name!r}, and {folder} belongs to another user or is writable by everybody, so "
                    "its modules are not run. Move the pipeline file and its modules into a folder of your own."
                )
            return
        required_file(module, f"{where} names {name!r}", [folder])
        raise ConfigError(
            f"{where} names {name!r}, and the module {module} neither stands beside {self.file} nor is one of its "
            f"trusted_modules. Put the function into a module there; or, if whatever {module} can do may be done here, "
            f"write trusted_modules: [{module}] into that file: an override cannot say so."
        )


def check_owner(file: Path) -> None:
    """Raise ConfigError for a pipeline file that another user wrote, or may write: it says which code may run."""
    for status in (file.lstat(), file.stat()):  # of a link, and of what it leads to
        if may_be_of_others(status):
            raise ConfigError(
                f"{file} belongs to user {status.st_uid} with mode {stat.filemode(status.st_mode)}; a pipeline file "
                "says which code may run, so it must be yours, and not writable by everybody."
            )


def is_beside(module: str, folder: Path) -> bool:
    """True when the module that Python would import under that name lies in a folder, or in a package of it with
    __init__.py: the store is a folder below it, too."""
    top = module.partition(".")[0]
    if not all(part.isidentifier() for part in module.split(".")):
        return False
    if top in sys.stdlib_module_names or (top in OURS and folder.resolve() == PROJECT.resolve()):
        return False
    elsewhere = [path for path in sys.path if Path(path).resolve() != folder.resolve()]
    spec = PathFinder.find_spec(top, [str(folder)])
    return spec is not None and spec.origin is not None and PathFinder.find_spec(top, elsewhere) is None
