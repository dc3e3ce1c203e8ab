"""Rows that code makes: reasoning-gym's generators, conversations about an identity, tasksets of verifiers, and a
user's own function.

Their identity is name, parameters and a hash of the code that makes the rows, so it stays the same when other packages
change, and changes when the generator does.
"""

import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from nanodag.data.digests import file_sha256, folder_sha256
from nanodag.data.formats import LazyRows
from nanodag.data.sources import Block, Row, Source
from nanodag.data.urls import SourceURL
from nanodag.errors import MissingTool, SourceError
from nanodag.own_code.find import required_file
from nanodag.own_code.functions import function_at

_BLOCK_ROWS = 1024
_ROW_BYTES = 1024  # a guess: rows are made when they are taken, so a block costs nothing to hold


class GeneratedSource(Source):
    """Rows of what `make` returns: a sequence, whose rows are taken one by one, or an iterable without index.

    make is called when rows are first wanted; for an iterable once a pass, and it must give the same rows every time.
    """

    def __init__(self, identity: dict[str, Any], code: Callable[[], str], make: Callable[[], Any], where: str) -> None:
        self._identity = identity
        self._code = code
        self._make = make
        self._where = where
        self._made: Any = None

    def identity(self) -> dict[str, Any]:
        return {**self._identity, "code": self._code()}

    def blocks(self) -> list[Block] | None:
        made = self._first()
        if not (hasattr(made, "__len__") and hasattr(made, "__getitem__")):
            return None
        length = len(made)
        sizes = [min(_BLOCK_ROWS, length - first) for first in range(0, length, _BLOCK_ROWS)]
        return [Block(size, size * _ROW_BYTES) for size in sizes]

    def read(self, number: int) -> Sequence[Row]:
        made = self._first()
        first = number * _BLOCK_ROWS
        return LazyRows(min(_BLOCK_ROWS, len(made) - first), lambda index: self._checked(made[first + index]))

    def rows(self, start: int = 0, shard: int = 0, num_shards: int = 1) -> Iterator[tuple[int, Row]]:
        if self.blocks() is not None:
            yield from super().rows(start, shard, num_shards)
            return
        for index, row in enumerate(self._make()):
            if index >= start and index % num_shards == shard:
                yield index, self._checked(row)

    def _first(self) -> Any:
        if self._made is None:
            self._made = self._make()
        return self._made

    def _checked(self, row: Any) -> Row:
        if not isinstance(row, dict):
            raise SourceError(f"Source {self._where!r} must give dicts; found {row!r:.80}.")
        return row


def open_reasoning_gym(url: SourceURL) -> GeneratedSource:
    """The source of a `reasoning_gym:` URL. Parameters are the generator's own, with `seed` 0 and `size` 10,000 unless
    given; reasoning_gym is imported when the first row is read."""
    parameters = {"seed": 0, "size": 10_000, **url.parameters}
    spec = importlib.util.find_spec("reasoning_gym")
    if spec is None or spec.origin is None:
        raise MissingTool(f"Source {url.text!r} needs reasoning-gym. Run: pip install reasoning-gym")
    package = Path(spec.origin).parent

    def make() -> Any:
        import reasoning_gym

        try:
            return reasoning_gym.create_dataset(url.path, **parameters)
        except (ValueError, TypeError, AssertionError) as error:
            raise SourceError(
                f"Source {url.text!r}: reasoning_gym does not make {url.path!r} with {parameters}: {error}. "
                "Names and parameters are listed in its GALLERY.md."
            ) from error

    version = importlib.metadata.version("reasoning_gym")
    identity = {"kind": "reasoning_gym", "name": url.path, "parameters": _sorted(parameters), "version": version}
    return GeneratedSource(identity, lambda: folder_sha256(package), make, url.text)


def open_identity(url: SourceURL) -> GeneratedSource:
    """The source of an `identity:` URL (nanodag.data.identity), with `seed` 0 and `size` 1,000 unless given. The file's
    content is part of its identity."""
    from nanodag.data import identity

    parameters = {"seed": 0, "size": 1000, **url.parameters}
    path = Path(url.path).expanduser().absolute()
    if not path.is_file():
        raise SourceError(f"Source {url.text!r}: there is no file {path}. It describes who the model is, as YAML.")
    named = {"kind": "identity", "file": file_sha256(path), "parameters": _sorted(parameters)}

    def make() -> Any:
        return identity.Conversations(identity.read_persona(path), **parameters)

    return GeneratedSource(named, lambda: file_sha256(Path(identity.__file__)), make, url.text)


def open_python(url: SourceURL) -> GeneratedSource:
    """The source of a `python:` URL: what the function returns, a sequence or an iterable of dicts.

    The module is found, not imported, until rows are read. The hash in the identity is that of its file alone.
    """
    module, _, function = url.path.partition(":")
    code = required_file(module, f"Source {url.text!r}")

    def make() -> Any:
        try:
            named = function_at(url.path)
        except AttributeError as error:
            raise SourceError(f"Source {url.text!r}: {code} has no function {function}.") from error
        return named(**url.parameters)

    identity = {"kind": "python", "name": url.path, "parameters": _sorted(url.parameters)}
    return GeneratedSource(identity, lambda: file_sha256(code), make, url.text)


def open_verifiers(url: SourceURL) -> GeneratedSource:
    """The source of a `verifiers:` URL: a taskset's tasks, of one without an end those before the slice's. Parameters
    are its config's own fields.

    verifiers' own process reads them (nanodag.external_envs.verifiers_process), when the first row is read. The hash in
    the identity is that of the module's file alone.
    """
    from nanodag.external_envs import verifiers_process

    def make() -> Any:
        options = {f"taskset.{name}": value for name, value in url.parameters.items()}
        return verifiers_process.tasks_of(url.path, options, stop=url.stop)

    identity = {"kind": "verifiers", "name": url.path, "parameters": _sorted(url.parameters)}
    return GeneratedSource(identity, lambda: file_sha256(verifiers_process.module_file(url.path)), make, url.text)


def _sorted(parameters: dict[str, Any]) -> dict[str, Any]:
    return dict(sorted(parameters.items()))
