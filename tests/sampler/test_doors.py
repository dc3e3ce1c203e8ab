"""What the embedded sampler refuses of those who are not its controller, and of files that are no checkpoint."""

import asyncio
import io
import json
import shutil
import socket
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import torch
from pydantic_core import to_json

from nanodag.engines.start import start_engine
from nanodag.errors import BadRequest, SamplerError
from nanodag.inference.access_checks import Doors
from nanodag.inference.engine_settings import EngineSettings
from nanodag.model.architecture import read_checkpoint
from nanodag.sampler.weights import load_weights
from tests.sampler.reference import request, with_client

TOKEN = "a-token-of-this-test"
GOOD = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2}}
MB = 1 << 20


@pytest.fixture(scope="module")
def samplers_are_forks():
    """Not here: one looks at the command of the sampler's process."""


@pytest.fixture(scope="module")
def server(text_folder, tmp_path_factory):
    log_path = tmp_path_factory.mktemp("log") / "sampler.log"
    with start_engine(EngineSettings(model=text_folder, max_batch=8, token=TOKEN), log_path=log_path) as process:
        yield process


def ask(server, path="/generate", body=GOOD, method="POST", token=TOKEN, **headers):
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    headers |= {"authorization": f"Bearer {token}"} if token else {}
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    content = io.BytesIO(content) if len(content) > MB else content  # httpx wants it so
    return httpx.request(method, server.url + path, content=content, headers=headers, timeout=60, trust_env=False)


@contextmanager
def connected(server, num_bytes):
    """A connection over which a request with a body of this length has begun."""
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) as raw:
        head = f"POST /generate HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
        raw.sendall(f"{head}Content-Length: {num_bytes}\r\n\r\n".encode())
        yield raw


# ---- who asks


def test_only_who_knows_the_token_is_answered_and_health_to_all(server):
    assert ask(server).status_code == 200
    for wrong in ("", "another", TOKEN + "x", TOKEN[:-1]):
        answer = ask(server, token=wrong)
        assert answer.status_code == 401 and "wants its token" in answer.json()["error"]["message"]
        assert ask(server, "/abort_request", {"abort_all": True}, token=wrong).status_code == 401
        assert ask(server, "/update_weights_from_disk", {"model_path": "/"}, token=wrong).status_code == 401
    assert ask(server, "/health", method="GET", token="").status_code == 200


def test_the_client_bears_the_token_and_one_without_it_is_told(server):
    async def bearing(client):
        assert len([part async for part in client.stream(request(max_new_tokens=2))]) == 2

    async def without(client):
        assert await client.health()
        with pytest.raises(SamplerError, match="answered 401: this server wants its token"):
            await client.generate([request()])

    with_client(server, bearing, token=TOKEN)
    with_client(server, without)


def test_the_command_line_does_not_show_the_token(server):
    assert TOKEN not in Path(f"/proc/{server.pid}/cmdline").read_text()


def test_a_name_that_a_page_made_point_here_is_refused_and_names_of_this_machine_are_not(server):
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "[", "localhost.x"):
        assert ask(server, Host=host).status_code in (400, 421), host
    for host in ("127.0.0.1", "localhost", "localhost:1234", "[::1]:80", socket.gethostname()):
        assert ask(server, Host=host).status_code == 200, host


def test_a_page_of_another_origin_may_ask_nothing_even_with_the_token(server):
    for origin in ("http://evil.example", "null", server.url.replace("http:", "http://evil@"), "http://127.0.0.1:1"):
        assert ask(server, "/abort_request", {"abort_all": True}, Origin=origin).status_code == 403
    assert ask(server, Origin=server.url).status_code == 200


# ---- how much


def test_a_body_above_the_limit_is_refused_before_it_is_read_and_also_when_its_length_is_not_said(server):
    began = time.monotonic()
    with connected(server, 50 * MB) as raw:  # and none of it comes
        assert b" 413 " in raw.recv(100)
    assert time.monotonic() - began < 60
    with httpx.Client(trust_env=False, timeout=60) as client:
        chunks = (b" " * MB for _ in range(20))
        try:
            answer = client.post(f"{server.url}/generate", content=chunks, headers={"authorization": f"Bearer {TOKEN}"})
            assert answer.status_code == 413 and "--max-body-bytes" in answer.text
        except (httpx.WriteError, httpx.RemoteProtocolError):  # it was hung up on in the midst of it
            pass
    assert ask(server).status_code == 200


def test_a_text_above_the_limit_is_refused_before_it_is_tokenised(server):
    began = time.monotonic()
    answer = ask(server, body={"text": "w1 " * (10 * MB // 3), "sampling_params": {}})
    assert answer.status_code == 400 and "--max-text-bytes" in answer.text
    assert ask(server, body={"text": ["w1 " * (MB // 4)] * 2, "sampling_params": {}}).status_code == 400
    assert time.monotonic() - began < 60


def test_others_are_answered_while_a_text_is_tokenised(server):
    async def work(client):
        body = {"text": "w1 " * (MB // 4), "sampling_params": {"max_new_tokens": 1}}
        long, num_answers = asyncio.ensure_future(client._call("POST", "/generate", body)), 0
        await asyncio.sleep(0.02)
        while not long.done():
            await client.model_info()
            num_answers += 1
        with pytest.raises(BadRequest, match="do not fit the context"):
            await long
        assert num_answers > 3

    with_client(server, work, token=TOKEN)


def test_limits_can_be_set_and_a_body_without_end_is_cut_off():
    async def app(scope, receive, send):
        while (await receive())["more_body"]:
            pass

    async def receive():
        return {"type": "http.request", "body": b"x" * 10, "more_body": True}

    doors = Doors(app, names=(), keys=(), max_body_bytes=95)
    scope = {"type": "http", "path": "/", "headers": [(b"host", b"localhost")]}
    with pytest.raises(Exception, match="too large"):
        asyncio.run(asyncio.wait_for(doors(scope, receive, None), 5))


# ---- files that are no checkpoint


@pytest.fixture
def copy(text_folder, tmp_path):
    """A checkpoint of its own, to be spoiled."""
    folder = tmp_path / "copy"
    shutil.copytree(text_folder, folder)
    return folder


def refused(server, folder):
    """The reason, within seconds; the server goes on."""
    began = time.monotonic()
    answer = ask(server, "/update_weights_from_disk", {"model_path": str(folder)})
    assert answer.status_code == 400, answer.text
    assert ask(server).status_code == 200 and time.monotonic() - began < 60
    return answer.json()["message"]


def test_an_index_that_is_none_or_names_a_file_elsewhere_is_refused(server, copy):
    names = ("../other/model.safetensors", "/etc/passwd", "..", "", "a/b", "./model.safetensors")
    elsewhere = [{"weight_map": {"lm_head.weight": name}} for name in names]
    no_index = [{}, {"weight_map": 5}, {"weight_map": {}}, {"weight_map": {"a": 5}}, [], "x"]
    for index in (*elsewhere, *no_index):
        (copy / "model.safetensors.index.json").write_text(json.dumps(index))
        assert ("does not lie in its folder" if index in elsewhere else "index.json") in refused(server, copy)


BAD_CONFIGS = {
    "vocab_size": ["x", None, -1, 1e400],
    "hidden_size": [0, []],
    "num_attention_heads": [0],
    "num_key_value_heads": [-2],
    "num_hidden_layers": ["2x"],
    "rms_norm_eps": [{}],
    "rope_parameters": [5, {"rope_type": "linear"}, {"rope_theta": "x"}],
    "layer_types": [5],
    "eos_token_id": ["</s>", {"a": 1}],
    "max_position_embeddings": [None],
    "model_type": [["qwen3"]],
}


@pytest.mark.parametrize("field", BAD_CONFIGS)
def test_a_config_that_describes_no_model_is_refused_with_a_reason(copy, field):
    config = json.loads((copy / "config.json").read_text())
    (copy / "generation_config.json").unlink(missing_ok=True)
    for value in BAD_CONFIGS[field]:
        (copy / "config.json").write_bytes(to_json(config | {field: value}, inf_nan_mode="constants"))
        with pytest.raises(BadRequest, match=r"config\.json|eos_token_id"):
            read_checkpoint(copy)


@pytest.mark.parametrize("text", ["[" * 100_000, "\udcff", "{", "5", '{"a":' * 100_000, "\x00"])
def test_a_config_that_is_no_json_is_refused_by_the_server_too(server, copy, text):
    (copy / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    assert "config.json" in refused(server, copy)


def test_a_path_that_no_file_has_is_refused(server):
    for path in ("x" * 100_000, "/" + "x" * 4000, "a/" * 2000, "\x00", "/dev/zero", "/proc/self/mem"):
        assert refused(server, path)


def test_a_url_of_100_000_letters_is_no_error_of_the_server(server):
    assert 400 <= ask(server, "/" + "x" * 60_000).status_code < 500
    assert ask(server).status_code == 200


def test_links_to_files_are_followed_as_a_hubs_cache_has_them(copy):
    (copy / "model.safetensors").rename(copy / "real")
    (copy / "model.safetensors").symlink_to(copy / "real")
    architecture = read_checkpoint(copy).architecture
    assert load_weights(copy, architecture, torch.float32, torch.device("cpu")).head.numel() > 0


# ---- who leaves


def test_clients_that_leave_write_no_traceback(server, text_folder):
    long = {"input_ids": [1], "sampling_params": {"max_new_tokens": 200, "n": 500, "ignore_eos": True}}
    bodies = [(json.dumps(long | {"stream": stream}).encode(), part) for stream in (False, True) for part in (1.0, 0.5)]
    for body, part in [*bodies, (b"", 0.0)]:
        with connected(server, max(len(body), 5)) as raw:
            raw.sendall(body[: int(len(body) * part)])
            time.sleep(0.1)
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")  # by a reset
    while ask(server, "/get_server_info", method="GET").json()["num_running_samples"]:
        time.sleep(0.02)
    log = server.log_path.read_text()
    assert not any(word in log for word in ("Traceback", "ERROR", "WARNING")), log[-3000:]
