"""Eval stages of a model that somebody serves: what is asked, what becomes of it, and what is said where it fails."""

import json
import re
from contextlib import contextmanager

import pytest
import yaml

from nanodag.config import resolve
from nanodag.config.kinds.evaluation import BenchmarkConfig, EndpointConfig, EvalStage
from nanodag.errors import ConfigError, ServerBusy
from nanodag.host.machine import machine_of
from nanodag.plan.make import plan_of
from nanodag.report.gather import columns_of, stages_of
from nanodag.rewards import remote
from nanodag.run.build_stage import server_identity
from nanodag.run.preflight_checks import Checks
from tests.api.real_engines import served
from tests.data.rows import write_rows
from tests.evaluation.jobs import bytes_of, evaluate
from tests.http_server import Quiet, serving
from tests.report.finished_run import finished_run

SECRET = "sk-of-this-test"


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("KEY_OF_TEST", SECRET)


@contextmanager
def openai(reply=lambda body, number: {}, card=None):
    """The URL of an endpoint, and the (path, authorization, body) of each request. reply: what differs in an answer,
    (status, content, headers) for something else."""
    asked = []

    class Endpoint(Quiet):
        def do_GET(self):
            self.answer({"data": [{"id": "m", "created": len(asked), **(card or {})}]})

        def do_POST(self):
            body = self.content()
            asked.append((self.path, self.headers.get("Authorization"), body))
            found = reply(body, len(asked))
            if isinstance(found, tuple):
                status, content, headers = found
                self.send_response(status)
                sent = content.encode() if isinstance(content, str) else json.dumps(content).encode()
                for name, value in {"Content-Length": str(len(sent)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(sent)
                return
            said = {"message": {"content": "sat"}} if "messages" in body else {"text": " sat"}
            choice = {**said, "finish_reason": "stop", **found}
            self.answer({"choices": [choice], "usage": {"prompt_tokens": 10, "completion_tokens": 2}})

    with serving(Endpoint) as url:
        yield f"{url}/v1", asked


@pytest.fixture
def job_at(make_job):
    """job_at(name, url, benchmark=..., of=..., ...): the job of one benchmark of problems, whose answer is `sat`."""

    def made(name, url, *, benchmark=None, of=None, **changes):
        job = make_job(name)
        words = job.config.benchmarks[0].model_copy(update=benchmark or {})
        endpoint = EndpointConfig(url=url, model="m", key="env:KEY_OF_TEST", at_once=1, **(of or {}))
        changes = {"benchmarks": (words,), "sample_prompts": (), "endpoint": endpoint, **changes}
        config = job.config.model_copy(update=changes)
        object.__setattr__(job, "config", config)
        job.inputs.clear()
        return job

    return made


def records_of(job):
    lines = (job.output / "samples" / "words.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_a_chat_is_asked_as_the_benchmark_says_and_scored_as_any_model(job_at):
    settings = {"num_samples": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "stop": ("mat",), "system": "Be brief."}
    wrong = {"message": {"content": "sat on the mat"}}
    with openai(lambda body, number: wrong if number == 1 else {}) as (url, asked):
        job = job_at("a", url, benchmark={**settings, "max_new_tokens": 9}, sample_prompts=("the cat",))
        metrics, cost = evaluate(job)
    assert [(path, authorization) for path, authorization, _ in asked] == [
        ("/v1/chat/completions", f"Bearer {SECRET}")
    ] * 11
    body = asked[0][2]
    system, question = body.pop("messages")
    assert system == {"role": "system", "content": "Be brief."} and question["content"].startswith("a the cat")
    seeds = {body["seed"] for _, _, body in asked[:10]}
    assert len(seeds) == 10 and max(seeds) < 1 << 31
    del body["seed"]
    assert body == {"model": "m", "max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "stop": ["mat"]}
    sample = {"messages": [{"role": "user", "content": "the cat"}], "model": "m", "max_tokens": 6, "temperature": 0.0}
    assert asked[10][2] == sample
    assert metrics == {"words": pytest.approx(0.9)}
    first, *_ = records_of(job)
    assert [one["output"] for one in first["samples"]] == ["sat on the ", "sat"]
    assert json.loads(first["prompt"])[1] == question
    assert cost["forward_tokens"] == 120 and "flops" not in cost
    results = json.loads((job.output / "results.json").read_text())
    assert results["benchmarks"]["words"]["metric"] == "avg@2"
    assert results["samples"] == [{"prompt": "the cat", "completion": "sat"}]
    kept = [path for path in job.workspace.rglob("*") if path.is_file()]
    assert kept and not any(SECRET.encode() in path.read_bytes() for path in kept)


def test_without_chat_the_text_itself_is_continued(job_at):
    with openai() as (url, asked):
        metrics, _ = evaluate(job_at("a", url, chat=False))
    path, _, body = asked[0]
    assert (
        path == "/v1/completions" and body["prompt"].startswith("Question: ") and body["stop"] == ["\n\n", "Question:"]
    )
    assert metrics == {"words": 1.0}


def test_thinking_that_the_server_tells_apart_is_no_part_of_the_answer_and_a_cut_one_is_counted(job_at):
    thinking = {"message": {"content": "sat", "reasoning_content": "hm"}}
    cut = {"message": {"content": None, "reasoning": "hm, hm"}, "finish_reason": "length"}
    with openai(lambda body, number: cut if number == 2 else thinking) as (url, _):
        job = job_at("a", url)
        evaluate(job)
    first, second, *_ = records_of(job)
    assert (first["output"], first["thinking"], first["scores"]["exact_match"]) == ("sat", "hm", 1.0)
    assert (second["output"], second["thinking"], second["truncated"]) == ("", "hm, hm", 1)


@pytest.mark.parametrize(
    "said",
    ["This model's maximum context length is 64 tokens.", '{"code": "context_length_exceeded"}',
     "the request exceeds the available context size", "longer than the model's context length (64)"],
)  # fmt: skip
def test_a_prompt_that_leaves_no_room_is_counted_as_of_any_model(job_at, said):
    with openai(lambda body, number: (400, said, {}) if number == 3 else {}) as (url, _):
        job = job_at("a", url)
        metrics, _ = evaluate(job)
    assert [record.get("too_long", False) for record in records_of(job)] == [False, False, True, False, False]
    assert metrics == {"words": 0.8}


def test_what_may_pass_is_asked_again_after_the_pause_that_the_server_wants(job_at, monkeypatch):
    pauses = []
    monkeypatch.setattr(remote.post_json.retry, "sleep", pauses.append)
    refusals = {1: (429, "slow", {"Retry-After": "7"}), 2: (429, "slow", {"Retry-After": "9999"}), 3: (503, "", {})}
    with openai(lambda body, number: refusals.get(number, {})) as (url, asked):
        metrics, _ = evaluate(job_at("a", url))
    assert pauses[:2] == [7.0, remote.MAX_PAUSE_S] and len(pauses) == 3 and pauses[2] <= 2.0
    assert len(asked) == 8 and metrics == {"words": 1.0}


@pytest.mark.parametrize(
    ("answer", "kind", "said"),
    [((401, f"no key {SECRET}", {}), ConfigError, "401 no key (the key). Correct endpoint.url, model or key"),
     ((404, "no such model", {}), ConfigError, "404 no such model. Correct endpoint.url, model or key"),
     ((429, "slow", {}), ServerBusy, "429 slow. Look whether the server is up; lower endpoint.at_once"),
     ((500, "it broke", {}), ServerBusy, "500 it broke. Look whether the server is up"),
     ((200, {"error": "none"}, {}), ConfigError, "answered with no completion: KeyError('choices') in {'error'"),
     ((200, "<html>", {}), ConfigError, "JSONDecodeError"),
     ((200, {"choices": []}, {}), ConfigError, "answered with no completion: IndexError")],
)  # fmt: skip
def test_a_failure_says_what_where_and_what_to_do_and_what_was_answered_is_not_asked_again(job_at, answer, kind, said):
    with openai() as (url, _):
        whole = job_at("whole", url)
        evaluate(whole)
    with openai(lambda body, number: answer if number >= 3 else {}) as (url, asked):
        job = job_at("broken", url, of={"patience_s": 0.05})
        with pytest.raises(kind) as raised:
            evaluate(job)
    assert f"POST {url}/chat/completions failed: " in str(raised.value) and said in str(raised.value)
    assert SECRET not in str(raised.value)
    with openai() as (url, asked):
        evaluate(job_at_again(job, url))
    assert len(asked) == 3
    assert bytes_of(job) == bytes_of(whole)


def job_at_again(job, url):
    endpoint = job.config.endpoint.model_copy(update={"url": url})
    object.__setattr__(job, "config", job.config.model_copy(update={"endpoint": endpoint}))
    return job


def test_a_server_that_is_gone_is_named_and_a_key_that_is_not_set(job_at, monkeypatch):
    with openai() as (url, _):
        pass
    with pytest.raises(
        ServerBusy, match=rf"POST {url}/chat/completions failed: ConnectError .*Look whether the server is up"
    ):
        evaluate(job_at("a", url, of={"patience_s": 0.05}))
    monkeypatch.delenv("KEY_OF_TEST")
    with pytest.raises(ConfigError, match=r"endpoint.key is env:KEY_OF_TEST, and that environment variable is not set"):
        evaluate(job_at("b", url))


@pytest.mark.parametrize("chat", [True, False])
def test_nanodags_own_server_answers_and_scores_as_its_model_evaluated_directly(make_job, served_url, chat):
    job = make_job("direct")
    only = {"benchmarks": job.config.benchmarks[:1], "sample_prompts": ("the cat", "a dog"), "chat": chat}
    direct, by_server = make_job("model", **only), make_job("server", **only)
    endpoint = EndpointConfig(url=served_url, model="tiny", at_once=3)
    object.__setattr__(by_server, "config", by_server.config.model_copy(update={"endpoint": endpoint}))
    metrics, cost = evaluate(direct)
    found, served_cost = evaluate(by_server)
    assert found == metrics and served_cost["forward_tokens"] >= cost["forward_tokens"]
    expected = [record | {"prompt": ""} for record in records_of(direct)]
    assert [record | {"prompt": ""} for record in records_of(by_server)] == expected
    assert len({record["output"] for record in expected}) > 1
    direct_results, results = (json.loads((j.output / "results.json").read_text()) for j in (direct, by_server))
    assert results == direct_results


@pytest.fixture
def choices(make_job, tmp_path):
    """choices(name, url): the job of a benchmark by likelihood, of the served model at the url, or else of a folder."""
    rows = [{"question": f"{w} the cat?", "choices": ["sat", "on", "a mat"], "answer": 1} for w in "abcdefgh"]
    source = {"url": write_rows(tmp_path / "choices.jsonl", rows), "adapter": "multiple_choice"}
    benchmark = BenchmarkConfig(name="words", form="multiple_choice", source=source)

    def made(name, url="none"):
        job = make_job(name, benchmarks=(benchmark,), sample_prompts=(), chat=False)
        endpoint = EndpointConfig(url=url, model="" if url == "none" else "tiny", at_once=3)
        object.__setattr__(job, "config", job.config.model_copy(update={"endpoint": endpoint}))
        return job

    return made


def test_likelihoods_of_a_served_model_are_those_of_its_folder(choices, served_url):
    direct, by_server = choices("model"), choices("server", served_url)
    metrics, cost = evaluate(direct)
    found, served_cost = evaluate(by_server)
    assert found == metrics and served_cost["forward_tokens"] >= cost["forward_tokens"]
    for record, expected in zip(records_of(by_server), records_of(direct), strict=True):
        assert record["logprobs"] == pytest.approx(expected["logprobs"], abs=2e-4)  # records have 4 decimals
        assert len(set(expected["logprobs"])) == 3
        assert record | {"logprobs": 0} == expected | {"logprobs": 0}


def test_a_token_over_the_end_of_the_context_is_the_answers_and_what_is_written_behind_is_nobodys(choices):
    def told(body, number):
        text, names = body["prompt"], []
        while text:  # tokens of four letters
            names, text = [*names, text[:4]], text[4:]
        names.append("more")
        tops = [{name: -0.5 * n, "other": -3.0} for n, name in enumerate(names)]
        offsets = [sum(map(len, names[:n])) for n in range(len(names))]
        logprobs = [None, *(-0.5 * n for n in range(1, len(names)))]
        scores = {"tokens": names, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}
        return {"logprobs": scores}

    with openai(told) as (url, asked):
        job = choices("a", url)
        evaluate(job)
    assert {body["echo"] for _, _, body in asked} == {True} and len(asked) == 24
    first = records_of(job)[0]
    context, answer = first["prompt"], first["choices"][0]
    own = range(len(context) // 4, -(-len(context + answer) // 4))
    assert first["logprobs"][0] == -0.5 * sum(own) and len(own) > 0


@pytest.mark.parametrize("offsets", [None, [-1, -1], []])
def test_a_server_that_scores_no_prompt_or_says_not_where_is_named(choices, offsets):
    told = {"tokens": ["a", "b"], "token_logprobs": [None, -1.0], "top_logprobs": [None, {"b": -1.0}]}
    reply = {} if offsets is None else {"logprobs": {**told, "text_offset": offsets}}
    with (
        openai(lambda body, number: reply) as (url, _),
        pytest.raises(ConfigError, match=r"no log-probabilities of a prompt \(echo, logprobs\)"),
    ):
        evaluate(choices("a", url))


@pytest.fixture(scope="module")
def served_url(models, tmp_path_factory):
    with served(models["qwen3"], tmp_path_factory.mktemp("serve") / "log") as (_, said):
        yield re.search(r"http://127.0.0.1:\d+/v1", said)[0]


STAGE = {"kind": "eval", "endpoint": {"url": "http://127.0.0.1:9/v1", "model": "m", "key": "env:KEY_OF_TEST"}}


@pytest.fixture
def resolved(tmp_path):
    """resolved(url, machine): a pipeline of one stage, of a model at that URL, with one benchmark of each kind."""
    lines = [{"question": "1+1?", "answer": "2", "text": "a text of some words " * 9}]
    source = write_rows(tmp_path / "rows.jsonl", lines)
    benchmarks = [
        {"name": "words", "form": "problems", "source": {"url": source, "adapter": "problem"}},
        {"name": "bits_per_byte", "source": {"url": source, "adapter": "text"}},
    ]

    def of(url, machine="1x24GB"):
        endpoint = {**STAGE["endpoint"], "url": url}
        stages = {"elsewhere": {**STAGE, "endpoint": endpoint, "benchmarks": benchmarks}}
        (tmp_path / "pipeline.yaml").write_text(yaml.safe_dump({"presets": {"one": {"stages": stages}}}))
        return resolve(tmp_path / "pipeline.yaml", "one", machine=machine_of(machine)).pipeline

    return of


def test_preflight_names_a_benchmark_of_likelihoods_and_a_server_that_is_gone(resolved, tmp_path):
    with openai() as (url, _):
        checks = Checks(resolved(url), tmp_path / "doing")
        checks.stage("elsewhere")
        (fault,) = checks.faults
        assert (
            "elsewhere.benchmarks.1: Benchmark 'bits_per_byte' is scored by the likelihood of whole texts, which an"
            in fault
        )
    checks = Checks(resolved(url), tmp_path / "doing")
    checks.stage("elsewhere")
    assert (
        f"elsewhere.endpoint: endpoint.url {url} does not say which model it serves: ConnectError" in checks.faults[0]
    )
    only_names = Checks(resolved(url), tmp_path / "doing", only_names=True)
    only_names.stage("elsewhere")
    assert len(only_names.faults) == 1


def test_a_plan_knows_no_time_and_gives_it_no_gpu(resolved):
    pipeline = resolved("http://127.0.0.1:9/v1")
    (plan,) = plan_of(pipeline, machine_of("1x24GB")).stages
    assert (plan.device, plan.num_gpus, plan.seconds, plan.faults) == ("cpu", 0, None, [])
    assert plan.notes == ("it is served",)


def test_the_key_holds_what_the_server_lists_of_its_model_and_not_what_changes_at_each_call():
    of = {"model": "m", "key": "env:KEY_OF_TEST"}
    with openai(card={"root": "/models/m", "weight_version": "3"}) as (url, _):
        endpoint = EndpointConfig(url=url, **of)
        identity = {"kind": "server", "url": url, "model": "m", "root": "/models/m", "weight_version": "3"}
        assert server_identity(url, endpoint) == identity
        with pytest.raises(ConfigError, match=r"endpoint.model 'other' is not among m"):
            server_identity(url, EndpointConfig(url=url, model="other"))


@pytest.mark.parametrize(
    ("endpoint", "said"),
    [({"key": SECRET}, "write env:NAME"), ({"url": f"http://me:{SECRET}@h/v1"}, "no login"),
     ({"url": f"http://h/v1?key={SECRET}"}, "query"), ({"url": "h:8000"}, "must be like http"),
     ({"url": "none"}, "url and model go together"), ({"model": ""}, "url and model go together")],
)  # fmt: skip
def test_a_key_in_the_config_is_refused_and_not_shown(resolved, tmp_path, endpoint, said):
    resolved("http://h/v1")
    table = yaml.safe_load((tmp_path / "pipeline.yaml").read_text())
    table["presets"]["one"]["stages"]["elsewhere"]["endpoint"] |= endpoint
    (tmp_path / "pipeline.yaml").write_text(yaml.safe_dump(table))
    with pytest.raises(ConfigError) as raised:
        resolve(tmp_path / "pipeline.yaml", "one")
    assert said in str(raised.value) and SECRET not in str(raised.value)


@pytest.mark.parametrize("change", [{"inputs": {"model": "base"}}, {"endpoint": {}}])
def test_a_stage_has_one_model(change):
    stage = EvalStage(**{**STAGE, "benchmarks": [{"name": "gsm8k"}], **change})
    with pytest.raises(ValueError, match=r"name a model, or endpoint.url, and not both"):
        stage.check_inputs()


def test_the_report_shows_it_under_its_own_name(tmp_path):
    run = finished_run(tmp_path)
    served_elsewhere = {**run["stages"]["eval_sft"], "lineage": {}, "key": "f" * 40, "digest": "e" * 64}
    run["stages"]["elsewhere"] = served_elsewhere
    columns = columns_of(stages_of(run))
    (column,) = [column for column in columns if column.stage.name == "elsewhere"]
    assert column.label == "ELSEWHERE"
    assert column.samples_path("sort") == column.stage.files / "samples" / "sort.jsonl"
