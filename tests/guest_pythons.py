"""Environments of packages that have a Python of their own, for slow tests that run them."""

from collections.abc import Callable
from pathlib import Path

from nanodag.errors import MissingTool
from nanodag.external_envs import verifiers_process
from nanodag.inference import engine_install
from tests.team.postgres import missing


def _or_skip(find: Callable[[], Path]) -> Path:
    """Its interpreter. Without one the test is skipped, but fails where NANODAG_CI is set."""
    try:
        return find()
    except MissingTool as error:
        return missing(str(error))


def sglang_python() -> Path:
    """That of SGLang's server on a CPU."""
    return _or_skip(lambda: engine_install.find_python("auto", "cpu"))


def vllm_python() -> Path:
    """That of vLLM's engine on a CPU."""
    return _or_skip(lambda: engine_install.find_python("auto", "cpu", "vllm"))


def verifiers_python() -> Path:
    return _or_skip(verifiers_process.find_python)
