"""Rollouts as a file for other tools, and the best answers as conversations."""

import json
import os
import resource
import signal
from dataclasses import replace
from unittest.mock import patch

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from nanodag.cli import app
from nanodag.cli.rollouts import save_rollouts
from nanodag.data.records import check_record
from nanodag.errors import ArtifactNotFound, ConfigError
from nanodag.rl.rollouts.export import export_chats, export_pairs, export_rollouts
from nanodag.rl.rollouts.rollout import Span, write_rollouts
from nanodag.rl.rollouts.rollout_files import Shelf, Wanted
from nanodag.store.atomic import is_leftover
from nanodag.tokenizer.bpe import save_tokenizer
from tests.rl.fakes import STOP
from tests.rl.rollouts import rollout
from tests.rl.stages import BYTES


def answer(prompt, index, text, reward, *, finish="stop", tool="", **fields):
    ids = [*text.encode(), *([STOP] if finish == "stop" else [])]
    fields |= {"prompt_id": prompt, "finish_reason": finish, "reward": reward, "reward_components": {"part": 0.25}}
    one = rollout(f"{prompt}@0", index, prompt.encode(), ids, logprob=-0.5, versions=[3] * len(ids), **fields)
    said = [Span(kind="tool", token_ids=tuple(tool.encode()))] if tool else []
    return replace(one, spans=(one.spans[0], *said, *one.spans[1:]))


@pytest.fixture
def shelf(tmp_path):
    folder = tmp_path / "rollouts"
    folder.mkdir()
    save_tokenizer(BYTES, tmp_path)
    texts = [("good", 0.75), ("best", 1.0), ("bad", 0.0), ("best", 1.0)]
    first = [answer("p", index, *one) for index, one in enumerate(texts)]
    first += [answer("q", 0, "cut", 1.0, finish="length"), answer("q", 1, "used", 1.0, tool="4")]
    write_rollouts(folder / "step-00000001.jsonl", first)
    write_rollouts(folder / "step-00000001.dropped.jsonl", [answer("q", 2, "kept", 1.0), answer("q", 3, "x", None)])
    write_rollouts(folder / "step-00000002.jsonl", [answer("r", 0, "old", 1.0)])
    asked = [{"prompt_id": p, "answer": p.upper(), "messages": [{"role": "user", "content": f"{p}?"}]} for p in "pq"]
    (folder / "step-00000001.answers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in asked))
    (tmp_path / "ledger.jsonl").write_text("")
    return Shelf(run="r", stage="rl", records=tmp_path, metrics=tmp_path / "metrics.jsonl", model=tmp_path)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


NO_EXAMPLES = ["cut", "with text of a tool", "no reward", "messages not kept"]


def test_the_best_answers_become_conversations_and_the_rest_is_counted_by_reason(shelf, tmp_path):
    out = tmp_path / "best.jsonl"
    exported = export_chats(shelf, out, best=1, lowest=0.5)
    best, kept = lines(out)
    assert best["messages"] == [{"role": "user", "content": "p?"}, {"role": "assistant", "content": "best"}]
    for row in (best, kept):
        assert (row["reward"], row["step"]) == (1.0, 1)
        check_record(row, "conversation")
    assert kept["messages"][-1]["content"] == "kept" and exported.rows == 2
    judged = ["reward too low", "the same answer", "not among the best"]
    assert exported.left_out == dict.fromkeys([*judged, *NO_EXAMPLES], 1)


def test_pairs_are_the_best_and_the_worst_answer_of_a_group_as_messages(shelf, tmp_path):
    for suffix in ("jsonl", "parquet"):
        exported = export_pairs(shelf, tmp_path / f"pairs.{suffix}", lowest=0.9)
    (pair,) = lines(tmp_path / "pairs.jsonl")
    assert pair["prompt"] == [{"role": "user", "content": "p?"}] and pair["prompt_id"] == "p"
    assert pair["chosen"] == [{"role": "assistant", "content": "best"}] and pair["score_chosen"] == 1.0
    assert pair["rejected"] == [{"role": "assistant", "content": "bad"}] and pair["score_rejected"] == 0.0
    assert pq.read_table(tmp_path / "pairs.parquet").to_pylist() == [pair]
    others = {"neither best nor worst": 2, "in a group without a pair": 1}
    assert exported.rows == 1 and exported.left_out == dict.fromkeys(NO_EXAMPLES, 1) | others
    assert export_pairs(shelf, tmp_path / "none.jsonl", lowest=1.5).rows == 0


def test_all_pairs_of_a_group_are_every_two_different_answers_with_different_rewards_once(shelf, tmp_path):
    export_pairs(shelf, tmp_path / "pairs.jsonl", lowest=0.5, takes_all=True)
    told = {(pair["chosen"][0]["content"], pair["rejected"][0]["content"]) for pair in lines(tmp_path / "pairs.jsonl")}
    assert told == {("best", "good"), ("best", "bad"), ("good", "bad")} and len(lines(tmp_path / "pairs.jsonl")) == 3


def test_further_sequences_are_no_examples(shelf, tmp_path):
    folder = shelf.records / "rollouts"
    branch = answer("p", 5, "aside", 1.0, branch=1, role="critic")
    write_rollouts(folder / "step-00000003.jsonl", [branch])
    asked = (folder / "step-00000001.answers.jsonl").read_text()
    (folder / "step-00000003.answers.jsonl").write_text(asked)
    assert export_rollouts(shelf, tmp_path / "all.jsonl").rows == 10
    last = lines(tmp_path / "all.jsonl")[-1]
    assert (last["branch"], last["role"], last["turns"]) == (1, "critic", [{"kind": "sampled", "text": "aside\0"}])
    found = export_chats(shelf, tmp_path / "best.jsonl", best=9, lowest=0.9)
    assert found.left_out["a further sequence of a sample"] == 1 and found.rows == 2
    assert export_pairs(shelf, tmp_path / "pairs.jsonl", lowest=0.9).rows == 1


def test_lines_and_columns_hold_the_same_rows(shelf, tmp_path):
    for suffix in ("jsonl", "parquet"):
        assert export_rollouts(shelf, tmp_path / f"all.{suffix}").rows == 9
    rows, columns = lines(tmp_path / "all.jsonl"), pq.read_table(tmp_path / "all.parquet").to_pylist()
    first = rows[0]
    assert first["response"] == "good" and first["response_ids"] == [*b"good", STOP] and first["answer"] == "P"
    assert first["logprobs"] == [-0.5] * 5 and first["versions"] == [3] * 5 and first["fate"] == "trained"
    assert first["reward_components"] == {"part": 0.25}
    assert [{**column, "reward_components": json.loads(column["reward_components"])} for column in columns] == rows


def saved(shelf, path, step=None):
    save_rollouts(shelf, path, Wanted(), step=step, best=0, pairs=False, lowest=0.0)


def test_an_export_that_fails_is_an_error_of_one_line_and_leaves_the_old_file(shelf, tmp_path):
    (tmp_path / "folder.jsonl").mkdir()
    for path in (tmp_path / "folder.jsonl", tmp_path / "missing" / "all.jsonl"):
        with pytest.raises(ConfigError, match=f"The export into {path} failed"):
            saved(shelf, path)
    with pytest.raises(ConfigError, match=r"\.jsonl or \.parquet"):
        saved(shelf, tmp_path / "all.csv")
    out = tmp_path / "all.jsonl"
    out.write_text("old")
    (shelf.records / "rollouts" / "step-00000002.jsonl").write_text("no rollout\n")
    with pytest.raises(ValueError):
        export_rollouts(shelf, out)
    assert out.read_text() == "old" and not [*tmp_path.glob(".all*"), *tmp_path.glob(".folder*")]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_an_export_without_room_or_killed_leaves_the_old_file_and_nothing_beside_it(shelf, tmp_path, suffix):
    out = tmp_path / f"all.{suffix}"
    out.write_text("old")
    _, hard = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, hard))  # bytes: a write fails as on a full disk
    try:
        with pytest.raises(ConfigError, match=r"The export into .* failed: .*File too large"):
            saved(shelf, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert out.read_text() == "old" and not list(tmp_path.glob(".all*"))
    if (child := os.fork()) == 0:
        try:
            with patch("pathlib.Path.replace", lambda *unused: os.kill(os.getpid(), signal.SIGKILL)):
                export_rollouts(shelf, out)
        finally:
            os._exit(1)  # or the fork would go on with these tests
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    (left,) = [path.name for path in tmp_path.glob(".all*")]
    assert out.read_text() == "old" and is_leftover(left.removeprefix(f".all.{suffix}"))
    (tmp_path / f".all.{suffix}.20241123").write_text("somebody's own")
    assert export_rollouts(shelf, out).rows == 9
    assert [path.name for path in tmp_path.glob(".all*")] == [f".all.{suffix}.20241123"]


def test_an_export_holds_the_step_the_role_and_the_failures_that_were_asked_for(shelf, tmp_path):
    out = tmp_path / "some.jsonl"
    critic = [answer("r", index, text, 1.0, role="critic") for index, text in enumerate(("first", "other"))]
    write_rollouts(shelf.records / "rollouts" / "step-00000003.jsonl", [*critic, answer("r", 2, "its own", 1.0)])
    for wanted, step, responses in (
        (Wanted(), 3, ["first", "other", "its own"]),
        (Wanted(role="critic"), None, ["first", "other"]),
        (Wanted(fate="failed"), None, ["x"]),
    ):
        export_rollouts(shelf, out, wanted, step=step)
        assert [row["response"] for row in lines(out)] == responses
    assert export_chats(shelf, out, step=1, best=9, lowest=0.9).rows == 2
    assert export_chats(shelf, out, step=2, best=9, lowest=0.9).left_out == {"messages not kept": 1}
    assert export_pairs(shelf, out, Wanted(role="critic"), lowest=0.9).left_out == {"messages not kept": 2}
    with pytest.raises(ArtifactNotFound, match=r"^There is no step-00000009"):
        saved(shelf, out, step=9)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("--print 4 --export all.jsonl", "--print does not go with --export"),
        ("--export all.jsonl --best 1 --pairs", "--best does not go with --pairs"),
        ("--export all.jsonl --best 1 --failed", "--failed does not go with --best"),
        ("--print 4 --port 0", "--port does not go with --print"),
        ("--best 1", "--best does nothing without --export"),
        ("--pairs --print 2", "--pairs does nothing without --export"),
        ("--export all.jsonl --lowest 1", "--lowest does nothing without --best or --pairs"),
    ],
)
def test_options_of_rollouts_that_would_do_nothing_are_refused_by_name(options, why):
    refused = CliRunner().invoke(app, ["rollouts", *options.split()]).exception
    assert isinstance(refused, ConfigError) and str(refused).startswith(why)
