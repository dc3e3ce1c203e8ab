"""Agents that ask the policy by OpenAI's API: what is kept of their calls, their limits, and what becomes of those that
fail. Agents are real processes; the sampler is a fake that we own."""

import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from nanodag.children import forks
from nanodag.config import resolve
from nanodag.errors import SamplerLost
from nanodag.host.folders import PROJECT
from nanodag.inference.protocol import Completion, FinishReason, VersionSpan
from nanodag.rewards.reward_pool import SampleReward
from nanodag.rl.control.generation import RolloutGenerator
from nanodag.rl.environments import agents
from nanodag.rl.environments.agent_session import _up_to
from nanodag.rl.environments.api_server import the_api_server
from nanodag.rl.environments.runner import Turns
from nanodag.rl.rollouts.rollout import finish_reason_of
from nanodag.tokenizer.chat import NativeRenderer, load_renderer
from nanodag.tokenizer.encoding import Encoding
from tests.rl.stages import VOCABULARY
from tests.rl.test_turns import Cursor, Script, SeenPool, config, folder, ids, prompts  # noqa: F401 - two are fixtures

AGENTS = '''
import json, os, random, socket, subprocess, sys, threading, time, urllib.error, urllib.request

def keys(task=None):
    """Those of earlier samples; the last few may still be valid. A task's own is added."""
    with open(__file__ + ".keys", "a+") as file:
        file.seek(0)
        found = file.read().split()
        file.write(f"{task.api_key}\\n" if task else "")
    return found

def post(task, path, body, key=None):
    """The answer, or the code with which it is refused."""
    headers = {"Authorization": f"Bearer {key or task.api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(task.base_url + path, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return json.load(reply)
    except urllib.error.HTTPError as error:
        return json.load(error)["error"]["code"]

def said(task, messages, **more):
    return post(task, "/chat/completions", {"model": "gpt-9", "messages": messages, **more})["choices"][0]["message"]

def user(text):
    return {"role": "user", "content": text}

TOOL = {"type": "function", "function": {"name": "shout", "parameters": {"properties": {"text": {"type": "string"}}}}}

def with_subagent(task):
    """A call of a tool whose result another conversation gives."""
    messages = [user("main")]
    first = said(task, messages, tools=[TOOL], temperature=0.1, seed=3)
    text = json.loads(first["tool_calls"][0]["function"]["arguments"])["text"]
    other = said(task, [user("sub " + text)])["content"]
    result = {"role": "tool", "content": other, "tool_call_id": first["tool_calls"][0]["id"]}
    last = said(task, [*messages, first, result], tools=[TOOL])
    return 0.5, {"length": len(last["content"])}

def forms(task):
    """Several choices, a stop string, a stream, texts, too much at once."""
    two = post(task, "/chat/completions", {"messages": [user("two")], "n": 2})["choices"]
    cut = said(task, [user("cut")], stop=["y", "q"])["content"]
    short = said(task, [user("short")], max_tokens=1)["content"]
    headers = {"Authorization": "Bearer " + task.api_key, "Content-Type": "application/json"}
    body = json.dumps({"messages": [user("stream")], "stream": True}).encode()
    with urllib.request.urlopen(urllib.request.Request(task.base_url + "/chat/completions", body, headers)) as reply:
        events = [json.loads(line[6:]) for line in reply if line.startswith(b"data: {")]
    stream = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
    text = post(task, "/completions", {"prompt": "ab", "max_tokens": 2})["choices"][0]["text"]
    more = post(task, "/completions", {"prompt": "ab" + text + "cd", "max_tokens": 1})["choices"][0]["text"]
    refused = [
        post(task, "/chat/completions", {"messages": [user("?")], **one})
        for one in ({"tool_choice": "required", "tools": [TOOL]}, {"top_logprobs": 2, "logprobs": True}, {"min_p": 0.5})
    ]
    return json.dumps([sorted(one["message"]["content"] for one in two), cut, short, stream, text, more, refused])

def named(task):
    """The name of a call, which some chat templates render."""
    return said(task, [user("main")], tools=[TOOL])["tool_calls"][0]["id"]

def rude(task):
    how = task.seed % 6
    if how != 4:
        said(task, [user("?")])
    if how == 0:
        raise RuntimeError("no luck")
    if how == 1:
        time.sleep(60)
    if how == 2:
        print("a last word", flush=True)
        os._exit(3)
    if how == 3:
        return {"reward": 1}
    if how == 5:
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    return 1.0

def late(task):
    """What the key of the sample before it does, and what one that nobody gave does."""
    assert all(post(task, "/answer", {"answer": answer}) is None for answer in (3, "x" * (1 << 21)))
    codes = [post(task, "/chat/completions", {"messages": [user("?")]}, key) for key in keys(task)[-1:] + ["nanodag-x"]]
    said(task, [user("!")])
    return json.dumps(codes)

def greedy(task):
    """Calls until it is refused."""
    messages = [user("go")]
    while True:
        messages += [said(task, messages), user("more")]

def compacts(task):
    """Calls until there is no room, then begins with less."""
    try:
        greedy(task)
    except TypeError:  # a refusal is no answer
        return said(task, [user("in short")])["content"]

def killed(task):
    """Killed in the middle, the first two times."""
    said(task, [user("go")])
    with open(__file__ + ".times", "a") as times:
        times.write("x")
        times.flush()
        if times.tell() < 3:
            os.kill(os.getpid(), 9)
    return said(task, [user("on")])["content"]

def hostile(task):
    """One of many ways to go wrong, by the number of the prompt; every fourth agent does as it should."""
    number = int(task.record["prompt_id"].removeprefix("p"))
    if number % 4:
        WAYS[random.Random(number).randrange(len(WAYS))](task)
    first = said(task, [user(f"{number}?")])["content"]
    both = first + said(task, [user(f"{number}? {first}")])["content"]
    keys(task)
    return both

def raw(task, data, path="/chat/completions", method="POST"):
    headers = {"Authorization": "Bearer " + task.api_key}
    request = urllib.request.Request(task.base_url + path, data, headers, method=method)
    try:
        return urllib.request.urlopen(request, timeout=30).status
    except urllib.error.HTTPError as error:
        assert 400 <= error.code < 500, error.code
        return error.code

def hung_up(task):
    host, _, port = task.base_url.removeprefix("http://").removesuffix("/v1").partition(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\\r\\nContent-Length: 900\\r\\n\\r\\n{")

def leave(call):
    threading.Thread(target=call, daemon=True).start()
    time.sleep(0.01)

def descriptors():
    return [int(name) for name in os.listdir("/proc/self/fd") if int(name) > 2]

WAYS = [
    lambda task: 1 / 0,
    lambda task: sys.exit(0),
    lambda task: os._exit(1),
    lambda task: os.kill(os.getpid(), 9),
    lambda task: os.kill(os.getpid(), 11),
    lambda task: time.sleep(60),
    lambda task: bytearray(8 << 30),
    lambda task: subprocess.Popen(["sleep", "60"]),
    lambda task: subprocess.Popen(["sleep", "60"], start_new_session=True),
    lambda task: subprocess.run("sleep 60 &", shell=True),
    lambda task: leave(lambda: time.sleep(60)),
    lambda task: leave(lambda: [said(task, [user("late")]) for _ in range(9)]),
    lambda task: [post(task, "/chat/completions", {"messages": [user("?")]}, key) for key in keys()[:-6][-3:]],
    lambda task: [post(task, "/reward", {"reward": 9}, f"nanodag-{guess}") for guess in range(3)],
    lambda task: [raw(task, data) for data in (b"", b"{", b"[]", b"{}", b"null", b'{"messages": 3}', b"x" * 100000)],
    lambda task: [raw(task, None, path, "GET") for path in ("/x", "/../reward", "/models/" + "x" * 5000)],
    lambda task: [raw(task, body.encode(), "/reward") for body in ('{"reward": NaN}', '{"reward": "1"}', '{"x": 1}')],
    lambda task: [hung_up(task) for _ in range(5)],
    lambda task: said(task, [user("x" * 100000)]),
    lambda task: said(task, [user("?")], n=128, temperature=9.0),
    lambda task: said(task, [{"role": "tool", "content": "?"}]),
    lambda task: [said(task, [user("more")]) for _ in range(99)],
    lambda task: print("x" * 1000000),
    lambda task: [os.close(number) for number in descriptors()],
    lambda task: [os.write(number, b"rubbish\\n") for number in descriptors()],
    lambda task: sys.setrecursionlimit(10**9) or (lambda again: again(again))(lambda again: again(again)),
    lambda task: os.environ.update(OPENAI_API_KEY="x", OPENAI_BASE_URL="x") or sys.path.clear(),
]

def two_at_once(task):
    found = {}
    def ask(name):
        messages = [user(name)]
        messages += [said(task, messages), user("and")]
        found[name] = said(task, messages)["content"]
    threads = [threading.Thread(target=ask, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return " ".join(found[name] for name in "abc")
'''


@pytest.fixture(autouse=True)
def _module(tmp_path, monkeypatch):
    (tmp_path / "tiny_agents.py").write_text(AGENTS)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    forks.end_all()
    agents._server.forget()


class Pool(SeenPool):
    """Rewards that were reported, else those of SeenPool."""

    def submit_group(self, prompt, completions, *, reported=()):
        futures = super().submit_group(prompt, completions)
        for future, one in zip(futures, reported):
            if one is not None:
                future._result = SampleReward(one["value"], one["components"])
        return futures


def generated(folder, says, function_or_options, *, name="", context=200, count=1, only=(), options=None, **values):  # noqa: F811
    """The rollouts of one step, the sampler's requests, and what the reward saw."""
    script, pool, encoding, renderer = Script(says), Pool(), Encoding(folder), load_renderer(folder)
    generate = {"name": name, "options": function_or_options}
    if not name:
        named = f"agent:tiny_agents:{function_or_options}"
        generate = {"name": named, "options": {"seconds": 20.0, **(options or {})}}
    stage = config(
        **(
            {"generate": generate, "filters": [], "prompts_per_step": len(only) or count, "max_failed_rewards": 1.0}
            | values
        )
    )
    turns = Turns(stage, encoding, renderer, context=context, vocabulary=VOCABULARY)
    generator = RolloutGenerator(stage, script, pool, encoding, renderer.stop_ids, turns)
    asked = [
        prompt
        for prompt in prompts(lambda text: [266 - 10, *text[-2:].encode()], count)
        if not only or prompt.prompt_id in only
    ]

    async def step():
        return await generator.step(Cursor(asked), 1)

    return asyncio.run(step()).all_rollouts, script.requests, pool.seen


def test_calls_that_go_on_are_one_sequence_and_others_branches_of_the_same_sample(folder, ids):  # noqa: F811
    def says(request):
        text = Encoding(folder).decode(request.input_ids)
        if "sub" in text:
            return ids("HI<|end|>")
        return ids("ok<|end|>") if "tool_result" in text else ids("<|tool_call|>hi<|tool_call_end|>")

    rollouts, requests, _ = generated(folder, says, "with_subagent")
    assert [(one.sample_index, one.branch) for one in rollouts] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    main, sub = rollouts[:2]
    expected = "<|bos|><|user|>main<|end|><|assistant|>"
    assert main.prompt_token_ids == tuple(ids(expected))
    response = "<|tool_call|>hi<|tool_call_end|><|tool_result|>HI<|tool_result_end|>ok<|end|>"
    assert main.response_token_ids == tuple(ids(response))
    assert main.sampled_token_ids == tuple(ids("<|tool_call|>hi<|tool_call_end|>ok<|end|>"))
    assert sub.response_token_ids == tuple(ids("HI<|end|>"))
    assert {one.reward for one in rollouts} == {0.5} and main.reward_components["length"] == 2.0
    assert {request.params.temperature for request in requests} == {1.0}


def test_a_tool_call_has_the_same_name_each_time_and_no_proxy_stands_before_the_api(folder, ids, monkeypatch):  # noqa: F811
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    says = lambda request: ids("<|tool_call|>hi<|tool_call_end|>")  # noqa: E731
    (_, _, once), (_, _, again) = (generated(folder, says, "named", samples_per_prompt=1) for _ in range(2))
    assert once == again and once[0].startswith("call_") and len(once[0]) == 29


def test_choices_stop_strings_streams_and_texts_are_trained_as_far_as_the_agent_has_seen_them(folder, ids):  # noqa: F811
    def says(request):
        text = Encoding(folder).decode(request.input_ids)
        return [65 + request.params.sampling_seed % 26, *ids("<|end|>")] if "two" in text else ids("xyz<|end|>")

    rollouts, requests, answers = generated(folder, says, "forms", samples_per_prompt=1)
    two, *others = json.loads(answers[0])
    assert two[0] != two[1] and others == ["x", "x", "xyz", "xy", "x", [None, None, None]]
    assert {request.params.max_new_tokens for request in requests} == {16, 1, 2}
    found = {(Encoding(folder).decode(one.response_token_ids), one.finish_reason) for one in rollouts}
    ended = {f"{two[0]}<|end|>", f"{two[1]}<|end|>", "xyz<|end|>"}
    assert found == {("xy", "text"), ("x", "length"), ("xycdx", "length"), *((text, "stop") for text in ended)}


def test_each_way_to_fail_fails_its_own_sample_with_the_reason(folder, tmp_path):  # noqa: F811
    rollouts, _, _ = generated(
        folder, lambda request: [7, 2], "rude", count=4, samples_per_prompt=6, options={"seconds": 3.0, "at_once": 4}
    )
    reasons = {}
    for one in rollouts:
        reasons.setdefault(str(one.metadata.get("generate_error", "")).partition(";")[0], []).append(one)
    ends = set(reasons)
    raised = AGENTS[: AGENTS.index("raise RuntimeError")].count("\n") + 1
    assert ends == {
        "",
        f"RuntimeError: no luck ({tmp_path / 'tiny_agents.py'}, line {raised}, in rude)",
        "it took longer than 3 s",
        "its process ended with code 3",
        "ValueError: the reward is {'reward': 1}",
        "ValueError: the agent asked for no answer, so there is nothing to train",
    }
    assert all(one.reward == 1.0 for one in reasons[""])
    died = [one.metadata["last_words"] for one in rollouts if "code 3" in str(one.metadata)]
    assert died and set(died) == {"a last word"}


def test_a_key_is_of_no_use_once_its_sample_has_ended_and_one_that_nobody_gave_never(folder):  # noqa: F811
    says = lambda request: [7, 2]  # noqa: E731
    _, requests, answers = generated(folder, says, "late", samples_per_prompt=3, options={"at_once": 1})
    assert sorted(answers) == ['["invalid_api_key"]'] + ['["sample_ended", "invalid_api_key"]'] * 2
    assert len(requests) == 3


@pytest.mark.parametrize(
    "limit, how", [({"max_calls": 3}, {}), ({"max_tokens": 5}, {}), ({}, {"max_new_tokens": 6}), ({}, {"context": 40})]
)
def test_an_agent_that_meets_a_limit_is_cut_off_and_its_sample_is_judged(folder, ids, limit, how):  # noqa: F811
    says = lambda request: ids("x<|end|>")  # noqa: E731
    rollouts, requests, answers = generated(folder, says, "greedy", options=limit, **how)
    assert len(rollouts) == 2 and answers == ["", ""]
    for one in rollouts:
        assert one.finish_reason == "length" and one.num_sampled == len(requests) and "limit" in one.metadata
    assert 3 <= len(requests) // 2 <= 4


def test_an_agent_that_goes_on_with_less_context_is_not_cut_off_and_each_conversation_is_rendered_once(
    folder,  # noqa: F811
    ids,  # noqa: F811
    monkeypatch,
):
    def counted(self, messages, *given, **more):
        rendered.append(messages[0]["content"])
        return opened(self, messages, *given, **more)

    rendered, opened = [], NativeRenderer.opened
    monkeypatch.setattr(NativeRenderer, "opened", counted)
    says = lambda request: ids("x<|end|>")  # noqa: E731
    rollouts, requests, answers = generated(folder, says, "compacts", samples_per_prompt=1, max_new_tokens=6)
    assert answers == ["x"] and len(requests) == 4 and [one.finish_reason for one in rollouts] == ["stop", "stop"]
    assert all("limit" not in one.metadata for one in rollouts)
    assert [text for text in rendered if text] == ["go", "in short"], "what goes on is not rendered from its beginning"


def test_an_answer_that_is_cut_off_behind_its_one_call_has_no_stop_token():
    ended = FinishReason(type="stop", matched=3)
    whole = Completion(
        rid="r",
        output_ids=[1, 2, 3],
        logprobs=[-1.0, -2.0, -3.0],
        finish_reason=ended,
        weight_version="0",
        weight_versions=[VersionSpan(start=0, end=3, version="0")],
        num_prompt_tokens=1,
    )
    kept = _up_to(whole, SimpleNamespace(num_tokens=2, stop_reason=None))
    assert (kept.output_ids, kept.logprobs, kept.token_versions()) == ([1, 2], [-1.0, -2.0], ["0", "0"])
    assert finish_reason_of(kept) == "text" and finish_reason_of(whole) == "stop"


def test_parallel_calls_give_the_same_sample_whoever_is_answered_first(folder, ids):  # noqa: F811
    def draws(request):
        number = request.params.sampling_seed
        return [65 + number % 26] * (1 + number % 3) + ids("<|end|>")

    async def slowly(request):
        await asyncio.sleep(random.random() / 20)
        return draws(request)

    one = generated(folder, slowly, "two_at_once")
    assert generated(folder, slowly, "two_at_once")[0] == one[0] and len(one[0]) == 6
    assert len({rollout.spans for rollout in one[0]}) == 6


def test_an_agent_that_is_killed_begins_anew_and_is_answered_the_same(folder, ids):  # noqa: F811
    says = lambda request: [65 + request.params.sampling_seed % 26, *ids("<|end|>")]  # noqa: E731
    rollouts, requests, _ = generated(folder, says, "killed", samples_per_prompt=1)
    asked = [(request.input_ids, request.params) for request in requests]
    assert asked[0] == asked[1] == asked[2] and len(asked) == 4
    assert [one.num_sampled for one in rollouts] == [2, 2]


def test_a_sampler_that_is_lost_ends_the_agent_and_is_blamed(folder):  # noqa: F811
    def lost(request):
        raise SamplerLost("gone")

    with pytest.raises(SamplerLost):
        generated(folder, lost, "greedy")


PROGRAM = """
import json, os, socket, sys, time, urllib.request

def post(path, body):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request))

record = json.load(open(os.environ["NANODAG_TASK"]))
said = post("/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})["choices"][0]["message"]["content"]
number = int(record["prompt_id"].removeprefix("p"))
if number == 1:
    while True:
        os.fork()
if number == 2:
    time.sleep(60)
if number == 3:
    sys.exit("no luck")
post("/reward", {"reward": 0.25, "components": {"format": 1}})
try:
    socket.create_connection(("192.0.2.1", 80), timeout=5)
except OSError as error:
    print(f"{said} {error.strerror} {os.access(__file__, os.W_OK)}")
open("found.txt", "w").close() if number == 4 else open("/tmp/work/found.txt", "w").write(f"{said} in a file")
"""


def program(tmp_path, text=PROGRAM) -> str:
    where = tmp_path / "agent"
    where.mkdir()  # the sandbox's user may read it, but not what is above it
    (where / "agent.py").write_text(text)
    return str(where)


def test_a_program_in_the_sandbox_has_the_api_and_no_network_and_a_hostile_one_fails_its_own_sample(folder, tmp_path):  # noqa: F811
    options = {"command": ("python", "agent.py"), "folder": program(tmp_path), "seconds": 4.0, "max_processes": 24}
    says = lambda request: [72, 73]  # noqa: E731
    rollouts, _, answers = generated(folder, says, options, name="agent", count=5, samples_per_prompt=1)
    (good, *failed), reasons = rollouts, [str(one.metadata.get("generate_error")) for one in rollouts]
    words = [str(one.metadata.get("last_words")) for one in rollouts]
    assert good.reward == 0.25 and good.reward_components == {"format": 1.0} and good.metadata["calls"] == 1
    assert answers == ["HI Network is unreachable False"]
    assert len(failed) == 4 and all(one.finish_reason == "error" for one in failed)
    assert "BlockingIOError" in words[1] or "it took longer than 4 s" in reasons[1]
    assert "it took longer than 4 s" in reasons[2]
    assert reasons[3].endswith("code 1") and words[3] == "no luck" and "Read-only file system" in words[4]


THIEF = """
import json, os, pathlib, re, time, urllib.request

def post(key):
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers))

def read(path):
    try:
        with open(path, "rb") as stream:
            return stream.read(1 << 20) if path.is_file() else b""
    except (OSError, ValueError):
        return b""

mine = os.environ["OPENAI_API_KEY"]
post(mine)
time.sleep(1)
paths = [path for top in ("tmp", "inside", "dev/shm", "run", "var", "home", "root", "etc")
         for path in pathlib.Path("/", top).rglob("*")]
for process in pathlib.Path("/proc").glob("[0-9]*"):
    paths += [process / "environ", process / "cmdline", *process.glob("fd/*"), *process.glob("root/tmp/*")]
found = {key.decode() for path in paths for key in re.findall(rb"nanodag-[\\w-]{43}", read(path))}
print(len(found), found <= {mine}, len(list(pathlib.Path("/proc").glob("[0-9]*"))) < 9)
for key in found - {mine}:
    post(key)
"""


def test_a_program_that_looks_everywhere_finds_its_own_key_alone(folder, tmp_path):  # noqa: F811
    def says(request):
        files = [path for path in Path(tempfile.gettempdir()).glob("nanodag-scratch-sandbox-*/*") if path.is_file()]
        keys = [key.encode() for key in the_api_server()._sessions]
        lying.extend(path.name for path in files if any(key in path.read_bytes() for key in keys))
        return [72, 73]

    lying = []
    options = {"command": ("python", "agent.py"), "folder": program(tmp_path, THIEF), "max_processes": 24}
    rollouts, _, answers = generated(folder, says, options, name="agent", count=3, samples_per_prompt=1)
    assert answers == ["1 True True"] * 3 and [one.metadata["calls"] for one in rollouts] == [1] * 3
    assert lying == [], "a folder that the user shows may hold them"


def test_the_file_that_a_program_leaves_is_what_the_reward_judges(folder, tmp_path):  # noqa: F811
    options = {"command": ("python", "agent.py"), "folder": program(tmp_path), "answer_file": "found.txt"}
    _, _, answers = generated(folder, lambda request: [72, 73], options, name="agent", samples_per_prompt=1)
    assert answers == ["HI in a file"]


def test_a_pipeline_file_may_have_a_program_as_agent(tmp_path):
    program(tmp_path)
    command = f"rl.generate={{name: agent, options: {{command: [python, agent.py], folder: {tmp_path}/agent}}}}"
    options = resolve(PROJECT / "pipeline.yaml", "pocket", [command]).pipeline.stages["rl"].rollout.generate.options
    assert options["command"] == ("python", "agent.py")


def test_options_of_agents_are_checked_before_anything_runs(tmp_path):
    for generate, message in [
        ({"name": "agent"}, "needs the option 'command'"),
        ({"name": "agent:my_agents:solve", "options": {"pyhton": "x"}}, "has no option 'pyhton'"),
        ({"name": "agent:solve"}, "needs a function as agent:package.module:function"),
    ]:
        with pytest.raises(ValueError, match=message):
            config(generate=generate)


def _wrong(count: int, folder):  # noqa: F811
    """What came of so many agents, a quarter of which are as they should be, and of these alone."""

    def says(request):
        return [65 + request.params.sampling_seed % 26]

    options = {"seconds": 6.0 if count < 1000 else 30.0, "at_once": 16, "max_bytes": 2 << 30}
    values = {"samples_per_prompt": 1, "options": options}
    rollouts, _, _ = generated(folder, says, "hostile", count=count, **values)
    quiet = [f"p{number}" for number in range(0, count, 4)]
    alone, _, _ = generated(folder, says, "hostile", count=count, only=quiet, **values)
    return rollouts, alone


@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_agents_that_go_wrong_end_no_run_and_touch_no_other_sample(folder, count):  # noqa: F811
    rollouts, alone = _wrong(count, folder)
    assert len({one.prompt_id for one in rollouts}) == count and len({one.prompt_id for one in alone}) == count // 4
    assert all(one.finish_reason == "length" for one in alone)
    ours = [replace(one, reward=None) for one in rollouts if int(one.prompt_id[1:]) % 4 == 0]
    assert sorted(ours, key=str) == sorted((replace(one, reward=None) for one in alone), key=str)
    assert sum(one.finish_reason == "error" for one in rollouts) >= count / 4


def test_nothing_of_an_agent_is_left_when_the_process_that_started_it_is_killed(tmp_path):
    """Neither the process nor what it started in a session of its own."""
    (tmp_path / "long_agent.py").write_text(
        "import os, subprocess, time\n\n"
        "def solve(task):\n"
        "    child = subprocess.Popen(['sleep', '300'], start_new_session=True)\n"
        "    open(task.record['path'], 'w').write(f'{os.getppid()} {os.getpid()} {child.pid}')\n"
        "    time.sleep(300)\n"
    )
    found = tmp_path / "pids"
    program = (
        "import asyncio\n"
        "from nanodag.children.forks import ForkServer, Limits\n"
        f"given = {{'path': 'long_agent:solve', 'folders': [{str(tmp_path)!r}]}}\n"
        "server = ForkServer('nanodag.rl.environments.agent_fork:make', given, Limits(), name='it')\n"
        f"task = {{'record': {{'path': {str(found)!r}}}, 'base_url': '', 'api_key': '', 'model': '', 'seed': 1}}\n"
        "async def main():\n"
        "    await server.fork().ask(task, 300)\n"
        "asyncio.run(main())\n"
    )
    controller = subprocess.Popen([sys.executable, "-c", program])
    while not (found.is_file() and len(found.read_text().split()) == 3):
        assert controller.poll() is None
        time.sleep(0.01)
    pids = [int(pid) for pid in found.read_text().split()]
    controller.kill()
    controller.wait()
    deadline = time.monotonic() + 30
    while left := [pid for pid in pids if psutil.pid_exists(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)
