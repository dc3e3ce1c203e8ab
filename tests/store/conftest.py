import pytest

from nanodag.store import Store
from tests.store.making import product_in


@pytest.fixture(params=["local", "memory"])
def store(request, tmp_path):
    url = tmp_path / "s" if request.param == "local" else f"memory://{tmp_path.name}"
    return Store(url, local=tmp_path / "here")


@pytest.fixture
def product(tmp_path):
    return product_in(tmp_path / "product")
