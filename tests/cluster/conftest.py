"""Two nodes that are network namespaces of this machine."""

import os
import shutil

import pytest

from tests.cluster.namespaces import two_nodes


@pytest.fixture(scope="module")
def nodes():
    if not (shutil.which("ip") and os.geteuid() == 0):
        missing = "two nodes need root and Debian's package iproute2"
        (pytest.fail if os.environ.get("NANODAG_CI") else pytest.skip)(missing)
    with two_nodes() as made:
        yield made
