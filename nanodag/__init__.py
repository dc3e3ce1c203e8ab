"""nanodag: train a chat model from raw text to GRPO as one resumable DAG. This package knows nothing of Prefect."""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanodag.python_interface import RunView, StageView, StoreView, open_store, plan, run

__all__ = ["RunView", "StageView", "StoreView", "open_store", "plan", "run"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("nanodag.python_interface"), name)
    raise AttributeError(f"module 'nanodag' has no attribute {name!r}")


class _Callable(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any:
        return getattr(import_module("nanodag.python_interface"), self.__name__.rpartition(".")[2])(*args, **options)


for _name in ("run", "plan"):  # importing anything in these packages puts them in the functions' place
    import_module(f"nanodag.{_name}").__class__ = _Callable
