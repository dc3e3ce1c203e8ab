"""Every way a worker can end, read from its exit code and its log: one reason, what to do, and if to start again."""

import json
import re
from pathlib import Path

import pytest

from nanodag.errors import StageFailed, StageInterrupted, StageKilled, StageStopped
from nanodag.own_code.user_frame import with_place
from nanodag.worker import failure
from nanodag.worker.failure import Ended, cause_of, explained

OURS = str(Path(failure.__file__).parent / "train" / "loop.py")
TRACEBACK = ["Traceback (most recent call last):", f'  File "{OURS}", line 3, in <module>', "    main()"]


def end(*lines, code=1, kind="sft", **how):
    return cause_of(Ended(code=code, lines=lines, **how), stage=kind, kind=kind, run="r")


def cause(*lines, restarts_left=2, **how):
    return end(*TRACEBACK, *lines, restarts_left=restarts_left, **how)


@pytest.mark.parametrize(
    ("line", "error", "what", "advice"),
    [
        ("nanodag.errors.SourceError: row 7", StageFailed, "cannot use its data: row 7", "leave it out of sft.data."),
        ("nanodag.errors.TrainingDiverged: n", StageFailed, "diverged: n", "rerun r --from sft sft.optimizer.learn"),
        ("torch.OutOfMemoryError: C", StageFailed, "ran out of memory: torch.Out", "rerun r --stage sft sft.micro_b"),
        ("RuntimeError: can't allocate memory", StageFailed, "ran out of memory: Runtime", "sft.micro_batch_tokens="),
        ("OSError: [Errno 28] No space left", StageFailed, "ran out of disk space: OSError", "Free some of the disk"),
        ("nanodag.errors.SamplerLost: gone", StageInterrupted, "lost its sampler: gone", "by itself"),
        ("nanodag.errors.StageKilled: Stage sft was", StageInterrupted, "lost the worker that asks", "by itself"),
        ("nanodag.errors.NodeLost: Node 2 was lost", StageInterrupted, "lost a node: Node 2 was lost", "by itself"),
        ("requests.exceptions.ConnectionError: x", StageInterrupted, "lost the network: requests", "can be reached"),
        ("httpx.ConnectTimeout", StageInterrupted, "lost the network: httpx.ConnectTimeout", "by itself"),
        ("nanodag.errors.CorruptArtifact: a", StageFailed, "was given bytes that are not", "does not count as done"),
        ("KeyError: 'loss'", StageFailed, "failed: KeyError: 'loss'", "in the UI, or: nanodag run --name r"),
    ],
)
def test_an_exception_becomes_a_reason_and_what_to_do(line, error, what, advice):
    found = cause(line)
    assert found.error is error and found.what.startswith(what) and advice in found.advice


def test_what_takes_less_memory_is_told_for_each_kind():
    assert "rerun r --stage tokenizer tokenizer.max_bytes=" in cause("MemoryError", kind="tokenizer").advice


@pytest.mark.parametrize(
    ("code", "how", "error", "what"),
    [
        (137, {}, StageKilled, "was ended by SIGKILL (often: out of memory)"),
        (137, {"out_of_memory": True}, StageKilled, "was ended by SIGKILL: the machine ran out of memory"),
        (139, {}, StageKilled, "was ended by SIGSEGV"),
        (75, {}, StageInterrupted, "was told to end by somebody else (SIGTERM)"),
        (143, {}, StageInterrupted, "was told to end by somebody else (SIGTERM)"),
        (75, {"was_asked": True}, StageStopped, "was stopped on request"),
        (75, {"timeout_s": 60.0}, StageFailed, "took longer than its timeout_s of 60 s"),
        (3, {}, StageFailed, "failed: exit code 3; the last line of its log is: step 3"),
    ],
)
def test_an_end_without_an_exception_is_told_by_its_code(code, how, error, what):
    found = end("step 3", code=code, **how)
    assert found.error is error and found.what.startswith(what)


GLOO = "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:387: "
LOST_RANK = [
    GLOO + "Connection reset by peer. This is typically caused by a remote worker hanging",
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4",
    "RuntimeError: [../gloo/transport/tcp/pair.cc:446] writev [10.0.0.2]:4: Broken pipe",
    "RuntimeError: [../gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation",
    "RuntimeError: Gloo connectFullMesh failed with [../gloo/transport/tcp/pair.cc:144] no error",
    "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp, ncclRemoteError: A call failed",
    "RuntimeError: NCCL communicator was aborted on rank 1.",
    "torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed.",
    "nanodag.errors.StageFailed: Trainer rank 0: [../gloo/transport/tcp/pair.cc:537] Connection reset by peer",
]
CHILD_FAILED = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: "


@pytest.mark.parametrize("line", LOST_RANK)
@pytest.mark.parametrize(
    "torchrun",
    [
        ["E1121 failed (exitcode: -9) local_rank: 1 (pid: 77) of binary: /usr/bin/python", CHILD_FAILED],
        # The one that waited was seen first, in the same look.
        ["E1121 failed (exitcode: 1) local_rank: 0 (pid: 76) of binary: p", CHILD_FAILED, "  exitcode  : -9 (pid: 77)"],
        [CHILD_FAILED, "  exitcode  : -6 (pid: 76)  (SIGABRT)", "  exitcode  : -9 (pid: 77)  (SIGKILL)"],
    ],
)
def test_a_rank_that_a_signal_ended_wins_over_what_the_others_say_of_it(line, torchrun):
    verdict = cause(f"[rank0]: {line}", *torchrun)
    assert (verdict.error, verdict.what) == (StageKilled, "was ended by SIGKILL (often: out of memory)")


@pytest.mark.parametrize("line", LOST_RANK)
def test_a_lost_rank_of_which_nobody_says_more_is_worth_another_try(line):
    verdict = cause(line, CHILD_FAILED)
    assert verdict.error is StageKilled and verdict.what.startswith("lost one of its ranks")
    assert "started again by itself, 2 times at most" in verdict.advice


def test_a_signal_that_torchrun_sent_is_not_the_cause():
    closing = "W1121 Unable to shutdown process 77 via Signals.SIGTERM, forcefully exiting via Signals.SIGKILL"
    table = ["  exitcode  : -9 (pid: 77)  (SIGKILL)", "  exitcode  : -15 (pid: 78)  (SIGTERM)"]
    exited = ["E1121 failed (exitcode: 3) local_rank: 0 (pid: 76) of binary: p", closing, CHILD_FAILED, *table]
    assert cause(*exited).error is StageFailed
    assert cause("[rank1]: KeyError: 'loss'", f"[rank0]: {LOST_RANK[0]}", *exited).what == "failed: KeyError: 'loss'"


def test_what_a_cause_brought_about_is_not_the_cause_nor_is_what_was_got_over():
    nan = "[rank1]: nanodag.errors.TrainingDiverged: The loss is nan at step 2."
    assert cause(nan, f"[rank0]: {LOST_RANK[1]}", CHILD_FAILED).what == "diverged: The loss is nan at step 2."
    full = cause("OSError: [Errno 28] No space left on device", "RuntimeError: the checkpoint was not written")
    assert full.what.startswith("ran out of disk space")
    assert cause("httpx.ConnectError: refused", "ValueError: an empty row").what == "failed: ValueError: an empty row"


def test_the_message_has_reason_advice_folder_and_log_in_that_order(tmp_path):
    lines = [f"line {n}" for n in range(40)]
    text = explained(cause("KeyError: 'x'"), stage="sft", folder=tmp_path, log_name="worker.log", lines=lines)
    reason, advice, *rest = text.splitlines()
    assert reason == "Stage sft failed: KeyError: 'x'" and advice.startswith("What to do: ")
    tail = [f"  line {n}" for n in range(25, 40)]
    assert rest == [f"Folder: {tmp_path.as_uri()}", "Last lines of its worker.log:", *tail]


@pytest.mark.parametrize(
    ("composed", "retry", "again"),
    [
        ("sweep", "nanodag sweep --name s", "with what it was started with and sft.micro_batch"),
        ("nightly", "Retry the night in the UI", "in the pipeline file, that stage's micro_batch_tokens="),
    ],
)
def test_a_stage_of_a_sweep_or_night_is_not_resumed_as_a_run(composed, retry, again):
    for line, advice in (("KeyError: 'loss'", retry), ("MemoryError", again)):
        ended = Ended(code=1, lines=[*TRACEBACK, line])
        found = cause_of(ended, stage="sft-2", kind="sft", run="s", composed=composed).advice
        assert advice in found and "nanodag r" not in found


def test_an_error_that_a_worker_only_logged_is_the_reason():
    """What RL's controller leaves: a line of level ERROR, no traceback."""
    said = "The reward 'myreward:f' cannot be used: No module named 'myreward'."
    found = end("10:00:01 INFO nanodag.rl: up", f"10:00:02 ERROR nanodag.rl: ConfigError: {said}")
    assert found.what == f"refuses its config: {said}"
    said = "The reward failed for every one of 8 rollouts of this step: KeyError: 'answer_column'"
    assert end(f"10:00:02 ERROR nanodag.rl: StageFailed: {said}").what == f"failed: {said}"
    found = end(f"10:00:02 WARNING nanodag.rl: StageFailed: {said}", "10:00:03 INFO nanodag.rl: done")
    assert "exit code 1" in found.what, "a warning was got over"


def test_the_users_own_line_stands_behind_the_reason_and_ours_does_not():
    mine = ['  File "/home/me/myreward.py", line 7, in score', "    return row['answer_column']"]
    installed = [f'  File "{json.__file__}", line 1, in loads', "    raise"]
    assert cause(*mine, *installed, "KeyError: 'answer_column'").what == (
        "failed: KeyError: 'answer_column' (/home/me/myreward.py, line 7, in score)"
    )
    assert cause(*installed, "KeyError: 'loss'").what == "failed: KeyError: 'loss'"
    between = failure._WORDS["chained"][0]
    chained = [*mine, "KeyError: 'x'", "", between, "", *TRACEBACK, "nanodag.errors.SourceError: row 3"]
    assert cause(*chained).what == "cannot use its data: row 3 (/home/me/myreward.py, line 7, in score)"


def test_after_a_traceback_any_name_is_an_exceptions():
    assert cause("mine.Oops: too bad").what == "failed: mine.Oops: too bad"
    assert cause("StopIteration").what == "failed: StopIteration"
    found = end("usage: train", "/usr/bin/python: No module named nanodag.trian")
    assert found.what.endswith("No module named nanodag.trian")


@pytest.mark.parametrize(
    "line", ["nanodag.errors.SamplerLost: x", "httpx.ConnectError: x", "nanodag.errors.NodeLost: x"]
)
def test_restarts_that_are_spent_are_not_advised_again(line):
    assert "started again by itself, 2 times at most" in cause(line).advice
    assert "started again by itself, once more" in cause(line, restarts_left=1, restarts=1).advice
    spent = cause(line, restarts_left=0, restarts=2).advice
    assert re.search("was started again 2 times, and ended in the same way. (Look|Read)", spent)
    killed = end(code=137, restarts=2).advice
    assert "by itself" not in spent + killed and "Retry the run" in killed


def test_an_error_says_where_in_the_users_code_it_came_from(tmp_path):
    (tmp_path / "mine.py").write_text("import json\ndef f(row):\n    return json.loads(row['answer'])\n")
    space = {}
    exec(compile((tmp_path / "mine.py").read_text(), str(tmp_path / "mine.py"), "exec"), space)
    for row, said in (({}, "KeyError: 'answer'"), ({"answer": "x"}, "JSONDecodeError: Expecting value")):
        try:
            space["f"](row)
        except (KeyError, ValueError) as error:
            assert with_place(error).startswith(said)
            assert with_place(error).endswith(f"({tmp_path}/mine.py, line 3, in f)")
