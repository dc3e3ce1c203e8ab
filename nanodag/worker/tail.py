"""The lines of a file that another process writes."""

from pathlib import Path


class Tail:
    """New whole lines of a growing file. offset: where they begin; what lies before has been read."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self._path = path
        self._offset = offset

    @classmethod
    def from_now(cls, path: Path) -> "Tail":
        """Of what is written from now on."""
        return cls(path, path.stat().st_size if path.exists() else 0)

    def lines(self) -> list[str]:
        """What has been written since the last call."""
        if not self._path.exists():
            return []
        if self._path.stat().st_size < self._offset:  # rewritten by a worker that went back to a checkpoint
            self._offset = 0
        with self._path.open("rb") as stream:
            stream.seek(self._offset)
            block = stream.read()
        whole, _, _ = block.rpartition(b"\n")
        if not whole:
            return []
        self._offset += len(whole) + 1
        return whole.decode(errors="replace").split("\n")
