"""A server as the teacher of on-policy distillation: the same numbers as the model at home, or a reason."""

import json
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from nanodag.config.kinds.rl import RLStage
from nanodag.engines.start import start_engine
from nanodag.errors import BadRequest, ConfigError, SamplerError
from nanodag.inference.engine_settings import EngineSettings
from nanodag.rl.trainer import teacher_server
from nanodag.rl.trainer.policy import load_policy, to_row
from nanodag.rl.trainer.rows import pack
from nanodag.rl.trainer.teacher_server import TeacherServer
from nanodag.run.build_stage import server_identity
from nanodag.tokenizer.bpe import save_tokenizer
from tests.forks import run_script
from tests.http_server import Quiet, serving
from tests.rl.models import rollout, save_tiny_model

BYTES = {bytes([value]): value for value in range(256)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: save_tiny_model(folder / name, vocabulary=266, seed=seed) for seed, name in enumerate("ab")}


@pytest.fixture(scope="module")
def teacher(folders, tmp_path_factory):
    log = tmp_path_factory.mktemp("log") / "log"
    with start_engine(
        EngineSettings(model=folders["b"], max_batch=4, weight_version=3, context_length=64), log_path=log
    ) as process:
        yield process


def rollouts() -> list:
    draw = torch.Generator().manual_seed(2)
    return [
        rollout(str(g), s, [1 + g, 2, 3][: g + 1], torch.randint(0, 260, (3 + s,), generator=draw).tolist(), reward=1.0)
        for g in range(3)
        for s in range(8)
    ]


def test_a_servers_logprobs_are_those_of_the_model_at_home(folders, teacher):
    part = rollouts()
    rows = [to_row(row, torch.device("cpu")) for row in pack(part, budget_tokens=40)[0]]
    found = TeacherServer(teacher.url, folders["a"], context=64).logprobs([part], [rows])
    policy = load_policy(folders["b"], temperature=1.0)
    with torch.no_grad():
        for row, logprobs in zip(rows, found[0], strict=True):
            torch.testing.assert_close(logprobs, policy(row)[0], rtol=0, atol=1e-4)


# argv: policy, the teacher's setting and value, output
TRAINED = """
import json, sys
from pathlib import Path
from nanodag.config.kinds.rl import RLStage
from nanodag.inference.engine_settings import EngineSettings
from nanodag.rl.trainer.trainer import Trainer
from tests.rl.test_teacher_server import rollouts
config = RLStage.of(kind="rl", data=["file:x"], precision="fp32", gradient_clipping=0, filters=[],
                    sampler={"context": 64}, max_new_tokens=16, updates_per_step=2, micro_batch_tokens=4096,
                    teacher={sys.argv[2]: sys.argv[3], "coefficient": 0.5})
reply = Trainer(config, Path(sys.argv[1]), device="cpu").train(1, rollouts())
Path(sys.argv[4]).write_text(json.dumps([reply["gradient_norm"], reply["sums"]["summed"]["teacher_kl"]]))
"""


@pytest.mark.slow
def test_a_step_with_a_server_is_that_with_the_model_at_home(folders, teacher, tmp_path):
    found = []
    for name, value in (("url", teacher.url), ("model", folders["b"])):
        arguments = [folders["a"], name, value, tmp_path / name]
        done = run_script(TRAINED, *arguments)
        assert done.returncode == 0, done.stderr[-3000:]
        found.append(json.loads((tmp_path / name).read_text()))
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_a_server_scores_a_prompt_as_sglang_does_and_may_sample_after_it(folders, teacher):
    body = {"input_ids": [1, 2, 3], "return_logprob": True, "logprob_start_len": 0}
    scored = ask(teacher, body | {"sampling_params": {"max_new_tokens": 0}})
    model = AutoModelForCausalLM.from_pretrained(folders["b"])
    with torch.no_grad():
        wanted = model(torch.tensor([[1, 2, 3]])).logits[0].log_softmax(-1)
    (first, second, third) = scored["meta_info"]["input_token_logprobs"]
    assert first == [None, 1, None] and second[1:] == [2, None] and third[1:] == [3, None]
    assert [second[0], third[0]] == pytest.approx([wanted[0, 2].item(), wanted[1, 3].item()], abs=1e-4)
    assert scored["output_ids"] == [] and scored["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    both = ask(teacher, body | {"sampling_params": {"max_new_tokens": 2, "temperature": 0.5, "ignore_eos": True}})
    assert both["meta_info"]["input_token_logprobs"] == scored["meta_info"]["input_token_logprobs"]
    assert len(both["output_ids"]) == len(both["meta_info"]["output_token_logprobs"]) == 2
    unasked = ask(teacher, {**body, "logprob_start_len": -1, "sampling_params": {"max_new_tokens": 1}})
    assert unasked["meta_info"]["input_token_logprobs"] == []


def ask(teacher, body):
    answer = httpx.post(teacher.url + "/generate", json=body, timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"sampling_params": {"max_new_tokens": 0}}, "leaves nothing to do"),
        ({"logprob_start_len": 1}, "logprob_start_len"),
    ],
)
def test_what_a_server_cannot_score_is_refused(teacher, more, message):
    answer = httpx.post(teacher.url + "/generate", json={"input_ids": [1], **more}, timeout=60, trust_env=False)
    assert answer.status_code == 400 and message in answer.text


def test_a_teacher_with_another_tokenizer_or_too_short_a_context_is_refused_before_the_run(folders, teacher, tmp_path):
    with pytest.raises(ConfigError, match=r"a context of 64, below sampler\.context 65"):
        TeacherServer(teacher.url, folders["a"], context=65)
    other = save_tiny_model(tmp_path / "other", vocabulary=300)
    save_tokenizer({**BYTES, b"qu": 256}, other)
    with pytest.raises(ConfigError, match="has another tokenizer than the policy: it differs in 11 tokens"):
        TeacherServer(teacher.url, other, context=64)


class Server(Quiet):
    """Fails `failures` times, then scores each token -id / 10. Its tokenizer is not here, and is that of bytes."""

    failures, version, first_id, calls = 0, "0", 0, 0

    def do_GET(self):
        self.answer({"model_path": "/nowhere", "weight_version": "0"})

    def do_POST(self):
        Server.calls += 1
        body = self.content()
        if Server.failures > 0:
            Server.failures -= 1
            return self.answer({"error": "busy"}, 503)
        if "text" in body:
            return self.answer(self.scored([Server.first_id + one for one in body["text"].encode()]))
        many = body["input_ids"]
        return self.answer(self.scored(many) if isinstance(many[0], int) else [self.scored(ids) for ids in many])

    def scored(self, ids):
        triples = [[None if not place else -token / 10, token, None] for place, token in enumerate(ids)]
        meta = {"id": "r", "weight_version": Server.version, "finish_reason": {"type": "length", "length": 0}}
        return {"output_ids": [], "meta_info": meta | {"input_token_logprobs": triples}}


@pytest.fixture
def fake(monkeypatch):
    Server.failures, Server.version, Server.first_id, Server.calls = 0, "0", 0, 0
    monkeypatch.setattr(teacher_server._ask.retry, "sleep", instantly)
    with serving(Server) as url:
        yield url


async def instantly(seconds: float) -> None:
    pass


def test_a_server_elsewhere_is_compared_by_a_text_asked_again_and_asked_in_lots(fake, folders):
    Server.failures = 0
    teacher = TeacherServer(fake, folders["a"], context=64)
    part = rollouts()  # 24: two lots
    rows = [to_row(row, torch.device("cpu")) for row in pack(part, budget_tokens=1000)[0]]
    Server.failures, Server.calls = 2, 0
    ((found,),) = teacher.logprobs([part], [rows])
    torch.testing.assert_close(found, -rows[0].targets / 10)
    assert Server.calls == 4
    Server.version = "1"
    with pytest.raises(SamplerError, match="it must not change while the stage runs"):
        teacher.logprobs([part], [rows])
    Server.failures = 1000
    with pytest.raises(SamplerError, match="answered 503"):
        teacher.logprobs([part], [rows])
    Server.failures, Server.first_id = 0, 1
    with pytest.raises(ConfigError, match="has another tokenizer than the policy: of a text it makes"):
        TeacherServer(fake, folders["a"], context=64)


def test_a_server_that_does_not_say_the_logprobs_that_were_asked_is_refused(fake, folders, monkeypatch):
    scored = Server.scored  # a text is still answered: only ids are not scored
    monkeypatch.setattr(Server, "scored", lambda self, ids: scored(self, ids) if len(ids) > 64 else without_scores())
    with pytest.raises(ConfigError, match="does not score prompts"):
        TeacherServer(fake, folders["a"], context=64)


def without_scores():
    meta = {"id": "r", "weight_version": "0", "finish_reason": None, "input_token_logprobs": []}
    return {"output_ids": [1], "meta_info": meta}


def test_a_server_that_takes_no_prompt_as_long_as_a_rollout_is_refused_before_the_run(fake, folders, monkeypatch):
    answer = Server.answer
    monkeypatch.setattr(
        Server, "answer", lambda self, found, status=200: (refuse if is_long(found) else answer)(self, found, status)
    )
    with pytest.raises(ConfigError, match=r"a sequence of 100 tokens \(sampler\.context\)"):
        TeacherServer(fake, folders["a"], context=100)


def is_long(found) -> bool:
    triples = found.get("meta_info", {}).get("input_token_logprobs", [])
    return len(triples) == 100  # the text that its tokenizer is known by is shorter


def test_a_key_knows_the_server_and_what_it_says_it_serves(teacher, folders):
    assert server_identity(teacher.url) == {
        "kind": "server",
        "url": teacher.url,
        "model": str(folders["b"]),
        "version": "3",
    }
    with pytest.raises(ConfigError, match="does not say which model it serves: ConnectError"):
        server_identity("http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"teacher": {"url": "10.0.0.1:30000"}}, "must begin with http://"),
        ({"teacher": {"url": "http://h", "model": "/m"}}, "are two teachers"),
        ({"teacher": {"url": "http://h"}, "temperature": 0.8}, "score a prompt at temperature 1"),
    ],
)
def test_a_server_that_cannot_be_the_teacher_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        RLStage.of(kind="rl", data=["file:x"], **values)


def test_a_request_that_is_refused_is_not_sent_again(fake, folders, monkeypatch):
    teacher = TeacherServer(fake, folders["a"], context=64)
    monkeypatch.setattr(Server, "answer", refuse)
    Server.calls = 0
    rows = [to_row(row, torch.device("cpu")) for row in pack(rollouts(), budget_tokens=1000)[0]]
    with pytest.raises(BadRequest):
        teacher.logprobs([rollouts()], [rows])
    assert Server.calls == 1


def refuse(server, content, status=200):
    server.send_response(400)
    server.send_header("Content-Length", "0")
    server.end_headers()
