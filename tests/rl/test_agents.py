"""Agents that ask the policy by OpenAI's API: what is kept of their calls, and their limits. Agents are real
processes."""

import asyncio
import contextlib
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from nanodag.config import resolve
from nanodag.errors import SamplerLost
from nanodag.host.folders import PROJECT
from nanodag.tokenizer.chat import NativeRenderer
from nanodag.tokenizer.encoding import Encoding
from tests.fault.processes import wait_until
from tests.rl import agents
from tests.rl.fakes import FakeSampler, SeenPool
from tests.rl.turns import batch_of, generator_of, ids_of, prompts, speaking


def generated(folder, says, agent, *, context=200, count=1, samples=1, options=None, answer="", **values):
    """The rollouts of one step, the sampler's requests, and what the reward saw. says: the answer, or gives its ids for
    a request. agent: a function's name in `agents`, or the options of a program. answer: the prompt's."""
    sampler = FakeSampler(says) if callable(says) else speaking(Encoding(folder), lambda text: says)
    pool = SeenPool(takes_reported=True)
    generate = {"name": f"agent:{agents.__name__}:{agent}", "options": {"seconds": 20.0, **(options or {})}}
    generate = generate if isinstance(agent, str) else {"name": "agent", "options": agent}
    values = {"filters": [], "prompts_per_step": count, "max_failed_rewards": 1.0, **values}
    values |= {"samples_per_prompt": samples, "sampler": {"context": context, "max_batch": 64}}
    generator = generator_of(folder, sampler, pool, generate=generate, **values)
    return batch_of(generator, prompts(folder, count, answer=str(answer))).all_rollouts, sampler.requests, pool.seen


def drawn(folder):
    """Answers of a letter by their seeds."""
    return lambda request: [65 + request.params.sampling_seed % 26, *ids_of(Encoding(folder), "<|end|>")]


def test_calls_that_go_on_are_one_sequence_and_others_branches_of_the_same_sample(folder, encoding, ids):
    def says(request):
        text = encoding.decode(request.input_ids)
        if "sub" in text:
            return ids("HI<|end|>")
        return ids("ok<|end|>") if "tool_result" in text else ids("<|tool_call|>hi<|tool_call_end|>")

    rollouts, requests, _ = generated(folder, says, "with_subagent", samples=2)
    assert [(one.sample_index, one.branch) for one in rollouts] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    main, sub = rollouts[:2]
    assert main.prompt_token_ids == tuple(ids("<|bos|><|user|>main<|end|><|assistant|>"))
    response = "<|tool_call|>hi<|tool_call_end|><|tool_result|>HI<|tool_result_end|>ok<|end|>"
    assert main.response_token_ids == tuple(ids(response))
    assert main.sampled_token_ids == tuple(ids("<|tool_call|>hi<|tool_call_end|>ok<|end|>"))
    assert sub.response_token_ids == tuple(ids("HI<|end|>"))
    assert {one.reward for one in rollouts} == {0.5} and main.reward_components["length"] == 2.0
    assert {request.params.temperature for request in requests} == {1.0}


def test_a_call_has_the_same_name_each_time_and_ends_an_answer_of_one_call_and_no_proxy_stands_before_the_api(
    folder, ids, monkeypatch
):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    call = "<|tool_call|>hi<|tool_call_end|>"
    (rollouts, _, once), (_, _, again) = (generated(folder, f"{call}more<|end|>", "named") for _ in range(2))
    assert once == again and once[0].startswith("call_") and len(once[0]) == 29
    (rollout,) = rollouts
    assert rollout.response_token_ids == tuple(ids(call)) and rollout.finish_reason == "text"


def test_choices_stop_strings_streams_and_texts_are_trained_as_far_as_the_agent_has_seen_them(folder, encoding, ids):
    def says(request):
        return drawn(folder)(request) if "two" in encoding.decode(request.input_ids) else ids("xyz<|end|>")

    rollouts, requests, answers = generated(folder, says, "forms")
    two, *others = json.loads(answers[0])
    assert two[0] != two[1] and others == ["x", "x", "xyz", "xy", "x", [None, None, None]]
    assert {request.params.max_new_tokens for request in requests} == {16, 1, 2}
    found = {(encoding.decode(one.response_token_ids), one.finish_reason) for one in rollouts}
    ended = {f"{two[0]}<|end|>", f"{two[1]}<|end|>", "xyz<|end|>"}
    assert found == {("xy", "text"), ("x", "length"), ("xycdx", "length"), *((text, "stop") for text in ended)}


def test_a_key_is_of_no_use_once_its_sample_has_ended_and_one_that_nobody_gave_never(folder, tmp_path):
    options, keys = {"at_once": 1}, tmp_path / "keys"
    _, requests, answers = generated(folder, "x<|end|>", "late", samples=3, options=options, answer=keys)
    assert sorted(answers) == ['["invalid_api_key"]'] + ['["sample_ended", "invalid_api_key"]'] * 2
    assert len(requests) == 3


LIMITS = [{"options": {"max_calls": 3}}, {"options": {"max_tokens": 5}}, {"max_new_tokens": 6}, {"context": 40}]


@pytest.mark.parametrize("limit", LIMITS)
def test_an_agent_that_meets_a_limit_is_cut_off_and_its_sample_is_judged(folder, limit):
    rollouts, requests, answers = generated(folder, "x<|end|>", "greedy", samples=2, **limit)
    assert len(rollouts) == 2 and answers == ["", ""] and 3 <= len(requests) // 2 <= 4
    for one in rollouts:
        assert one.finish_reason == "length" and one.num_sampled == len(requests) and "limit" in one.metadata


def test_an_agent_that_goes_on_with_less_is_not_cut_off_and_each_conversation_is_rendered_once(folder, monkeypatch):
    def counted(self, messages, *given, **more):
        rendered.append(messages[0]["content"])
        return opened(self, messages, *given, **more)

    rendered, opened = [], NativeRenderer.opened
    monkeypatch.setattr(NativeRenderer, "opened", counted)
    rollouts, requests, answers = generated(folder, "x<|end|>", "compacts", max_new_tokens=6)
    assert answers == ["x"] and len(requests) == 4 and [one.finish_reason for one in rollouts] == ["stop", "stop"]
    assert all("limit" not in one.metadata for one in rollouts)
    assert [text for text in rendered if text in ("go", "in short")] == ["go", "in short"], "none is rendered again"


def test_parallel_calls_give_the_same_sample_whoever_is_answered_first(folder, ids):
    async def slowly(request):
        await asyncio.sleep(random.random() / 20)
        number = request.params.sampling_seed
        return [65 + number % 26] * (1 + number % 3) + ids("<|end|>")

    first, again = (generated(folder, slowly, "three_at_once", samples=2)[0] for _ in range(2))
    assert first == again and len(first) == len({rollout.spans for rollout in first}) == 6


def test_an_agent_that_is_killed_begins_anew_and_is_answered_the_same(folder, tmp_path):
    rollouts, requests, _ = generated(folder, drawn(folder), "killed", answer=tmp_path / "times")
    asked = [(request.input_ids, request.params) for request in requests]
    assert asked[0] == asked[1] == asked[2] and len(asked) == 4
    assert [one.num_sampled for one in rollouts] == [2, 2]


def test_a_sampler_that_is_lost_ends_the_agent_and_is_blamed(folder):
    def lost(request):
        raise SamplerLost("gone")

    with pytest.raises(SamplerLost):
        generated(folder, lost, "greedy")


CLIENT = """
import json, os, pathlib, re, socket, sys, time, urllib.request
mine = os.environ["OPENAI_API_KEY"]

def post(path, body, key=mine):
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request))

def ask(key=mine):
    answer = post("/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, key)
    return answer["choices"][0]["message"]["content"]
"""
PROGRAM = """
record, said = json.load(open(os.environ["NANODAG_TASK"])), ask()
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


def program(tmp_path, text=PROGRAM, **options) -> dict:
    where = tmp_path / "agent"
    where.mkdir()  # the sandbox's user may read it, but not what is above it
    (where / "agent.py").write_text(CLIENT + text)
    return {"command": ("python", "agent.py"), "folder": str(where), **options}


def test_a_program_in_the_sandbox_has_the_api_and_no_network_and_a_hostile_one_fails_its_own_sample(folder, tmp_path):
    options = program(tmp_path, seconds=4.0, max_processes=24)
    rollouts, _, answers = generated(folder, "HI", options, count=5)
    (good, *failed), reasons = rollouts, [str(one.metadata.get("generate_error")) for one in rollouts]
    words = [str(one.metadata.get("last_words")) for one in rollouts]
    assert good.reward == 0.25 and good.reward_components == {"format": 1.0} and good.metadata["calls"] == 1
    assert answers == ["HI Network is unreachable False"]
    assert len(failed) == 4 and all(one.finish_reason == "error" for one in failed)
    assert "BlockingIOError" in words[1] or "it took longer than 4 s" in reasons[1]
    assert "it took longer than 4 s" in reasons[2]
    assert reasons[3].endswith("code 1") and words[3] == "no luck" and "Read-only file system" in words[4]


THIEF = """
def read(path):
    try:
        with open(path, "rb") as stream:
            return stream.read(1 << 20) if path.is_file() else b""
    except (OSError, ValueError):
        return b""

ask()
time.sleep(1)
paths = [path for top in ("tmp", "inside", "dev/shm", "run", "var", "home", "root", "etc")
         for path in pathlib.Path("/", top).rglob("*")]
for process in pathlib.Path("/proc").glob("[0-9]*"):
    paths += [process / "environ", process / "cmdline", *process.glob("fd/*"), *process.glob("root/tmp/*")]
found = {key.decode() for path in paths for key in re.findall(rb"nanodag-[\\w-]{43}", read(path))}
print(len(found), found <= {mine}, len(list(pathlib.Path("/proc").glob("[0-9]*"))) < 9)
for key in found - {mine}:
    ask(key)
"""


def test_a_program_that_looks_everywhere_finds_its_own_key_alone(folder, tmp_path):
    def says(request):
        for scratch in Path(tempfile.gettempdir()).glob("nanodag-scratch-sandbox-*"):
            with contextlib.suppress(FileNotFoundError):  # a folder of another test that ends
                files = [path for path in scratch.iterdir() if path.is_file()]
                lying.extend(path.name for path in files if re.search(rb"nanodag-[\w-]{43}", path.read_bytes()))
        return [72, 73]

    lying = []
    options = program(tmp_path, THIEF, max_processes=24)
    rollouts, _, answers = generated(folder, says, options, count=3)
    assert answers == ["1 True True"] * 3 and [one.metadata["calls"] for one in rollouts] == [1] * 3
    assert lying == [], "a folder that the user shows may hold them"


def test_the_file_that_a_program_leaves_is_what_the_reward_judges(folder, tmp_path):
    assert generated(folder, "HI", program(tmp_path, answer_file="found.txt"))[2] == ["HI in a file"]


def test_a_pipeline_file_may_have_a_program_as_agent(tmp_path):
    program(tmp_path)
    command = f"rl.generate={{name: agent, options: {{command: [python, agent.py], folder: {tmp_path}/agent}}}}"
    options = resolve(PROJECT / "pipeline.yaml", "pocket", [command]).pipeline.stages["rl"].rollout.generate.options
    assert options["command"] == ("python", "agent.py")


STARTED = """
import asyncio, sys
from nanodag.children.forks import ForkServer, ForkLimits
given = {"path": "tests.rl.agents:lasting", "folders": [sys.argv[1]]}
server = ForkServer("nanodag.rl.environments.agent_fork:make", given, ForkLimits(), name="it")
task = {"record": {"path": sys.argv[2]}, "base_url": "", "api_key": "", "model": "", "seed": 1}

async def main():
    await server.fork().ask(task, 300)

asyncio.run(main())
"""


def test_nothing_of_an_agent_is_left_when_the_process_that_started_it_is_killed(tmp_path):
    """Neither the process nor what it started in a session of its own."""
    file = tmp_path / "pids"
    controller = subprocess.Popen([sys.executable, "-c", STARTED, str(PROJECT), str(file)], cwd=PROJECT)
    while not (file.is_file() and len(file.read_text().split()) == 3):
        assert controller.poll() is None
        time.sleep(0.01)
    pids = [int(pid) for pid in file.read_text().split()]
    controller.kill()
    controller.wait()
    wait_until(lambda: not any(map(psutil.pid_exists, pids)), 30)
