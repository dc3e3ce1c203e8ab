"""Functions that generate: turns, tools, several samples of one, and what becomes of those that fail. The sampler is a
fake that we own."""

import asyncio
import json
import os
import time
from dataclasses import replace

import psutil
import pytest

from nanodag.children import forks
from nanodag.children.tree import children_of
from nanodag.config import result_config
from nanodag.config.kinds.rl import RLStage
from nanodag.errors import ConfigError, SamplerLost, StageFailed
from nanodag.inference.protocol import Completion, FinishReason, VersionSpan
from nanodag.rl.control.generation import RolloutGenerator
from nanodag.rl.environments.runner import Turns
from nanodag.rl.environments.tools import calculated, declared_tools
from nanodag.rl.environments.transcript import Conversation
from nanodag.rl.rollouts.prompts import PolicyFormat, Prompt, rendered
from nanodag.rl.rollouts.rollout import flatten_response
from nanodag.run.build_stage import _library_identity, own_entries, with_identities
from nanodag.tokenizer import layout
from nanodag.tokenizer.bpe import save_tokenizer
from nanodag.tokenizer.chat import TemplateRenderer, load_renderer
from nanodag.tokenizer.encoding import Encoding
from tests.rl.fakes import FakePool
from tests.rl.stages import BYTES, VOCABULARY
from tests.rl.templates import LLAMA3, QWEN3, QWEN25, renderer_of
from tests.tokenizer.chat_templates import CODER, GLM

CONTEXT = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(BYTES, folder)
    return folder


@pytest.fixture(autouse=True, scope="module")
def _end_fork_servers():
    yield
    forks.end_all()


@pytest.fixture
def ids(folder):
    """`ids("<|tool_call|>4*2<|tool_call_end|>")`: special tokens by name, the rest a token a byte."""
    encoding = Encoding(folder)
    special = {token: encoding.token_id(token) for token in layout.SPECIAL_TOKENS}

    def encoded(text: str) -> list[int]:
        found = []
        while text:
            name = next((name for name in special if text.startswith(name)), text[0])
            found += [special[name]] if name in special else encoding.encode(name)
            text = text[len(name) :]
        return found

    return encoded


class Script:
    """Answers each request with what `says(request)` gives: ids, cut off where there is no room for them."""

    def __init__(self, says, version: int = 3) -> None:
        self.says, self.version = says, version
        self.requests, self.aborted = [], []

    async def generate(self, requests):
        self.requests += requests
        return [[await self.completion(request)] for request in requests]

    async def abort(self, rid) -> None:
        self.aborted.append(rid)

    async def completion(self, request) -> Completion:
        said = self.says(request)
        said = await said if asyncio.iscoroutine(said) else said
        said, most = list(said), request.params.max_new_tokens
        reason = FinishReason(type="length")
        if len(said) <= most and said[-1] in request.params.stop_token_ids:
            reason = FinishReason(type="stop", matched=said[-1])
        for stop in request.params.stop or ():
            if len(said) <= most and bytes(token for token in said if token < 256).endswith(stop.encode()):
                reason = FinishReason(type="stop", matched=stop)
        said = said[:most]
        return Completion(
            rid=request.rid,
            output_ids=said,
            logprobs=[-0.1 * (place + 1) for place in range(len(said))],
            finish_reason=reason,
            weight_version=str(self.version),
            weight_versions=[VersionSpan(version=str(self.version), start=0, end=len(said))],
            num_prompt_tokens=len(request.input_ids),
        )


class SeenPool(FakePool):
    """Rewards by how many answers came before, so that groups have a spread; `seen` has the answers."""

    def __init__(self) -> None:
        self.seen = []

    def _score(self, completion):
        self.seen.append(completion)
        return super()._score(str(len(self.seen) % 2))


class Cursor:
    def __init__(self, prompts) -> None:
        self.prompts = list(prompts)

    def take(self, count):
        taken, self.prompts = self.prompts[:count], self.prompts[count:]
        return taken

    def give_back(self, prompts) -> None:
        self.prompts = [*prompts, *self.prompts]

    def passed_over(self):
        return []

    def note(self, prompt_id, *, has_spread):
        pass


def config(**values) -> RLStage:
    base = {"kind": "rl", "data": ["file:x"], "seed": 5, "samples_per_prompt": 2, "prompts_per_step": 1}
    return RLStage.of(**(base | {"max_new_tokens": 16, "sampler": {"context": CONTEXT, "max_batch": 64}} | values))


def made(folder, sampler, pool=None, **values) -> RolloutGenerator:
    stage, encoding, renderer = config(**values), Encoding(folder), load_renderer(folder)
    turns = Turns(stage, encoding, renderer, context=CONTEXT, vocabulary=VOCABULARY)
    return RolloutGenerator(stage, sampler, pool or SeenPool(), encoding, renderer.stop_ids, turns)


def prompts(ids, count: int = 1) -> list[Prompt]:
    return [
        Prompt(
            epoch=0,
            record={"prompt_id": f"p{n}", "reward": "exact", "messages": [{"role": "user", "content": f"{n}?"}]},
            token_ids=tuple(ids(f"<|bos|><|user|>{n}?<|end|><|assistant|>")),
        )
        for n in range(count)
    ]


def batch_of(generator, prompts):
    async def all_of_it():
        return await generator.step(Cursor(prompts), 1)

    return asyncio.run(all_of_it())


# The functions under test are named by import path, as a user's.


async def twice(sampler, sample, *, said: str = "sure?"):
    sample = await sampler.turn(sample, max_tokens=4)
    return await sampler.turn(sample.with_tool(sampler.encode(said)))


async def one(sampler, sample):
    return await sampler.turn(sample)


async def asked_again(sampler, sample):
    conversation, messages = Conversation(sampler, sample), list(sample.record["messages"])
    answer = await conversation.answer(messages)
    await conversation.answer([*messages, answer, {"role": "user", "content": "sure?"}])
    return conversation.sample()


async def fanned_out(sampler, sample):
    sample = await sampler.turn(sample, max_tokens=2)
    return list(await asyncio.gather(*(sampler.turn(one) for one in sample.forked(3))))


async def answered_itself(sampler, sample):
    sample = await sampler.turn(sample)
    return type(sample)(**{name: getattr(sample, name) for name in sample.__slots__} | {"answer": "mine"})


async def broken(sampler, sample):
    """Every second call fails, in the way that the prompt's answer names, with a file that counts them."""
    how, calls = sample.record["answer"]
    with open(calls, "ab") as file:
        file.write(b"x")
    if os.path.getsize(calls) % 2:
        return await sampler.turn(sample)
    if how == "raises":
        raise RuntimeError("no luck")
    if how == "exits":
        raise SystemExit(3)
    if how == "dies":
        os._exit(7)
    if how == "waits":
        await asyncio.sleep(3600)
    if how == "blocks":
        time.sleep(3600)
    while how == "spins":
        pass
    if how == "nothing":
        return sample
    if how == "junk":
        return "a string"
    sample = await sampler.turn(sample)
    if how == "forgets":
        return replace(sample, spans=sample.spans[1:])
    return sample.with_tool([VOCABULARY] if how == "unknown" else [1] * CONTEXT)


def here(name: str) -> str:
    return f"{__name__}:{name}"


def test_a_calculator_answers_calls_and_only_what_was_sampled_is_trained(folder, ids):
    call, answer = ids("<|tool_call|>4*2<|tool_call_end|>"), ids("so 8<|end|>")
    sampler = Script(lambda request: answer if ids("<|tool_result|>")[0] in request.input_ids else call)
    pool = SeenPool()
    (prompt,) = prompts(ids)
    batch = batch_of(made(folder, sampler, pool, generate="calculator"), [prompt])
    first, second = batch.kept[0][1]
    result = ids("<|tool_result|>8<|tool_result_end|>")
    assert [span.kind for span in first.spans] == ["prompt", "sampled", "tool", "sampled"]
    assert [list(span.token_ids) for span in first.spans] == [list(prompt.token_ids), call, result, answer]
    flat = flatten_response(first)
    assert flat.mask == (1,) * len(call) + (0,) * len(result) + (1,) * len(answer)
    assert flat.versions == (3,) * len(call) + (-1,) * len(result) + (3,) * len(answer)
    assert flat.logprobs[: len(call)] == pytest.approx([-0.1 * (n + 1) for n in range(len(call))])
    assert first.finish_reason == "stop" and (first.sample_index, second.sample_index) == (0, 1)
    # the second request holds, id by id, what was sampled in the first turn and what the tool said
    assert list(prompt.token_ids) + call + result in [list(request.input_ids) for request in sampler.requests]
    assert pool.seen == ["so 8", "so 8"]  # what the tool said, and the call, are no answer


def test_a_program_is_run_in_the_sandbox_and_its_error_is_shown(folder, ids):
    programs = iter(["print(6 * 7)", "1 / 0"])

    def says(request):
        if ids("<|tool_result|>")[0] in request.input_ids:
            return ids("done<|end|>")
        return ids(f"<|tool_call|>{next(programs)}<|tool_call_end|>")

    batch = batch_of(made(folder, Script(says), generate="python", max_new_tokens=32), prompts(ids))
    said = {Encoding(folder).decode(rollout.spans[2].token_ids) for rollout in batch.kept[0][1]}
    wanted = {"42", "error: ZeroDivisionError: division by zero"}
    assert {text.removeprefix(layout.TOOL_RESULT).removesuffix(layout.TOOL_RESULT_END)[:20] for text in said} == {
        text[:20] for text in wanted
    }


def test_who_calls_too_often_or_fills_the_context_is_cut_off_with_a_turn_of_its_own_at_the_end(folder, ids):
    call = ids("<|tool_call|>1<|tool_call_end|>")
    for options, calls in (({"max_calls": 2}, 3), ({}, 6)):  # 16 tokens of 3 each, and one
        values = {"generate": {"name": "calculator", "options": options}}
        batch = batch_of(made(folder, Script(lambda request: call), **values), prompts(ids))
        for rollout in batch.kept[0][1]:
            kinds = [span.kind for span in rollout.spans]
            assert kinds.count("sampled") == calls and kinds[-1] == "sampled" and rollout.finish_reason == "length"
            assert rollout.num_sampled <= 16


def test_a_sample_may_become_several_which_are_one_group_and_drawn_differently(folder, ids):
    sampler = Script(lambda request: ids("ab<|end|>"))
    batch = batch_of(made(folder, sampler, generate=here("fanned_out")), prompts(ids))
    ((_, group),) = batch.kept
    assert [rollout.sample_index for rollout in group] == list(range(6))
    assert {rollout.group_id for rollout in group} == {"p0@0"}
    seeds = [request.params.sampling_seed for request in sampler.requests]
    assert len(seeds) == len(set(seeds)) == 2 + 6
    assert len({request.rid for request in sampler.requests}) == 8


def test_what_is_drawn_depends_on_stage_step_prompt_and_sample_whoever_is_first(folder, ids):
    found = []
    for slow in ({0}, {1}):

        async def says(request, slow=slow):
            await asyncio.sleep(0.1 * (int(request.rid.split("-")[-2]) in slow))
            return ids("ab<|end|>")

        sampler = Script(says)
        batch = batch_of(made(folder, sampler, generate=here("twice")), prompts(ids))
        seeds = {request.rid: request.params.sampling_seed for request in sampler.requests}
        found.append((seeds, [rollout.spans for rollout in batch.kept[0][1]]))
    assert found[0] == found[1] and len(set(found[0][0].values())) == 4


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("raises", "RuntimeError: no luck"),
        ("exits", "SystemExit: 3"),
        ("dies", "its process ended with code 7"),
        ("waits", "longer than 2 s without asking"),
        ("blocks", "longer than 2 s without asking"),
        ("spins", "longer than 2 s without asking"),
        ("nothing", "no turn added to"),
        ("junk", "must return a Sample"),
        ("unknown", f"token id {VOCABULARY}"),
        ("forgets", "begin with the prompt's own span"),
        ("long", "where 64 and 16 are the limits"),
    ],
)
def test_a_function_that_fails_fails_its_sample_with_the_reason(folder, ids, tmp_path, how, reason):
    generate = {"name": here("broken"), "timeout_s": 2.0}
    values = {"generate": generate, "samples_per_prompt": 4, "max_failed_rewards": 0.5}
    generator = made(folder, Script(lambda request: ids("a<|end|>")), **values)
    (prompt,) = prompts(ids)
    prompt.record["answer"] = how, str(tmp_path / "calls")
    batch = batch_of(generator, [prompt])
    ((_, group),) = batch.kept
    assert len(group) == 2 and len(batch.failed) == 2
    for rollout in batch.failed:
        assert rollout.finish_reason == "error" and rollout.reward is None
        assert reason in rollout.metadata["generate_error"]
    deadline = time.monotonic() + 60
    while left_in_forks() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left_in_forks() == []  # also of an endless loop nothing is left


def left_in_forks() -> list[int]:
    """Processes below the fork servers of this one."""
    servers = [pid for pid in children_of(os.getpid()) if "fork_server" in " ".join(psutil.Process(pid).cmdline())]
    return [pid for server in servers for pid in children_of(server)]


def test_when_all_fail_the_stage_ends_with_the_reason_and_a_lost_sampler_is_not_blamed_on_the_function(folder, ids):
    def lost(request):
        raise SamplerLost("gone")

    with pytest.raises(SamplerLost, match="gone"):
        batch_of(made(folder, Script(lost), generate=here("twice")), prompts(ids))
    generate = {"name": here("twice"), "options": {"said": "x" * 100}}
    with pytest.raises(StageFailed, match=r"function that generates failed for 2 of 2 samples"):
        batch_of(made(folder, Script(lambda request: ids("a<|end|>")), generate=generate), prompts(ids))


def test_a_group_that_is_not_needed_any_more_is_ended_and_its_turns_aborted(folder, ids):
    async def says(request):
        while "p1" in request.rid or len(sampler.requests) < 4:  # all have been asked
            await asyncio.sleep(0.01)
        return ids("a<|end|>")

    sampler = Script(says)
    batch = batch_of(made(folder, sampler, generate=here("twice"), over_sampling=2), prompts(ids, 2))
    assert [prompt.prompt_id for prompt, _ in batch.kept] == ["p0"]
    assert sorted(sampler.aborted) == ["step-1-p1@0-0-1", "step-1-p1@0-1-1"]


def test_held_out_prompts_are_answered_by_the_same_function_greedily(folder, ids):
    sampler, pool = Script(lambda request: ids("a<|end|>")), SeenPool()
    generator = made(folder, sampler, pool, generate=here("answered_itself"))

    async def greedy():
        return await generator.answers(prompts(ids, 3))

    rollouts = asyncio.run(greedy())
    assert len(rollouts) == 3 and pool.seen == ["mine"] * 3
    assert {(r.params.temperature, r.params.sampling_seed) for r in sampler.requests} == {(0.0, None)}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"generate": "calculater"}, "no generate 'calculater'; choose one of agent, calculator, python"),
        ({"generate": {"name": "calculator", "options": {"calls": 3}}}, "no option 'calls'; it takes max_calls"),
        ({"generate": {"name": "one_turn", "timeout_s": 3}}, "generate.timeout_s means nothing to one_turn"),
        ({"generate": "python", "partial_rollout_tokens": 4, "over_sampling": 4}, "has turns of its own"),
        ({"stop": ["x"], "partial_rollout_tokens": 4, "over_sampling": 4}, "begins in one segment"),
        ({"stop": ["x"], "sync_mode": "abort", "max_staleness": 1}, "stands across that place would be missed"),
    ],
)
def test_a_config_that_cannot_work_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        config(**values)


def test_a_function_that_is_not_async_and_a_foreign_chat_format_are_refused_before_the_first_step(folder):
    with pytest.raises(ConfigError, match="must be an `async def` function"):
        made(folder, Script(None), generate="json:dumps")
    foreign = TemplateRenderer.__new__(TemplateRenderer)
    foreign.takes_tools, foreign.calls = True, None
    with pytest.raises(ConfigError, match="model's chat template knows no tools, or writes calls in a form that"):
        Turns(config(generate="python"), Encoding(folder), foreign, context=CONTEXT, vocabulary=VOCABULARY)


CALLS_AS_WRITTEN = {
    QWEN25: '<tool_call>{"arguments": {"expression": "4*2"}, "name": "calculator"}</tool_call>',
    QWEN3: '<think>\nhm</think>\n<tool_call>{"name":"calculator","arguments":{"expression":"4*2"}}</tool_call>',
    LLAMA3: '{"name":"calculator", "parameters":{"expression":"4*2"}}',
    CODER: "<tool_call>\n<function=calculator>\n<parameter=expression>4*2</parameter></function>\n</tool_call>",
    GLM: "<tool_call>calculator\n<arg_key>expression</arg_key> <arg_value>4*2</arg_value>\n</tool_call>",
}


@pytest.mark.parametrize("template", CALLS_AS_WRITTEN, ids=["qwen2.5", "qwen3", "llama3", "coder", "glm"])
def test_a_tool_works_in_any_format_that_knows_tools(tmp_path, template):
    renderer, encoding = renderer_of(template, tmp_path), Encoding(tmp_path)
    stage = config(generate="calculator", max_new_tokens=400, sampler={"context": 4000, "max_batch": 9})
    end, written = renderer.stop_ids[0], CALLS_AS_WRITTEN[template]
    # a byte a token, so that text made into ids again would be other ids
    call = [*(encoding.encode_bytes(bytes([byte]))[0] for byte in written.encode()), end]
    # a tool that there is not, and where the spelling is Qwen2.5's a text in the place of its arguments
    wrong = [*encoding.encode(written.replace('{"expression": "4*2"}', '"4*2"').replace("calculator", "abacus")), end]
    answer = [*encoding.encode("so 8"), end]
    replies = [call, wrong, answer]
    messages = [{"role": "user", "content": "4*2?"}]
    asked = PolicyFormat(renderer, stage.rollout.template_options, declared_tools(stage.rollout.generate))
    prompt = Prompt(
        epoch=0, record={"prompt_id": "p", "reward": "exact", "messages": messages},
        token_ids=tuple(asked.prompt(messages)),
    )  # fmt: skip
    assert "calculator" in encoding.decode(prompt.token_ids)

    def said_so_far(request):
        text = encoding.decode(request.input_ids[len(prompt.token_ids) :])
        return 2 if "error" in text else int(bool(text))

    sampler = Script(lambda request: replies[said_so_far(request)])
    turns = Turns(stage, encoding, renderer, context=4000, vocabulary=encoding.size)
    pool = SeenPool()
    batch = batch_of(RolloutGenerator(stage, sampler, pool, encoding, renderer.stop_ids, turns), [prompt])
    assert not batch.failed
    for rollout in batch.kept[0][1]:
        spans = rollout.spans
        assert [span.kind for span in spans] == ["prompt", "sampled", "tool", "sampled", "tool", "sampled"]
        assert [list(span.token_ids) for span in spans if span.kind == "sampled"] == replies
        assert "8" in encoding.decode(spans[2].token_ids) and rollout.branch == 0 and rollout.finish_reason == "stop"
        assert "error: calculator takes expression" in encoding.decode(spans[4].token_ids)
    assert pool.seen == ["so 8", "so 8"]


def test_thinking_that_the_template_leaves_out_of_earlier_turns_makes_two_sequences_of_one_sample(tmp_path):
    renderer, encoding = renderer_of(QWEN3, tmp_path), Encoding(tmp_path)
    stage = config(generate=here("asked_again"), sampler={"context": 4000, "max_batch": 9}, max_new_tokens=400)
    end, messages = renderer.stop_ids[0], [{"role": "user", "content": "4*2?"}]
    first, last = [*encoding.encode("<think>\nhm\n</think>\n\n7"), end], [*encoding.encode("no, 8"), end]
    sampler = Script(lambda request: last if "sure?" in encoding.decode(request.input_ids) else first)
    prompt = Prompt(
        epoch=0, record={"prompt_id": "p", "reward": "exact", "messages": messages},
        token_ids=tuple(renderer.prompt(messages)),
    )  # fmt: skip
    turns, pool = Turns(stage, encoding, renderer, context=4000, vocabulary=encoding.size), SeenPool()
    batch = batch_of(RolloutGenerator(stage, sampler, pool, encoding, renderer.stop_ids, turns), [prompt])
    rollouts = batch.kept[0][1]
    assert [(rollout.sample_index, rollout.branch) for rollout in rollouts] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for main, branch in (rollouts[:2], rollouts[2:]):
        assert main.prompt_token_ids == prompt.token_ids and main.sampled_token_ids == tuple(first)
        assert "hm" not in encoding.decode(branch.prompt_token_ids) and branch.sampled_token_ids == tuple(last)
        assert main.reward == branch.reward
    assert pool.seen == ["no, 8", "no, 8"]  # the last answer, wherever it stands


def test_the_stage_s_switches_and_tools_reach_a_prompt_and_its_source_s_own_switches_go_before_them():
    class Seen:
        def prompt(self, messages, switches, *, tools):
            return [switches["a"], switches["b"], len(tools)]

    record = {"messages": [], "template_options": {"b": 2}}
    assert rendered(record, PolicyFormat(Seen(), {"a": 1, "b": 1}, ({},))) == (1, 2, 1)


@pytest.mark.parametrize("generate", ["one_turn", here("one")])
def test_a_stop_string_ends_a_turn_at_the_token_that_completes_it_and_all_is_trained_and_seen(folder, ids, generate):
    stage = config(generate=generate, stop=["</a>"], stop_token_ids=[10])
    encoding, renderer, pool = Encoding(folder), load_renderer(folder), SeenPool()
    turns = None if generate == "one_turn" else Turns(stage, encoding, renderer, context=CONTEXT, vocabulary=VOCABULARY)
    replies = iter([ids("<a>8</a>"), ids("8\n"), ids("</a>")])
    sampler = Script(lambda request: next(replies))
    stop_ids = (*renderer.stop_ids, *stage.rollout.stop_token_ids)
    stage = stage.model_copy(update={"rollout": stage.rollout.model_copy(update={"samples_per_prompt": 1})})
    generator = RolloutGenerator(stage, sampler, pool, encoding, stop_ids, turns)
    found = [asyncio.run(generator.group(prompts(ids)[0])) for _ in range(2)]
    by_text, by_token = [rollout for one in found for rollout in one.all_rollouts]
    assert (by_text.finish_reason, by_token.finish_reason) == ("text", "stop")
    (held_out,) = asyncio.run(generator.answers(prompts(ids)))
    assert held_out.finish_reason == "text" and by_text.sampled_token_ids == tuple(ids("<a>8</a>"))
    assert pool.seen == ["<a>8</a>", "8", "</a>"]
    assert flatten_response(by_text).mask == (1,) * 8
    assert {(request.params.stop, request.params.stop_token_ids) for request in sampler.requests} == {
        (("</a>",), stop_ids)
    }


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("48/2", "24"),
        (" (1 + 2)*3 - -4", "13"),
        ("0.1+0.2", "0.3"),
        ("1/3", "0.333333"),
        ("7//2", "3"),
        ("7%4", "3"),
        ("2**10", "1024"),
        ("2**-1", "0.5"),
        ("9**9**9", "error"),
        ("10**400", "error"),
        ("1/0", "error"),
        ("0**-1", "error"),
        ("__import__('os')", "error"),
        ("'a'*9", "error"),
        ("True+1", "error"),
        ("(" * 150, "error"),
        ("1e999", "error"),
        ("1j", "error"),
        ("", "error"),
    ],
)
def test_the_calculator_knows_arithmetic_and_nothing_else(expression, value):
    assert calculated(expression) == value


def test_a_stages_key_knows_the_functions_that_it_names_by_their_source(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("mine_turns", "mine_reward"):
        (tmp_path / f"{module}.py").write_text("def f(): ...\n")
    stage = config(
        generate="mine_turns:f",
        reward={"mine_reward:f": 1.0, "group:mine_reward:g": 1.0, "remote:http://h/": 0.5, "f1": 0.5},
        filters=[],
    )
    assert sorted(own_entries(stage)) == ["group:mine_reward:g", "mine_reward:f", "mine_turns:f"]

    def keyed():
        return json.dumps(with_identities(result_config(stage), own_entries(stage)))

    before = keyed()
    assert "remote:http://h/" in before and before.count('"sha256"') == 3
    (tmp_path / "mine_reward.py").write_text("def f(): return 2\n")
    assert keyed() != before


def test_a_programs_folder_is_known_by_its_files_and_its_library_by_its_packages_wherever_they_lie(tmp_path):
    def made(name, text="print()", version="1"):
        (tmp_path / name / "code").mkdir(parents=True)
        (tmp_path / name / "code" / "agent.py").write_text(text)
        (tmp_path / name / "env/lib/python3.11/site-packages" / f"openai-{version}.dist-info").mkdir(parents=True)
        paths = {"folder": str(tmp_path / name / "code"), "library": str(tmp_path / name / "env")}
        stage = config(generate={"name": "agent", "options": {"command": ("python", "agent.py"), **paths}})
        return with_identities(result_config(stage), own_entries(stage))

    one = made("one")
    assert made("elsewhere") == one and str(tmp_path) not in json.dumps(one)
    assert made("other code", text="print(1)") != one != made("other package", version="2")
    (tmp_path / "plain").mkdir()
    assert _library_identity(str(tmp_path / "plain")) != _library_identity(str(tmp_path))
