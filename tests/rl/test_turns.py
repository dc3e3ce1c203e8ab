"""Functions that generate: turns, tools, several samples of one, and their limits."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from nanodag.config.resolve import result_config
from nanodag.errors import ConfigError, SamplerLost, StageFailed
from nanodag.rl.control.generation import RolloutGenerator
from nanodag.rl.environments.runner import Turns
from nanodag.rl.environments.tools import calculated, declared_tools
from nanodag.rl.rollouts.prompts import PolicyFormat, Prompt
from nanodag.rl.rollouts.rollout import flatten_response
from nanodag.run.build_stage import own_entries, with_identities
from nanodag.tokenizer import layout
from nanodag.tokenizer.chat import TemplateRenderer, load_renderer
from nanodag.tokenizer.encoding import Encoding
from tests.rl import functions
from tests.rl.fakes import FakeSampler, SeenPool
from tests.rl.templates import LLAMA3, QWEN3, QWEN25, renderer_of
from tests.rl.turns import CONTEXT, batch_of, config, generator_of, prompts
from tests.tokenizer.byte_ids import encode_bytes
from tests.tokenizer.chat_templates import CODER, GLM

RESULT = "<|tool_result|>"


def here(name: str) -> str:
    return f"{functions.__name__}:{name}"


def group_of(folder, says, pool=None, **values):
    """The rollouts of one prompt, and the sampler."""
    sampler = FakeSampler(says)
    ((_, group),) = batch_of(generator_of(folder, sampler, pool, **values), prompts(folder)).kept
    return group, sampler


def test_a_calculator_answers_calls_and_only_what_was_sampled_is_trained(folder, ids):
    call, answer, pool = ids("<|tool_call|>4*2<|tool_call_end|>"), ids("so 8<|end|>"), SeenPool()
    says = lambda request: answer if ids(RESULT)[0] in request.input_ids else call  # noqa: E731
    (first, second), sampler = group_of(folder, says, pool, generate="calculator")
    prompt, result = list(prompts(folder)[0].token_ids), ids("<|tool_result|>8<|tool_result_end|>")
    assert [span.kind for span in first.spans] == ["prompt", "sampled", "tool", "sampled"]
    assert [list(span.token_ids) for span in first.spans] == [prompt, call, result, answer]
    flat = flatten_response(first)
    assert flat.mask == (1,) * len(call) + (0,) * len(result) + (1,) * len(answer)
    assert flat.versions == (3,) * len(call) + (-1,) * len(result) + (3,) * len(answer)
    assert flat.logprobs[: len(call)] == pytest.approx([-0.1 * (n + 1) for n in range(len(call))])
    assert first.finish_reason == "stop" and (first.sample_index, second.sample_index) == (0, 1)
    # the second request holds, id by id, what was sampled in the first turn and what the tool said
    assert prompt + call + result in [list(request.input_ids) for request in sampler.requests]
    assert pool.seen == ["so 8", "so 8"]  # what the tool said, and the call, are no answer


def test_a_program_is_run_in_the_sandbox_and_its_error_is_shown(folder, encoding, ids):
    programs = iter(["print(6 * 7)", "1 / 0"])

    def says(request):
        is_told = ids(RESULT)[0] in request.input_ids
        return ids("done<|end|>" if is_told else f"<|tool_call|>{next(programs)}<|tool_call_end|>")

    group, _ = group_of(folder, says, generate="python", max_new_tokens=32)
    texts = sorted(encoding.decode(rollout.spans[2].token_ids).removeprefix(RESULT) for rollout in group)
    assert texts[0] == f"42{layout.TOOL_RESULT_END}" and texts[1].startswith("error: ZeroDivisionE")


@pytest.mark.parametrize(("options", "calls"), [({"max_calls": 2}, 3), ({}, 6)])  # 16 tokens of 3 each, and one
def test_who_calls_too_often_or_fills_the_context_is_cut_off_with_a_last_turn_of_its_own(folder, ids, options, calls):
    call = ids("<|tool_call|>1<|tool_call_end|>")
    group, _ = group_of(folder, lambda request: call, generate={"name": "calculator", "options": options})
    for rollout in group:
        kinds = [span.kind for span in rollout.spans]
        assert kinds.count("sampled") == calls and kinds[-1] == "sampled" and rollout.finish_reason == "length"
        assert rollout.num_sampled <= 16


def test_a_sample_may_become_several_which_are_one_group_and_drawn_differently(folder, ids):
    group, sampler = group_of(folder, lambda request: ids("ab<|end|>"), generate=here("fanned_out"))
    assert [(rollout.sample_index, rollout.group_id) for rollout in group] == [(n, "p0@0") for n in range(6)]
    seeds = [request.params.sampling_seed for request in sampler.requests]
    assert len(seeds) == len(set(seeds)) == len({request.rid for request in sampler.requests}) == 2 + 6


def test_what_is_drawn_depends_on_stage_step_prompt_and_sample_whoever_is_first(folder, ids):
    drawn = []
    for slow in ("0", "1"):

        async def says(request, slow=slow):
            await asyncio.sleep(0.1 * (request.rid.split("-")[-2] == slow))
            return ids("ab<|end|>")

        group, sampler = group_of(folder, says, generate=here("twice"))
        seeds = {request.rid: request.params.sampling_seed for request in sampler.requests}
        drawn.append((seeds, [rollout.spans for rollout in group]))
    assert drawn[0] == drawn[1] and len(set(drawn[0][0].values())) == 4


def test_when_all_fail_the_stage_ends_with_the_reason_and_a_lost_sampler_is_not_blamed_on_the_function(folder, ids):
    def lost(request):
        raise SamplerLost("gone")

    with pytest.raises(SamplerLost, match="gone"):
        group_of(folder, lost, generate=here("twice"))
    with pytest.raises(StageFailed, match=r"function that generates failed for 2 of 2 samples"):
        group_of(
            folder, lambda request: ids("a<|end|>"), generate={"name": here("twice"), "options": {"said": "x" * 100}}
        )


def test_a_group_that_is_not_needed_any_more_is_ended_and_its_turns_aborted(folder, ids):
    async def says(request):
        while "p1" in request.rid or len(sampler.requests) < 4:  # all have been asked
            await asyncio.sleep(0.01)
        return ids("a<|end|>")

    sampler = FakeSampler(says)
    batch = batch_of(generator_of(folder, sampler, generate=here("twice"), over_sampling=2), prompts(folder, 2))
    assert [prompt.prompt_id for prompt, _ in batch.kept] == ["p0"]
    assert sorted(sampler.aborted) == ["step-1-p1@0-0-1", "step-1-p1@0-1-1"]


def test_held_out_prompts_are_answered_by_the_same_function_greedily(folder, ids):
    sampler, pool = FakeSampler(lambda request: ids("a<|end|>")), SeenPool()
    generator = generator_of(folder, sampler, pool, generate=here("answered_itself"))
    assert len(asyncio.run(generator.answers(prompts(folder, 3)))) == 3 and pool.seen == ["mine"] * 3
    assert {(r.params.temperature, r.params.sampling_seed) for r in sampler.requests} == {(0.0, None)}


def test_a_function_that_is_not_async_and_a_foreign_chat_format_are_refused_before_the_first_step(folder):
    with pytest.raises(ConfigError, match="must be an `async def` function"):
        group_of(folder, None, generate="json:dumps")
    foreign = TemplateRenderer.__new__(TemplateRenderer)
    foreign.takes_tools, foreign.calls = True, None
    with pytest.raises(ConfigError, match="knows no tools, or writes calls in a form that"):
        Turns(config(generate="python"), Encoding(folder), foreign, context=CONTEXT, vocabulary=9)


CALLS_AS_WRITTEN = {
    QWEN25: '<tool_call>{"arguments": {"expression": "4*2"}, "name": "calculator"}</tool_call>',
    QWEN3: '<think>\nhm</think>\n<tool_call>{"name":"calculator","arguments":{"expression":"4*2"}}</tool_call>',
    LLAMA3: '{"name":"calculator", "parameters":{"expression":"4*2"}}',
    CODER: "<tool_call>\n<function=calculator>\n<parameter=expression>4*2</parameter></function>\n</tool_call>",
    GLM: "<tool_call>calculator\n<arg_key>expression</arg_key> <arg_value>4*2</arg_value>\n</tool_call>",
}
LONG = {"sampler": {"context": 4000, "max_batch": 9}, "max_new_tokens": 400}
MESSAGES = [{"role": "user", "content": "4*2?"}]
RECORD = {"prompt_id": "p", "reward": "exact", "messages": MESSAGES}


def prompt_of(renderer) -> Prompt:
    return PolicyFormat(renderer, {}, ()).prompt(0, RECORD)


@pytest.mark.parametrize("template", CALLS_AS_WRITTEN, ids=["qwen2.5", "qwen3", "llama3", "coder", "glm"])
def test_a_tool_works_in_any_format_that_knows_tools(tmp_path, template):
    renderer, encoding = renderer_of(template, tmp_path), Encoding(tmp_path)
    stage = config(generate="calculator", **LONG)
    end, written = renderer.stop_ids[0], CALLS_AS_WRITTEN[template]
    # a byte a token, so that text made into ids again would be other ids
    call = [*(encode_bytes(encoding, bytes([byte]))[0] for byte in written.encode()), end]
    # a tool that there is not, and where the spelling is Qwen2.5's a text in the place of its arguments
    wrong = [*encoding.encode(written.replace('{"expression": "4*2"}', '"4*2"').replace("calculator", "abacus")), end]
    replies = [call, wrong, [*encoding.encode("so 8"), end]]
    policy_format = PolicyFormat(renderer, stage.rollout.template_options, declared_tools(stage.rollout.generate))
    prompt = policy_format.prompt(0, RECORD)
    assert "calculator" in encoding.decode(prompt.token_ids)

    def said_so_far(request):
        text = encoding.decode(request.input_ids[len(prompt.token_ids) :])
        return 2 if "error" in text else int(bool(text))

    sampler, pool = FakeSampler(lambda request: replies[said_so_far(request)]), SeenPool()
    batch = batch_of(generator_of(tmp_path, sampler, pool, stage=stage), [prompt])
    assert not batch.failed
    for rollout in batch.kept[0][1]:
        spans = rollout.spans
        assert [span.kind for span in spans] == ["prompt", "sampled", "tool", "sampled", "tool", "sampled"]
        assert [list(span.token_ids) for span in spans if span.kind == "sampled"] == replies
        assert "8" in encoding.decode(spans[2].token_ids) and rollout.branch == 0 and rollout.finish_reason == "stop"
        assert "error: calculator takes expression" in encoding.decode(spans[4].token_ids)
    assert pool.seen == ["so 8", "so 8"]


def test_thinking_that_the_template_leaves_out_of_earlier_turns_makes_two_sequences_of_one_sample(tmp_path):
    renderer, encoding, pool = renderer_of(QWEN3, tmp_path), Encoding(tmp_path), SeenPool()
    first, last = ([*encoding.encode(text), renderer.stop_ids[0]] for text in ("<think>\nhm\n</think>\n\n7", "no, 8"))
    sampler = FakeSampler(lambda request: last if "sure?" in encoding.decode(request.input_ids) else first)
    prompt, generator = prompt_of(renderer), generator_of(tmp_path, sampler, pool, generate=here("asked_again"), **LONG)
    rollouts = batch_of(generator, [prompt]).kept[0][1]
    assert [(rollout.sample_index, rollout.branch) for rollout in rollouts] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for main, branch in (rollouts[:2], rollouts[2:]):
        assert main.prompt_token_ids == prompt.token_ids and main.sampled_token_ids == tuple(first)
        assert "hm" not in encoding.decode(branch.prompt_token_ids) and branch.sampled_token_ids == tuple(last)
        assert main.reward == branch.reward
    assert pool.seen == ["no, 8", "no, 8"]  # the last answer, wherever it stands


def test_the_stage_s_switches_and_tools_reach_a_prompt_and_its_source_s_own_switches_go_before_them():
    def prompt(messages, switches, *, tools):
        return [switches["a"], switches["b"], len(tools)]

    asked = PolicyFormat(SimpleNamespace(prompt=prompt), {"a": 1, "b": 1}, ({},))
    assert asked.prompt(0, {"messages": [], "template_options": {"b": 2}}).token_ids == (1, 2, 1)


@pytest.mark.parametrize("generate", ["one_turn", here("one")])
def test_a_stop_string_ends_a_turn_at_the_token_that_completes_it_and_all_is_trained_and_seen(folder, ids, generate):
    alone = {"samples_per_prompt": 1, "filters": [], "advantage": "reinforce_pp"}
    stage = config(generate=generate, stop=["</a>"], stop_token_ids=[10], **alone)
    replies, pool = iter([ids("<a>8</a>"), ids("8\n"), ids("</a>")]), SeenPool()
    sampler = FakeSampler(lambda request: next(replies))
    encoding, renderer = Encoding(folder), load_renderer(folder)
    stop_ids = (*renderer.stop_ids, *stage.rollout.stop_token_ids)
    turns = None if generate == "one_turn" else Turns(stage, encoding, renderer, context=CONTEXT, vocabulary=266)
    generator = RolloutGenerator(stage, sampler, pool, encoding, stop_ids, turns)
    batches = [asyncio.run(generator.group(prompts(folder)[0])) for _ in range(2)]
    by_text, by_token = [rollout for batch in batches for rollout in batch.all_rollouts]
    assert (by_text.finish_reason, by_token.finish_reason) == ("text", "stop")
    (held_out,) = asyncio.run(generator.answers(prompts(folder)))
    assert held_out.finish_reason == "text" and by_text.sampled_token_ids == tuple(ids("<a>8</a>"))
    assert pool.seen == ["<a>8</a>", "8", "</a>"] and flatten_response(by_text).mask == (1,) * 8
    assert {(r.params.stop, r.params.stop_token_ids) for r in sampler.requests} == {(("</a>",), stop_ids)}


SUMS = {"48/2": "24", " (1 + 2)*3 - -4": "13", "0.1+0.2": "0.3", "1/3": "0.333333", "7//2": "3", "7%4": "3"}
SUMS |= {"2**10": "1024", "2**-1": "0.5"}
NO_SUMS = ("9**9**9", "10**400", "1/0", "0**-1", "__import__('os')", "'a'*9", "True+1", "(" * 150, "1e999", "1j", "")


def test_the_calculator_knows_arithmetic_and_nothing_else():
    known = SUMS | dict.fromkeys(NO_SUMS, "error")
    assert {text: calculated(text) for text in known} == known


def identity(stage) -> str:
    """The part of a key that a stage's config and its own code make."""
    return json.dumps(with_identities(result_config(stage), own_entries(stage)))


def test_a_stages_key_knows_the_functions_that_it_names_by_their_source(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("mine_turns", "mine_reward"):
        (tmp_path / f"{module}.py").write_text("def f(): ...\n")
    reward = {"mine_reward:f": 1.0, "group:mine_reward:g": 1.0, "remote:http://h/": 0.5, "f1": 0.5}
    stage = config(generate="mine_turns:f", reward=reward, filters=[])
    assert sorted(own_entries(stage)) == ["group:mine_reward:g", "mine_reward:f", "mine_turns:f"]
    before = identity(stage)
    assert "remote:http://h/" in before and before.count('"sha256"') == 3
    (tmp_path / "mine_reward.py").write_text("def f(): return 2\n")
    assert identity(stage) != before


def test_a_programs_folder_is_known_by_its_files_and_its_library_by_its_packages_wherever_they_lie(tmp_path):
    def identity_of(name, text="print()", packages="env/lib/python3.11/site-packages/openai-1.dist-info"):
        code, library = tmp_path / name / "code", tmp_path / name / "env"
        for folder in (code, tmp_path / name / packages):
            folder.mkdir(parents=True)
        (code / "agent.py").write_text(text)
        options = {"command": ("python", "agent.py"), "folder": str(code), "library": str(library)}
        return identity(config(generate={"name": "agent", "options": options}))

    first = identity_of("first")
    assert identity_of("elsewhere") == first and str(tmp_path) not in first
    assert identity_of("other code", text="print(1)") != first
    assert identity_of("other package", packages="env/lib/python3.11/site-packages/openai-2.dist-info") != first
    assert identity_of("no packages", packages="env/plain") != identity_of("none either", packages="env/plain")
