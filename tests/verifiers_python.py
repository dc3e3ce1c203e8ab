"""The environment of the `verifiers` package, for slow tests that run it."""

import os
from pathlib import Path

import pytest

from nanodag.errors import MissingTool
from nanodag.external_envs.verifiers_install import find_python


def python_or_skip() -> Path:
    """Its interpreter. Without one the test is skipped, but fails where NANODAG_CI is set."""
    try:
        return find_python()
    except MissingTool as error:
        if os.environ.get("NANODAG_CI"):
            raise
        pytest.skip(str(error))
