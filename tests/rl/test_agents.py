"""Agents that ask the policy by OpenAI's API: what is kept of their calls, their limits, and what becomes of those that
fail. Agents are real processes; the sampler is a fake that we own."""

import asyncio
import random

import pytest

from nanodag.errors import SamplerLost
from nanodag.rewards.reward_pool import SampleReward
from nanodag.rl.agents import function
from nanodag.rl.agents.workers import Workers
from nanodag.rl.control.generation import RolloutGenerator
from nanodag.rl.rollouts.turns.runner import Turns
from nanodag.tokenizer.chat import load_renderer
from nanodag.tokenizer.encoding import Encoding
from tests.rl.stages import VOCABULARY
from tests.rl.test_turns import Cursor, Script, SeenPool, config, folder, ids, prompts  # noqa: F401 - two are fixtures

AGENTS = '''
import json, os, subprocess, sys, threading, time, urllib.error, urllib.request

KEYS = []

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
    codes = [post(task, "/chat/completions", {"messages": [user("?")]}, key) for key in KEYS[-1:] + ["nanodag-x"]]
    KEYS.append(task.api_key)
    said(task, [user("!")])
    return json.dumps(codes)

def greedy(task):
    """Calls until it is refused."""
    messages = [user("go")]
    while True:
        messages += [said(task, messages), user("more")]

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
    made = []

    class Kept(Workers):
        def __init__(self, *arguments, **how):
            super().__init__(*arguments, **how)
            made.append(self)

    monkeypatch.setattr(function, "Workers", Kept)
    yield
    function._workers.cache_clear()
    for pool in made:
        pool.close()


class Pool(SeenPool):
    """Rewards that were reported, else those of SeenPool."""

    def submit_group(self, prompt, completions, *, reported=()):
        futures = super().submit_group(prompt, completions)
        for future, one in zip(futures, reported):
            if one is not None:
                future._result = SampleReward(one["value"], one["components"])
        return futures


def generated(folder, says, function_or_options, *, name="", context=200, count=1, options=None, **values):  # noqa: F811
    """The rollouts of one step, the sampler's requests, and what the reward saw."""
    script, pool, encoding, renderer = Script(says), Pool(), Encoding(folder), load_renderer(folder)
    generate = {"name": name, "options": function_or_options}
    if not name:
        named = f"agent:tiny_agents:{function_or_options}"
        generate = {"name": named, "options": {"seconds": 20.0, **(options or {})}}
    stage = config(generate=generate, filters=[], prompts_per_step=count, max_failed_rewards=1.0, **values)
    turns = Turns(stage, encoding, renderer, context=context, vocabulary=VOCABULARY)
    generator = RolloutGenerator(stage, script, pool, encoding, renderer.stop_ids, turns)
    asked = prompts(lambda text: [266 - 10, *text[-2:].encode()], count)

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


def test_each_way_to_fail_fails_its_own_sample_with_the_reason(folder):  # noqa: F811
    rollouts, _, _ = generated(
        folder, lambda request: [7, 2], "rude", count=4, samples_per_prompt=6, options={"seconds": 3.0, "at_once": 4}
    )
    reasons = {}
    for one in rollouts:
        reasons.setdefault(str(one.metadata.get("generate_error", "")).partition(";")[0], []).append(one)
    ends = {reason.removeprefix("AgentFailed: ") for reason in reasons}
    assert ends == {
        "",
        "RuntimeError: no luck (tiny_agents.py, line 39)",
        "it took longer than 3 s",
        "its process ended with code 3",
        "ValueError: the reward must be a finite number",
        "ValueError: the agent asked for no answer, so there is nothing to train",
    }
    assert all(one.reward == 1.0 for one in reasons[""])
    died = [str(one.metadata["generate_error"]) for one in rollouts if "code 3" in str(one.metadata)]
    assert died and all(reason.endswith("its last words: a last word") for reason in died)


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


def program(tmp_path) -> str:
    where = tmp_path / "agent"
    where.mkdir()  # the sandbox's user may read it, but not what is above it
    (where / "agent.py").write_text(PROGRAM)
    return str(where)


def test_a_program_in_the_sandbox_has_the_api_and_no_network_and_a_hostile_one_fails_its_own_sample(folder, tmp_path):  # noqa: F811
    options = {"command": ("python", "agent.py"), "folder": program(tmp_path), "seconds": 4.0, "max_processes": 24}
    says = lambda request: [72, 73]  # noqa: E731
    rollouts, _, answers = generated(folder, says, options, name="agent", count=5, samples_per_prompt=1)
    (good, *failed), reasons = rollouts, [str(one.metadata.get("generate_error")) for one in rollouts]
    assert good.reward == 0.25 and good.reward_components == {"format": 1.0} and good.metadata["calls"] == 1
    assert answers == ["HI Network is unreachable False"]
    assert len(failed) == 4 and all(one.finish_reason == "error" for one in failed)
    assert "BlockingIOError" in reasons[1] or "it took longer than 4 s" in reasons[1]
    assert "it took longer than 4 s" in reasons[2]
    assert "code 1; its last words: no luck" in reasons[3] and "Read-only file system" in reasons[4]


def test_the_file_that_a_program_leaves_is_what_the_reward_judges(folder, tmp_path):  # noqa: F811
    options = {"command": ("python", "agent.py"), "folder": program(tmp_path), "answer_file": "found.txt"}
    _, _, answers = generated(folder, lambda request: [72, 73], options, name="agent", samples_per_prompt=1)
    assert answers == ["HI in a file"]


def test_options_of_agents_are_checked_before_anything_runs(tmp_path):
    for generate, message in [
        ({"name": "agent"}, "needs the option 'command'"),
        ({"name": "agent:my_agents:solve", "options": {"pyhton": "x"}}, "has no option 'pyhton'"),
        ({"name": "agent:solve"}, "needs a function as agent:package.module:function"),
    ]:
        with pytest.raises(ValueError, match=message):
            config(generate=generate)
