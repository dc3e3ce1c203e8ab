"""The login file and the addresses that the server may have: what is refused, and how it is said."""

import shutil

import pytest
from pydantic import ValidationError

from nanodag.config.pipeline import ServerConfig
from nanodag.errors import ConfigError
from nanodag.server.prefect_api import read_login
from nanodag.worker.launch import worker_environment


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"host": "10.0.0.5"}, r"runs commands here; set server\.password_file"),
        ({"host": "gpu-1.example.org"}, r"runs commands here; set server\.password_file"),
        *[({"host": host, "password_file": "/x"}, "every interface") for host in ("0.0.0.0", "0", "0x0")],
        ({"host": "::1"}, "of IPv6, which is not built"),
        ({"database": "postgresql+asyncpg://u:hunter2@h/db"}, "database holds a password"),
        ({"database": "postgresql+asyncpg://u@h/db?password=hunter2"}, "database holds a password"),
        ({"database": "mysql://u@h/db"}, "neither sqlite nor postgresql"),
        ({"database": "postgresql+asyncpg://u@h"}, "neither sqlite nor postgresql"),
    ],
)
def test_an_address_for_all_without_a_password_and_a_database_with_one_are_refused(settings, reason):
    with pytest.raises(ValidationError, match=reason):
        ServerConfig(**settings)


def test_loopback_needs_no_password_and_an_address_that_others_reach_may_have_one():
    assert {ServerConfig(host=host).password_file for host in ("127.0.0.1", "localhost")} == {"none"}
    assert ServerConfig(host="10.0.0.5", password_file="/x").host == "10.0.0.5"


def test_a_login_is_read_from_a_file_that_nobody_else_may_read(tmp_path):
    path = tmp_path / "login"
    path.write_text("team:s3cret:x\n")
    path.chmod(0o600)
    assert read_login(str(path)) == ("team", "s3cret:x")
    assert read_login("none") is None
    path.chmod(0o640)
    with pytest.raises(ConfigError, match=r"may be read by others \(mode 640\)"):
        read_login(str(path))


@pytest.mark.parametrize("text", ["s3cret", ":s3cret", "s3cret:", "team:s3cret two", ""])
def test_a_file_that_is_no_login_is_refused_without_saying_what_it_holds(tmp_path, text):
    path = tmp_path / "login"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="user:password") as refused:
        read_login(str(path))
    assert "s3cret" not in str(refused.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_login(str(tmp_path / "none"))


def test_the_key_that_the_ui_calls_out_with_is_in_prefects_build_and_taken_out_of_our_copy(tmp_path):
    import prefect

    from flows.prefect_server import AMPLITUDE_KEY, without_key

    build = shutil.copytree(prefect.__ui_v2_static_path__, tmp_path / "ui")
    num_there = [path.read_text().count(AMPLITUDE_KEY) for path in build.rglob("*.js")]
    assert sum(num_there) == 1  # another Prefect may call out in another way: look, then change this
    without_key(build)
    assert not any(AMPLITUDE_KEY in path.read_text() for path in build.rglob("*.js"))


def test_workers_do_not_inherit_the_login(monkeypatch):
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "team:s3cret")
    assert "team:s3cret" not in worker_environment(1).values()
