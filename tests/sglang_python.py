"""SGLang's environment, for tests that start its server on a CPU."""

import os
from pathlib import Path

import pytest

from nanodag.errors import MissingTool
from nanodag.inference.sglang_install import find_python


def python_or_skip() -> Path:
    """Its interpreter. Without one the test is skipped, but fails where NANODAG_CI is set."""
    try:
        return find_python("auto", "cpu")
    except MissingTool as error:
        if os.environ.get("NANODAG_CI"):
            raise
        pytest.skip(str(error))
