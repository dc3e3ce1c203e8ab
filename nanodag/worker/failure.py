"""Cause for which a worker ended without a result: one readable reason, what to do next, and whether starting again may
help.

Read from what every worker leaves, whatever it died of: its exit code and the last lines of its log. Several processes
may have written there, each with its own traceback or a line of level ERROR; the last one counts that does not just say
that another process is gone. Where it passed through the user's own code, that line is named.
"""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nanodag import errors
from nanodag.children.tree import how_ended
from nanodag.config.kinds import recorded_kind
from nanodag.errors import StageFailed, StageInterrupted, StageKilled, StageStopped
from nanodag.errors.words import counted
from nanodag.host.beside import table_beside
from nanodag.own_code.user_frame import is_users, place
from nanodag.worker.job import STOPPED_EXIT_CODE

TAIL_LINES = 15
LOOK_BACK_LINES = 400

_OF_RANK = re.compile(r"^(?:\[rank\d+\]:|\[\d+\]:) ?")
_LOGGED = re.compile(r"\d\d:\d\d:\d\d (?:ERROR|CRITICAL) [\w.]+: (?=[A-Za-z_][\w.]*: )")
_TRACEBACK = "Traceback (most recent call last):"
_FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)')
# After a traceback any name is an exception's; elsewhere those that are called like one.
_ANY = re.compile(r"(?P<name>[A-Za-z_][\w.]*)(?:: (?P<message>.*))?")
_EXCEPTION = re.compile(
    r"(?P<name>[A-Za-z_][\w.]*(?:Error|Exception|Timeout|Diverged|NotFound|Busy|Lost|Artifact|Request|Tool|Format"
    r"|Failed|Killed|Stopped|Interrupted))"
    r"(?:: (?P<message>.*))?"
)
_WORDS: dict[str, Any] = table_beside(__file__)
_LOST_RANK = re.compile("|".join(_WORDS["lost_rank"]))
_CONSEQUENCE = re.compile("|".join([*_WORDS["lost_rank"], *_WORDS["consequence"]]))
_RANK_SIGNAL = re.compile(r"(?P<is_first>failed \()?exitcode *: -(?P<signal>\d+)\b.*\(pid: (?P<pid>\d+)\)")
_TORCHRUN_KILLED = re.compile(r"Unable to shutdown process (?P<pid>\d+) via")


@dataclass(frozen=True, kw_only=True)
class Ended:
    """End of a worker. code: its exit code, 128 + signal for one that a signal ended. lines: its log's last ones.
    timeout_s: the limit that it exceeded, 0 for none. was_asked: to stop, by us. out_of_memory: the kernel's
    out-of-memory killer was at work on this machine meanwhile. restarts_left: how often it is started again by itself
    if that may help; restarts: how often it was."""

    code: int
    lines: Sequence[str]
    timeout_s: float = 0.0
    was_asked: bool = False
    out_of_memory: bool = False
    restarts_left: int = 0
    restarts: int = 0


@dataclass(frozen=True, kw_only=True)
class Cause:
    """error: what to raise. what: happened. advice: what to do next."""

    error: type[StageFailed]
    what: str
    advice: str


def cause_of(ended: Ended, *, stage: str, kind: str, run: str, composed: str = "") -> Cause:
    """The cause of an end without a result, in words for whoever reads it in the UI or in the terminal.

    composed: `sweep` or `nightly` for a stage of one; these are resumed in another way than a run.
    """
    words = {
        "stage": stage,
        **_commands(stage, run, composed),
        "by_itself": _by_itself(ended),
        "memory": recorded_kind(kind).less_memory,
        "rate": recorded_kind(kind).lower_rate,
    }
    words["resume"] = resume = f"Then Retry {words['retry']}. It goes on from its newest checkpoint."
    if ended.was_asked:
        return Cause(error=StageStopped, what="was stopped on request", advice=resume.removeprefix("Then "))
    if ended.timeout_s:
        what = f"took longer than its timeout_s of {ended.timeout_s:.0f} s"
        more = f"{words['again']}timeout_s={2 * ended.timeout_s:.0f}"
        return Cause(error=StageFailed, what=what, advice=f"Give it longer; it goes on from its checkpoint: {more}")
    exceptions = _exceptions(ended.lines)
    last = next((line for line in reversed(exceptions) if not _CONSEQUENCE.search(line)), "")
    for lines in ([last], exceptions[::-1]):
        for rule in _WORDS["rules"]:
            line = next((line for line in lines if re.search("|".join(rule["pattern"]), line)), "")
            if line and (rule.get("is_deep") or line is last):
                error = getattr(errors, rule.get("error", "StageFailed"))
                what = f"{rule['what']}: {_message(line)}"
                return Cause(error=error, what=what, advice=rule["advice"].format(**words))
    code = ended.code if last else _rank_ended_by_signal(ended.lines) or ended.code
    if code == STOPPED_EXIT_CODE or code > 128:
        return _signalled(replace(ended, code=code), resume, words)
    if not last and (line := next((line for line in exceptions if _LOST_RANK.search(line)), "")):
        what = f"lost one of its ranks, which left no reason (often: out of memory): {line}"
        return Cause(error=StageKilled, what=what, advice=words["by_itself"] + resume.removeprefix("Then "))
    written = next((line.strip() for line in reversed(ended.lines) if line.strip()), "")
    words_of_log = f"; the last line of its log is: {written[:300]}" if written else ""
    line = last or (exceptions[-1] if exceptions else f"exit code {ended.code}{words_of_log}")
    return Cause(error=StageFailed, what=f"failed: {_message(line)}", advice=f"Mend what the log says. {resume}")


def _message(line: str) -> str:
    """An exception's line; of one of ours, whose text says all, without its class."""
    name, _, text = line.partition(": ")
    kind = getattr(errors, name, None)
    return text if text and isinstance(kind, type) and issubclass(kind, errors.NanodagError) else line


def _commands(stage: str, run: str, composed: str) -> dict[str, str]:
    """Ways to go on. retry: with what there is. again, onward: with another value of the stage, which follows."""
    if composed == "sweep":
        command = f"nanodag sweep --name {run}"
        retry = f"the sweep in the UI, or: {command}, with what it was started with"
        again = f"{command}, with what it was started with and {re.sub(r'-[0-9]+$', '', stage)}."
        return {"retry": retry, "again": again, "onward": again}
    if composed:
        again = "in the pipeline file, that stage's "
        return {"retry": "the night in the UI", "again": again, "onward": again}
    rerun = f"nanodag rerun {run}"
    return {
        "retry": f"the run in the UI, or: nanodag run --name {run}",
        "again": f"{rerun} --stage {stage} {stage}.",
        "onward": f"{rerun} --from {stage} {stage}.",
    }


def explained(cause: Cause, *, stage: str, folder: Path, log_name: str, lines: Sequence[str]) -> str:
    """The message of the error that is raised: reason, advice, where to look, the log's last lines."""
    last = list(lines)[-TAIL_LINES:]
    parts = [f"Stage {stage} {cause.what}", f"What to do: {cause.advice}", f"Folder: {folder.as_uri()}"]
    return "\n".join([*parts, f"Last lines of its {log_name}:", *(f"  {line}" for line in last)])


def _by_itself(ended: Ended) -> str:
    """Words on what is done without being asked, before an advice for when that does not help; nothing, once it did
    not."""
    if ended.restarts_left:
        times = "once more" if ended.restarts_left == 1 else f"{ended.restarts_left} times at most"
        return f"It is started again by itself, {times}. Should that not do: "
    return (
        f"It was started again {counted(ended.restarts, 'time')}, and ended in the same way. " if ended.restarts else ""
    )


def _signalled(ended: Ended, resume: str, words: dict[str, str]) -> Cause:
    by_itself = words["by_itself"] + resume.removeprefix("Then ")
    if ended.code in (STOPPED_EXIT_CODE, 128 + signal.SIGTERM):
        what = "was told to end by somebody else (SIGTERM): its machine is wanted back, or a limit was reached"
        return Cause(error=StageInterrupted, what=what, advice=by_itself)
    number = ended.code - 128
    if ended.out_of_memory and number == signal.SIGKILL:
        what = f"{how_ended(-number)}: the machine ran out of memory"
        lower = f"Lower what it holds at once: {words['again']}{words['memory']}"
        return Cause(error=StageKilled, what=what, advice=f"{by_itself} {lower}")
    hint = " (often: out of memory)" if number == signal.SIGKILL else ""
    return Cause(error=StageKilled, what=how_ended(-number) + hint, advice=by_itself)


def _rank_ended_by_signal(lines: Sequence[str]) -> int:
    """128 + signal where torchrun says that a signal ended a rank, else 0: torchrun itself then ends with 1.

    Signals that torchrun sent to the others do not count; SIGABRT, by which NCCL ends those that wait for a lost rank,
    counts where there is no other.
    """
    killed = {match["pid"] for line in lines if (match := _TORCHRUN_KILLED.search(line))}
    matches = [match for line in lines if (match := _RANK_SIGNAL.search(line)) and match["pid"] not in killed]
    numbers = [int(match["signal"]) for match in matches if match["is_first"] or int(match["signal"]) != signal.SIGTERM]
    return 128 + min(numbers, key=lambda number: number in (signal.SIGABRT, signal.SIGTERM)) if numbers else 0


def _exceptions(lines: Sequence[str]) -> list[str]:
    """The lines that end a traceback, or that a worker logged as its error; each with the user's line behind it."""
    exceptions, users_line, is_inside = [], "", False
    for raw in lines[-LOOK_BACK_LINES:]:
        line = _OF_RANK.sub("", raw)
        if line.startswith(_TRACEBACK):
            is_inside = True
            continue
        if is_inside and (not line.strip() or line.startswith(" ")):
            if (frame := _FRAME.fullmatch(line)) and is_users(frame["file"]):
                users_line = place(frame["file"], frame["line"], frame["function"])
            continue
        logged = _LOGGED.sub("", line)
        match = (_ANY if is_inside or logged != line else _EXCEPTION).fullmatch(logged.strip())
        is_inside = False
        if match:
            name = match["name"].rpartition(".")[2] if match["name"].startswith("nanodag.") else match["name"]
            text = f"{name}: {match['message']}" if match["message"] else name
            exceptions.append(f"{text} ({users_line})" if users_line and users_line not in text else text)
            continue
        if line.strip() and line not in _WORDS["chained"]:
            users_line = ""
    return exceptions
