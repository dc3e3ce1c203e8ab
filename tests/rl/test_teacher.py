"""On-policy distillation: the gradient of the reverse KL to a teacher, a model at home or a server."""

import re
from pathlib import Path

import httpx
import pytest
import torch
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM

from nanodag.engines.start import start_engine
from nanodag.errors import BadRequest, ConfigError, SamplerError
from nanodag.inference.engine_settings import EngineSettings
from nanodag.model.folder import load
from nanodag.rl.advantages import distilled
from nanodag.rl.trainer import teacher_server
from nanodag.rl.trainer.policy import Policy, to_row
from nanodag.rl.trainer.rows import pack
from nanodag.rl.trainer.teacher_server import ServedTeacher, TeacherServer
from nanodag.run.build_stage import server_identity
from nanodag.tokenizer.bpe import save_tokenizer
from tests.api.real_engines import served
from tests.forks import call
from tests.http_server import Quiet, serving
from tests.rl.models import save_tiny_model, trainer_of
from tests.rl.rollouts import rollout
from tests.rl.stages import BYTES

RESPONSES = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]


def test_a_token_that_the_teacher_likes_less_than_the_policy_loses_advantage():
    advantages, reverse_kl = distilled(
        torch.tensor([1.0, 1.0, 0.0, 0.0]),
        torch.tensor([-1.0, -2.0, -0.5, -0.5]),
        torch.tensor([-3.0, -1.0, -0.5, -torch.inf]),
        coefficient=0.5,
    )
    assert reverse_kl.tolist() == [2.0, -1.0, 0.0, 29.5]
    assert advantages.tolist() == [0.0, 1.5, 0.0, -14.75]


def trained(policy, rollouts, teacher, values):
    """The norm of the gradient of a step, and the sum of the reverse KL."""
    values = {"gradient_clipping": 0, "filters": [], "sampler": {"context": 64}, "max_new_tokens": 16, **values}
    trainer = trainer_of(policy, precision="fp32", teacher={**teacher, "coefficient": 0.5}, **values)
    reply = trainer.train(1, rollouts)
    return reply["gradient_norm"], reply["sums"]["summed"]["teacher_kl"]


def scores(folder: Path) -> tuple[torch.nn.Module, torch.Tensor]:
    """The model and the log-probability of every response token, each response alone."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    found = []
    for ids in RESPONSES:
        logprobs = log_softmax(model(torch.tensor([[1, 2, *ids]])).logits[0, 1:-1] / 0.8, dim=-1)
        found.append(logprobs.gather(1, torch.tensor(ids)[:, None]).squeeze(1))
    return model, torch.cat(found)


def test_where_rewards_are_equal_the_gradient_is_that_of_the_reverse_kl(tmp_path):
    policy, teacher = save_tiny_model(tmp_path / "policy"), save_tiny_model(tmp_path / "teacher", seed=4)
    answers = [rollout("a", n, [1, 2], ids, reward=0.5) for n, ids in enumerate(RESPONSES)]
    norm, total = call(trained, policy, answers, {"model": str(teacher)}, {"temperature": 0.8})
    model, own = scores(policy)
    with torch.no_grad():
        _, theirs = scores(teacher)
    reverse_kl = own.detach() - theirs
    (0.5 * reverse_kl * own).mean().backward()
    wanted = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt().item()
    assert norm == pytest.approx(wanted, rel=1e-4)
    assert total == pytest.approx(reverse_kl.sum().item(), rel=1e-4)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: save_tiny_model(folder / name, vocabulary=266, seed=seed) for seed, name in enumerate("ab")}


@pytest.fixture(scope="module")
def teacher(folders, tmp_path_factory):
    log = tmp_path_factory.mktemp("log") / "log"
    settings = EngineSettings(model=folders["b"], max_batch=4, weight_version=3, context_length=64)
    with start_engine(settings, log_path=log) as process:
        yield process


def rollouts() -> list:
    draw = torch.Generator().manual_seed(2)
    drawn = [(g, s, torch.randint(0, 260, (3 + s,), generator=draw).tolist()) for g in range(3) for s in range(8)]
    return [rollout(str(g), s, [1 + g, 2, 3][: g + 1], ids, reward=1.0) for g, s, ids in drawn]


def test_a_servers_logprobs_are_those_of_the_model_at_home(folders, teacher):
    part = rollouts()
    rows = rows_of(part, 40)
    found = TeacherServer(teacher.url, folders["a"], context=64).logprobs([part], [rows])
    policy = Policy(load(folders["b"]), temperature=1.0)
    with torch.no_grad():
        for row, logprobs in zip(rows, found[0], strict=True):
            torch.testing.assert_close(logprobs, policy(row)[0], rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def openai_url(folders, tmp_path_factory):
    """A teacher as `nanodag serve` has it."""
    with served(folders["b"], tmp_path_factory.mktemp("served") / "log") as (_, said):
        yield re.search(r"http://127.0.0.1:\d+/v1", said)[0] + "#tiny"


def test_logprobs_behind_an_openai_api_are_those_of_the_model_at_home(folders, openai_url):
    part = rollouts()
    rows = rows_of(part, 40)
    found = ServedTeacher(openai_url, folders["a"], context=64).logprobs([part], [rows])
    policy = Policy(load(folders["b"]), temperature=1.0)
    with torch.no_grad():
        for row, logprobs in zip(rows, found[0], strict=True):
            torch.testing.assert_close(logprobs, policy(row)[0], rtol=0, atol=1e-4)
    assert server_identity(openai_url)["model"] == "tiny"


@pytest.mark.parametrize(
    ("scores", "why"),
    [
        (None, "gives no log-probabilities of a prompt"),
        (lambda n: {"tokens": ["x"] * n, "token_logprobs": [None, *[-1.0] * n]}, "another tokenizer than the policy"),
        (lambda n: {"tokens": ["x"], "token_logprobs": [None]}, "1 log-probabilities of"),
        (lambda n: {"tokens": ["x"] * n, "token_logprobs": [None] * (n + 1)}, "log-probabilities of"),
    ],
)
def test_an_api_that_is_no_teacher_is_refused_before_the_first_step(folders, scores, why):
    class Api(Quiet):
        def do_POST(self):
            told = [scores and scores(len(ids)) for ids in self.content()["prompt"]]
            self.answer({"choices": [{"index": n, "logprobs": one} for n, one in enumerate(told)]})

    with serving(Api) as url, pytest.raises(ConfigError, match=why):
        ServedTeacher(f"{url}/v1#m", folders["a"], context=64)


def both_trained(policy, *teachers):
    return [trained(policy, rollouts(), teacher, {"updates_per_step": 2}) for teacher in teachers]


@pytest.mark.slow
def test_a_step_with_a_server_is_that_with_the_model_at_home(folders, teacher):
    by_server, at_home = call(both_trained, folders["a"], {"url": teacher.url}, {"model": str(folders["b"])})
    assert by_server == pytest.approx(at_home, rel=1e-4)


def test_a_server_scores_a_prompt_as_sglang_does_and_may_sample_after_it(folders, teacher):
    def ask(**more):
        body = {"input_ids": [1, 2, 3], "return_logprob": True, "logprob_start_len": 0, **more}
        return httpx.post(teacher.url + "/generate", json=body, timeout=60, trust_env=False)

    scored = ask(sampling_params={"max_new_tokens": 0}).json()
    model = AutoModelForCausalLM.from_pretrained(folders["b"])
    with torch.no_grad():
        wanted = model(torch.tensor([[1, 2, 3]])).logits[0].log_softmax(-1)
    (first, second, third) = scored["meta_info"]["input_token_logprobs"]
    assert first == [None, 1, None] and second[1:] == [2, None] and third[1:] == [3, None]
    assert [second[0], third[0]] == pytest.approx([wanted[0, 2].item(), wanted[1, 3].item()], abs=1e-4)
    assert scored["output_ids"] == [] and scored["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    both = ask(sampling_params={"max_new_tokens": 2, "temperature": 0.5, "ignore_eos": True}).json()
    assert both["meta_info"]["input_token_logprobs"] == scored["meta_info"]["input_token_logprobs"]
    assert len(both["output_ids"]) == len(both["meta_info"]["output_token_logprobs"]) == 2
    unasked = ask(logprob_start_len=-1, sampling_params={"max_new_tokens": 1}).json()
    assert unasked["meta_info"]["input_token_logprobs"] == []
    for more, why in (
        ({"return_logprob": False, "sampling_params": {"max_new_tokens": 0}}, "leaves nothing to do"),
        ({"logprob_start_len": 1}, "logprob_start_len"),
    ):
        refused = ask(**more)
        assert refused.status_code == 400 and why in refused.text


def test_a_teacher_with_another_tokenizer_or_too_short_a_context_is_refused_before_the_run(folders, teacher, tmp_path):
    with pytest.raises(ConfigError, match=r"a context of 64, below sampler\.context 65"):
        TeacherServer(teacher.url, folders["a"], context=65)
    other = save_tiny_model(tmp_path / "other", vocabulary=300)
    save_tokenizer({**BYTES, b"qu": 256}, other)
    with pytest.raises(ConfigError, match="has another tokenizer than the policy: it differs in 11 tokens"):
        TeacherServer(teacher.url, other, context=64)


class Server(Quiet):
    """Fails `failures` times, then scores each token -id / 10. Its tokenizer is not here, and is that of bytes.
    first_id: of its tokenizer. shortest: of a sequence that it scores. longest: of one that it takes."""

    failures, version, first_id, calls, shortest, longest = 0, "0", 0, 0, 0, 1000

    def do_GET(self):
        self.answer({"model_path": "/nowhere", "weight_version": "0"})

    def do_POST(self):
        kind, body = type(self), self.content()
        kind.calls += 1
        if kind.failures > 0:
            kind.failures -= 1
            return self.answer({"error": "busy"}, 503)
        many = body["input_ids"] if "text" not in body else [self.first_id + one for one in body["text"].encode()]
        several = many if isinstance(many[0], list) else [many]
        if max(map(len, several)) > self.longest:
            return self.answer({}, 400)
        scored = [self.scored(ids) for ids in several]
        self.answer(scored if several is many else scored[0])

    def scored(self, ids):
        triples = [[None if not place else -token / 10, token, None] for place, token in enumerate(ids)]
        meta = {"id": "r", "weight_version": self.version, "finish_reason": {"type": "length", "length": 0}}
        triples = triples if len(ids) >= self.shortest else []
        return {"output_ids": [], "meta_info": meta | {"input_token_logprobs": triples}}


@pytest.fixture
def fake(monkeypatch):
    """A server's class, whose values a test may change, and its address."""

    async def instantly(seconds: float) -> None:
        pass

    monkeypatch.setattr(teacher_server._ask.retry, "sleep", instantly)
    server = type("Fresh", (Server,), {})
    with serving(server) as url:
        yield server, url


def rows_of(part, budget):
    return [to_row(row, torch.device("cpu")) for row in pack(part, budget_tokens=budget)]


def test_a_server_elsewhere_is_compared_by_a_text_asked_again_and_asked_in_lots(fake, folders):
    server, url = fake
    teacher = TeacherServer(url, folders["a"], context=64)
    part = rollouts()  # 24: two lots
    rows = rows_of(part, 1000)
    server.failures, server.calls = 2, 0
    ((found,),) = teacher.logprobs([part], [rows])
    torch.testing.assert_close(found, -rows[0].targets / 10)
    assert server.calls == 4
    server.version = "1"
    with pytest.raises(SamplerError, match="it must not change while the stage runs"):
        teacher.logprobs([part], [rows])
    server.failures = 1000
    with pytest.raises(SamplerError, match="answered 503"):
        teacher.logprobs([part], [rows])
    server.failures, server.longest, server.calls = 0, 0, 0
    with pytest.raises(BadRequest):  # a request that is refused is not sent again
        teacher.logprobs([part], [rows])
    assert server.calls == 1


@pytest.mark.parametrize(
    ("way", "why"),
    [
        ({"first_id": 1}, "has another tokenizer than the policy: of a text it makes"),
        ({"shortest": 65}, "does not score prompts"),  # a text that its tokenizer is known by is longer
        ({"longest": 99}, r"a sequence of 100 tokens \(sampler\.context\)"),  # and shorter than this
    ],
)
def test_a_server_that_cannot_teach_is_refused_before_the_run(fake, folders, way, why):
    server, url = fake
    for name, value in way.items():
        setattr(server, name, value)
    with pytest.raises(ConfigError, match=why):
        TeacherServer(url, folders["a"], context=100 if "longest" in way else 64)


def test_a_key_knows_the_server_and_what_it_says_it_serves(teacher, folders):
    known = {"kind": "server", "url": teacher.url, "model": str(folders["b"]), "version": "3"}
    assert server_identity(teacher.url) == known
    with pytest.raises(ConfigError, match="does not say which model it serves: ConnectError"):
        server_identity("http://127.0.0.1:9")
