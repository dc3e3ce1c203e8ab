"""Rollouts that exist (`rollout.source: file:PATH`): finding, choosing and training them."""

import asyncio
import itertools
import json
import statistics
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nanodag.errors import ConfigError, SourceError, StageFailed
from nanodag.rl.control.checks import check_source
from nanodag.rl.control.model_facts import ModelFacts
from nanodag.rl.control.saved_rollouts import SavedRollouts, best_of
from nanodag.rl.control.step_records import Records
from nanodag.rl.rollouts.export import export_rollouts
from nanodag.rl.rollouts.rollout import (
    GREEDY,
    Rollout,
    Span,
    read_lines,
    read_rollouts,
    to_json,
    write_rollouts,
)
from nanodag.rl.rollouts.rollout_files import Shelf
from nanodag.rl.rollouts.saved import check_steps, read_saved, saved_files
from nanodag.run.build_stage import key_of
from nanodag.tokenizer.bpe import save_tokenizer
from nanodag.worker.job import Job
from tests.rl.fakes import config
from tests.rl.rollouts import rollout, sampled_span
from tests.rl.stages import KILL, disturb, make_job, metrics, on, run, same_in_the_end, slow_rewards


def answer(prompt: str, index: int, text: str, reward: float | None, **more) -> Rollout:
    fields = {"prompt_id": prompt, "versions": [3] * len(text), **more}
    return rollout(f"{prompt}@0", index, prompt.encode(), text.encode(), reward=reward, logprob=-0.5, **fields)


def unknown(rollout: Rollout) -> Rollout:
    return replace(rollout, spans=tuple(replace(s, logprobs=()) for s in rollout.spans))


def group(prompt: str) -> list[Rollout]:
    return [answer(prompt, 0, "good", 1.0), answer(prompt, 1, "bad", 0.0)]


def source(path: Path, *, vocabulary: int = 256, **values) -> SavedRollouts:
    values = {"source": f"file:{path}", "num_steps": 3, "micro_batch_tokens": 16} | values
    return SavedRollouts(config(**values), ModelFacts(sizes={}, num_bytes=1, max_positions=64, vocab_size=vocabulary))


def taken(found: SavedRollouts, step: int) -> list[str]:
    batch = asyncio.run(found.step(None, step))
    assert [prompt.prompt_id for prompt, _ in batch.kept] == [members[0].prompt_id for _, members in batch.kept]
    return [prompt.prompt_id for prompt, _ in batch.kept]


def test_each_pass_over_a_file_has_every_group_once_in_an_order_of_its_own_whoever_asks(tmp_path):
    write_rollouts(tmp_path / "all.jsonl", [one for name in "abcdef" for one in group(name)])
    found = source(tmp_path / "all.jsonl", num_steps=30)
    steps = [taken(found, step) for step in range(1, 31)]
    passes = ["".join(map("".join, steps[start : start + 3])) for start in range(0, 30, 3)]
    assert all(sorted(names) == list("abcdef") for names in passes) and len(set(passes)) > 5
    assert [taken(source(tmp_path / "all.jsonl", num_steps=30), step) for step in (30, 7)] == [steps[29], steps[6]]
    groups = asyncio.run(found.step(None, 1)).kept + asyncio.run(found.step(None, 4)).kept
    assert len({members[0].group_id for _, members in groups}) == 4  # one that comes again is another group


def test_answers_of_files_that_share_prompt_ids_stay_with_their_rollouts(tmp_path):
    for name in ("one", "two"):
        row = {"prompt_id": "p", "group_id": "p@0", "prompt_ids": [1], "answer": name, "messages": []}
        rows = [{**row, "sample_index": i, "response_ids": [*name.encode()], "reward": float(i)} for i in range(2)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    batch = asyncio.run(source(tmp_path / "*.jsonl", clone={"best": 1}, filters=[]).step(None, 1))
    job = Job(name="rl", run="r", config=config(), inputs={}, workspace=tmp_path)
    records = Records(job, resume_step=-1)
    records.rollouts(1, batch)
    records.ledger(1, batch)
    records.close()
    shelf = Shelf(run="r", stage="rl", records=job.records, metrics=job.metrics_path, model=tmp_path)
    found = [(read.rollout.prompt_id, bytes(read.rollout.response_token_ids), read.answer) for read in shelf.read(1)]
    assert sorted(found) == [("0:p", b"one", "one"), ("1:p", b"two", "two")]
    assert sorted(line["prompt_id"] for line in read_lines(job.records / "ledger.jsonl")) == ["0:p", "1:p"]
    (saved,) = saved_files(f"file:{job.records / 'rollouts'}").files
    answers = saved.with_suffix(".answers.jsonl")
    answers.write_text(answers.read_text().removesuffix("\n"))  # as an editor leaves it
    assert {one.asked["answer"] for one in read_saved(saved)} == {"one", "two"}


def test_a_line_of_an_export_is_the_rollout_that_was_exported(tmp_path):
    masked = replace(sampled_span([1, 2, 3], [-1.0, -2.0, 0.0], 5), mask=(0, 0, 1), versions=(5, 5, 6))
    used = answer("p", 0, "ask", 0.5)
    turns = replace(used, spans=(*used.spans, Span(kind="tool", token_ids=(52,)), masked))
    kept = [turns, answer("p", 1, "x", 0.0), answer("p", 1, "y", 0.0, branch=1, role="judge"), unknown(group("q")[0])]
    (tmp_path / "rollouts").mkdir()
    write_rollouts(tmp_path / "rollouts" / "step-00000001.jsonl", kept)
    save_tokenizer({bytes([value]): value for value in range(256)}, tmp_path)
    shelf = Shelf(run="r", stage="rl", records=tmp_path, metrics=tmp_path / "m", model=tmp_path)
    export_rollouts(shelf, tmp_path / "all.jsonl")
    assert [saved.rollout for saved in read_saved(tmp_path / "all.jsonl")] == kept


def test_what_is_no_example_is_left_out_by_reason_and_the_rest_is_trained(tmp_path, caplog):
    caplog.set_level("INFO")
    long, alone = answer("long", 0, "x" * 20, 1.0), answer("alone", 0, "x", 1.0)
    lines = [*group("kept"), long, alone, answer("none", 0, "x", None)]
    write_rollouts(tmp_path / "all.jsonl", lines)
    found = source(tmp_path / "all.jsonl")
    assert taken(found, 1) == ["kept", "kept"]
    assert all(f"1 {reason}" in caplog.text for reason in ("too_long", "zero_spread", "no_reward"))
    with pytest.raises(ConfigError, match=r"no group to train on; left out: 2 reward_too_low.*Change rollout.filters"):
        source(tmp_path / "all.jsonl", filters=[{"name": "mean_reward", "options": {"lowest": 2.0}}])


def test_the_best_are_different_finished_answers_with_their_further_sequences():
    members = [
        answer("p", 0, "low", 0.2), answer("p", 1, "best", 1.0), answer("p", 1, "more", 1.0, branch=1),
        answer("p", 1, "judged", 0.0, branch=2, role="judge"), answer("p", 2, "best", 1.0),
        answer("p", 3, "cut", 1.0, finish_reason="length"), answer("p", 4, "good", 0.9, finish_reason="text"),
    ]  # fmt: skip
    best = best_of(members, count=2, lowest=0.5)
    assert [(one.sample_index, one.branch) for one in best] == [(1, 0), (1, 1), (4, 0)]


def test_rollouts_without_log_probabilities_are_refused_by_name_unless_they_are_imitated(tmp_path):
    for name, change, why in (
        ("unknown", unknown, "no log-probabilities"),
        ("greedy", lambda one: replace(one, metadata={GREEDY: True}), "greedy answers, which were not drawn"),
    ):
        write_rollouts(tmp_path / f"{name}.jsonl", [change(one) for one in group("p")])
        with pytest.raises(ConfigError, match=f"{why}, and policy_loss gspo needs.*Set rollout.clone.best"):
            source(tmp_path / f"{name}.jsonl", policy_loss="gspo")
        found = source(tmp_path / f"{name}.jsonl", clone={"best": 1}, filters=[])
        ((_, members), _) = asyncio.run(found.step(None, 1)).kept
        assert [one.sample_index for one in members] == [0]


def test_files_that_cannot_be_trained_are_refused_with_the_reason(tmp_path):
    lines = tmp_path / "all.jsonl"
    plain = "\n".join(map(to_json, group("p")))
    for text, why in (
        ('{"format": 9, "spans": []}', "line 1: not a rollout: format is 9"),
        ('{"messages": []}', "text without tokens is what an `sft` stage trains"),
        ("{", "line 1: not a rollout"),
        (plain.replace('"reward":1.0', '"reward":1e30'), r"group p@0: the reward's value is 1e\+30; .* at most 1e\+09"),
        (plain, "token id 112, and the model has 100: another tokenizer"),
    ):
        lines.write_text(text)
        with pytest.raises(SourceError, match=why):
            source(lines, vocabulary=100 if text == plain else 256)
    (tmp_path / "all.parquet").touch()
    for pattern, why in (("none*", "finds no file"), ("all.*", "all.parquet, which is no .jsonl")):
        with pytest.raises(ConfigError, match=why):
            saved_files(f"file:{tmp_path}/{pattern}")


def test_files_that_change_while_a_stage_runs_or_stops_are_refused(tmp_path):
    lines = tmp_path / "all.jsonl"
    write_rollouts(lines, group("p"))
    begun = source(lines)
    write_rollouts(lines, [*group("p"), *group("q")])
    with pytest.raises(StageFailed, match=r"other files of rollout\.source"):
        check_source(tmp_path, begun.identity, source(lines).identity)
    for change in (lambda: None, lines.unlink):
        change()
        with pytest.raises(SourceError, match=r"all\.jsonl has changed since the stage began"):
            taken(begun, 1)


def test_a_folder_of_steps_is_trained_step_by_step_and_named_by_its_bytes(tmp_path):
    for name, text in (("step-00000001", "a"), ("step-00000001.dropped", "b"), ("step-00000002", "a")):
        (tmp_path / f"{name}.jsonl").write_text(text)
    (tmp_path / "step-00000001.scores-0.jsonl").touch()
    found = saved_files(f"file:{tmp_path}")
    assert [path.stem for path in found.files] == ["step-00000001", "step-00000002"]
    before = found.identity()
    assert list(before["steps"]) == ["1", "2"] and before["steps"]["1"] == before["steps"]["2"]
    (tmp_path / "step-00000002.jsonl").write_text("c")
    assert found.identity() != before
    with pytest.raises(ConfigError, match="no step 3, and num_steps is 4"):
        check_steps(found, num_steps=4)
    pooled = saved_files(f"file:{tmp_path}/step-*.jsonl")
    assert len(pooled.files) == 3 and not pooled.steps  # dropped ones too, for filters to judge
    check_steps(pooled, num_steps=4)


def test_a_key_holds_the_bytes_of_the_files_and_not_their_place(tmp_path):
    run_of = SimpleNamespace(pipeline=SimpleNamespace(mirror="none"))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "p", "answer": ""}\n')
    keys = []
    for store, lines in (("one", group("p")), ("two", group("p")), ("two", group("q"))):
        records = tmp_path / store / "records" / "rollouts"
        records.mkdir(parents=True, exist_ok=True)
        write_rollouts(records / "step-00000001.jsonl", lines)
        stage = config(data=[f"file:{tmp_path}/prompts.jsonl"], source=f"file:{records}")
        keys.append(key_of(run_of, stage, {})[0])
    assert keys[0] == keys[1] != keys[2]


@pytest.fixture
def demonstrations(tmp_path):
    """Answers of an unknown policy: letters are good, digits are not."""
    answers = list(enumerate((("abcd", 1.0), ("ab1", 0.5), ("1234", 0.0))))
    lines = [unknown(answer(f"p{n}", index, *given)) for n in range(4) for index, given in answers]
    write_rollouts(tmp_path / "demonstrations.jsonl", lines)
    return tmp_path / "demonstrations.jsonl"


def test_imitation_trains_the_mean_negative_log_likelihood_of_the_best_answers(demonstrations, tmp_path):
    from transformers import AutoModelForCausalLM

    values = {"prompts_per_step": 4, "num_steps": 6, "eval_prompts": 0, "checkpoint_every": 9}
    job = make_job(tmp_path, source=f"file:{demonstrations}", clone={"best": 2, "lowest_reward": 0.5}, **values)
    run(job)
    model = AutoModelForCausalLM.from_pretrained(job.inputs["model"])
    losses = []
    for n, text in itertools.product(range(4), ("abcd", "ab1")):
        ids = torch.tensor([[*f"p{n}".encode(), *text.encode()]])
        logprobs = model(ids).logits[0, 1:-1].double().log_softmax(-1)
        losses += logprobs.gather(1, ids[0, 2:, None]).neg().flatten().tolist()
    steps = metrics(job)
    assert steps[0]["loss"] == pytest.approx(statistics.fmean(losses), abs=1e-5)
    assert steps[5]["loss"] < steps[0]["loss"] - 1.0
    assert steps[0]["trained_tokens"] == 28 and steps[0]["sampled_tokens"] == 0
    assert not [name for name in steps[0] if "mismatch" in name or "staleness" in name]
    assert not list(job.workspace.glob("sampler-*.log"))
    told = json.loads((job.workspace / "result.json").read_text())["metrics"]
    assert told["version"] == 6 and not [name for name in told if "reward" in name or "spread" in name]


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_killed_and_started_again_a_stage_on_a_file_ends_on_the_same_bytes(demonstrations, tmp_path, num_ranks):
    known = [replace(one, spans=(one.spans[0], sampled_span(one.response_token_ids, [-5.6] * one.num_sampled, 0)))
             for one in read_rollouts(demonstrations)]  # fmt: skip
    write_rollouts(demonstrations, known)
    values = {"num_steps": 6, "checkpoint_every": 2, "eval_every": 3, "correction": "tis", "updates_per_step": 2}
    values |= {"placement": "shared", "max_staleness": 1}  # which bounds nothing of what exists
    values |= {"source": f"file:{demonstrations}", **on(num_ranks)}
    undisturbed, job = (make_job(tmp_path / name, **values) for name in ("undisturbed", "killed"))
    run(undisturbed)
    slow_rewards(tmp_path / "killed")
    disturb(job, (2, 4, KILL))
    run(job)
    same_in_the_end(job, undisturbed)
    steps = metrics(job)
    assert [line["step"] for line in metrics(job, "eval")] == [0, 3, 6]
    assert all(line["rollouts"] == 6 and line["correction"] != 1.0 for line in steps)
