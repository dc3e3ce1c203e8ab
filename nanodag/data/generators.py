"""Rows that code makes: reasoning-gym's generators, talks about an identity, verifiers' tasksets, a user's function.

Their identity is name, parameters and a hash of the code that makes the rows: it changes with that, and no other code.
"""

import importlib.metadata
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from nanodag.data.digests import file_sha256, folder_sha256
from nanodag.data.sources import Block, LazyRows, Row, Source
from nanodag.data.urls import SourceURL
from nanodag.errors import SourceError
from nanodag.own_code.find import required_file
from nanodag.own_code.functions import function_at

_BLOCK_ROWS = 1024
_ROW_BYTES = 1024  # a guess: rows are made when they are taken, so a block costs nothing to hold


class GeneratedSource(Source):
    """Rows of what `make` returns: a sequence, whose rows are taken one by one, or an iterable without index.

    make is called when rows are first wanted; for an iterable once a pass, and it must give the same rows every time.
    """

    def __init__(self, identity: dict[str, Any], code: Callable[[], str], make: Callable[[], Any], where: str) -> None:
        self._identity, self._code, self._make, self._where = identity, code, make, where

    def identity(self) -> dict[str, Any]:
        return {**self._identity, "code": self._code()}

    def blocks(self) -> list[Block] | None:
        if not (hasattr(self._made, "__len__") and hasattr(self._made, "__getitem__")):
            return None
        length = len(self._made)
        sizes = [min(_BLOCK_ROWS, length - first) for first in range(0, length, _BLOCK_ROWS)]
        return [Block(size, size * _ROW_BYTES) for size in sizes]

    def read(self, number: int) -> Sequence[Row]:
        made, first = self._made, number * _BLOCK_ROWS
        return LazyRows(min(_BLOCK_ROWS, len(made) - first), lambda index: self._checked(made[first + index]))

    def stream(self) -> Iterator[Callable[[], Row]]:
        return (partial(self._checked, row) for row in self._make())

    @cached_property
    def _made(self) -> Any:
        return self._make()

    def _checked(self, row: Any) -> Row:
        if not isinstance(row, dict):
            raise SourceError(f"Source {self._where!r} must give dicts; found {row!r:.80}.")
        return row


def open_reasoning_gym(url: SourceURL) -> GeneratedSource:
    """The source of a `reasoning_gym:` URL. Parameters are the generator's own, with `seed` 0 and `size` 10,000 unless
    given; reasoning_gym is imported when the first row is read."""
    parameters = {"seed": 0, "size": 10_000, **url.parameters}
    package = required_file("reasoning_gym", f"Source {url.text!r}").parent

    def make() -> Any:
        import reasoning_gym

        try:
            return reasoning_gym.create_dataset(url.path, **parameters)
        except (ValueError, TypeError, AssertionError) as error:
            raise SourceError(
                f"Source {url.text!r}: reasoning_gym does not make {url.path!r} with {parameters}: {error}. "
                "Names and parameters are listed in its GALLERY.md."
            ) from error

    identity = {**_identity(url, parameters), "version": importlib.metadata.version("reasoning_gym")}
    return GeneratedSource(identity, lambda: folder_sha256(package), make, url.text)


def open_identity(url: SourceURL) -> GeneratedSource:
    """The source of an `identity:` URL: `seed` 0, `size` 1,000 unless given. The file's content is in its identity."""
    from nanodag.data import identity

    parameters = {"seed": 0, "size": 1000, **url.parameters}
    path = Path(url.path).expanduser().absolute()
    if not path.is_file():
        raise SourceError(f"Source {url.text!r}: there is no file {path}. It describes who the model is, as YAML.")
    named = {"kind": "identity", "file": file_sha256(path), "parameters": dict(sorted(parameters.items()))}

    def make() -> Any:
        return identity.Conversations(identity.read_persona(path), **parameters)

    return GeneratedSource(named, lambda: file_sha256(Path(identity.__file__)), make, url.text)


def open_python(url: SourceURL) -> GeneratedSource:
    """The source of a `python:` URL: what the function returns, a sequence or an iterable of dicts.

    The module is found, not imported, until rows are read. The hash in the identity is that of its file alone;
    for a generator of nanodag also that of lists.py, whose rows and split these share.
    """
    module, _, function = url.path.partition(":")
    code = required_file(module, f"Source {url.text!r}")

    def make() -> Any:
        try:
            named = function_at(url.path)
        except AttributeError as error:
            raise SourceError(f"Source {url.text!r}: {code} has no function {function}.") from error
        return named(**url.parameters)

    def code_hash() -> str:
        shared = code.with_name("lists.py") if module.startswith("nanodag.data.") else code  # rows and split of ours
        return "".join(map(file_sha256, dict.fromkeys((code, shared))))

    return GeneratedSource(_identity(url, url.parameters), code_hash, make, url.text)


def open_verifiers(url: SourceURL) -> GeneratedSource:
    """The source of a `verifiers:` URL: a taskset's tasks, of one without an end those before the slice's.

    Parameters are fields of its config. verifiers' own process reads the tasks (nanodag.external_envs.
    verifiers_process), when the first row is read. The hash in the identity is that of the module's file alone.
    """
    from nanodag.external_envs import verifiers_process

    def make() -> Any:
        options = {f"taskset.{name}": value for name, value in url.parameters.items()}
        return verifiers_process.tasks_of(url.path, options, stop=url.stop)

    def code() -> str:
        return file_sha256(verifiers_process.module_file(url.path))

    return GeneratedSource(_identity(url, url.parameters), code, make, url.text)


def _identity(url: SourceURL, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"kind": url.kind, "name": url.path, "parameters": dict(sorted(parameters.items()))}
