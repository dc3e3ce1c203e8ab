import pytest

from nanodag.store import Store


@pytest.fixture(params=["local", "memory"])
def store(request, tmp_path):
    url = tmp_path / "s" if request.param == "local" else f"memory://{tmp_path.name}"
    return Store(url, local=tmp_path / "here")
