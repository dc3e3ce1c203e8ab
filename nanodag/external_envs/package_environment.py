"""Makes the virtual environment of a guest: a package whose own requirements would break ours. No torch here.

What goes into it stands in a list of pins. Interrupted, the installation goes on where it was when it is called again;
finished, it leaves a mark, and is not done again until the list changes. What pip says goes to `install.log` in the
environment's folder.
"""

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from nanodag.children.child import start_child
from nanodag.errors import MissingTool
from nanodag.errors.words import duration
from nanodag.host.folders import user_cache

MARK = "installed"
LOG_NAME = "install.log"
LOOK_EVERY_S = 0.5
TAIL_LINES = 20
STOP_TIMEOUT_S = 30.0

Say = Callable[[str], None]


def silent(text: str) -> None:
    """Says nothing."""


@dataclass(frozen=True, kw_only=True)
class PackageEnvironment:
    """Environment of a guest. name: of its folder. package: the distribution that it is for. listed: the list of pins.
    variable: names the interpreter of one that exists. command: what makes it, for messages."""

    name: str
    package: str
    listed: Path
    variable: str
    command: str

    @property
    def folder(self) -> Path:
        """Default folder."""
        return user_cache() / self.name

    @property
    def pins(self) -> list[str]:
        """The lines of the list, `package==version`."""
        lines = self.listed.read_text(encoding="utf-8").splitlines()
        return [line for line in lines if "==" in line and line[0] != "#"]

    def is_installed(self, folder: Path) -> bool:
        """True when it was finished with the list as it is now."""
        mark = folder / MARK
        return mark.is_file() and mark.read_text() == self._digest()

    def find_python(self, configured: str = "auto", *, setting: str = "", who: str) -> Path:
        """The interpreter: the one that is configured (`auto` for none), else the one that the variable names, else of
        the environment that was made. setting: where it is configured. who: needs it. Raises MissingTool where there is
        none."""
        named = os.environ.get(self.variable, "") if configured == "auto" else configured
        places = f"{setting} or the variable {self.variable}" if setting else f"the variable {self.variable}"
        if named:
            if not Path(named).is_file():
                raise MissingTool(f"There is no interpreter {named}, which {places} names.")
            return Path(named)
        if not self.is_installed(self.folder):
            raise MissingTool(
                f"{who} in an environment of its own, and there is none in {self.folder}. Make it: {self.command}. Or "
                f"name the interpreter of one that exists: {places}."
            )
        return self.folder / "bin" / "python"

    def install(self, folder: Path, say: Say, show: Say = silent, *, first: Callable[[], None] = lambda: None) -> Path:
        """Make the environment, or finish it; returns its interpreter. Raises MissingTool when a step fails. say gets
        what is begun and done, show twice a second what pip says. first: called when there is an interpreter, before
        the pins are installed."""
        python = folder / "bin" / "python"
        if self.is_installed(folder):
            say(f"It is there already: {python}")
            return python
        if not python.exists():
            say(f"A virtual environment in {folder}")
            run([sys.executable, "-m", "venv", str(folder)])
        say(f"What pip says goes to {folder / LOG_NAME}")
        first()
        say(f"The {len(self.pins)} packages of {self.listed.name}, and nothing else")
        self.pip(folder, ["--no-deps", "--requirement", str(self.listed)], show)
        version = run([str(python), "-c", f"import importlib.metadata as m; print(m.version('{self.package}'))"])
        (folder / MARK).write_text(self._digest())
        say(f"{self.package} {version} is installed: {python}")
        return python

    def pip(self, folder: Path, arguments: Sequence[str], show: Say = silent) -> None:
        """`pip install` with these arguments. show: gets twice a second for how long it has worked, and what it said
        last. Raises MissingTool with the end of its log when it fails."""
        began, log_path = time.monotonic(), folder / LOG_NAME
        command = [str(folder / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check"]
        command += ["--progress-bar", "off", "--no-color", *arguments]
        with log_path.open("ab") as log_stream:
            before = log_stream.tell()
            log_stream.write(f"$ {' '.join(command)}\n".encode())
            log_stream.flush()
        pip = start_child(command, log_path=log_path, in_group=True)
        try:
            while pip.is_alive:
                show(f"{duration(time.monotonic() - began)}: {_lines(log_path, before)[-1].strip()}")
                pip.wait(LOOK_EVERY_S)
        finally:
            pip.stop(STOP_TIMEOUT_S)  # Ctrl-C reaches it anyway; what is half unpacked, pip removes
        if pip.code != 0:
            last = "\n".join(f"  {line}" for line in _lines(log_path, before)[-TAIL_LINES:])
            raise MissingTool(
                f"pip ended with code {pip.code} after {duration(time.monotonic() - began)}; call the command "
                f"again to go on. The end of {log_path}:\n{last}"
            )

    def _digest(self) -> str:
        return hashlib.sha256(self.listed.read_bytes()).hexdigest() + "\n"


def _lines(path: Path, offset: int) -> list[str]:
    with path.open("rb") as stream:
        stream.seek(offset)
        return stream.read().decode(errors="replace").splitlines()


def run(command: Sequence[str]) -> str:
    """Its output. Raises MissingTool with the end of what it said when it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = "\n".join(done.stderr.splitlines()[-TAIL_LINES:])
        raise MissingTool(f"`{' '.join(command)}` ended with code {done.returncode}; call it again to go on:\n{last}")
    return done.stdout.strip()
