"""Which lines of a worker's log are shown to people, and that of several ranks one speaks."""

import os
import subprocess
import sys

import httpx
import pytest

from nanodag.worker.logs import LINE, ForPeople

LIBRARY = httpx.__file__  # any installed one


@pytest.mark.parametrize(
    "line",
    [
        "10:00:00 INFO nanodag.train.loop: Step 1 of 20: loss 9.7633",
        "10:00:00 WARNING nanodag.train.setup: No source has held_out",
        "10:00:00 INFO __main__: sort exact_match 0.1",
        "10:00:00 WARNING my_reward: three answers had no number",
        "10:00:00 ERROR transformers.trainer: it cannot go on",
        "10:00:00 WARNING py.warnings: /home/me/my_reward.py:3: UserWarning: look here",
        "/home/me/my_reward.py:3: UserWarning: look here",
        "printed by my function",
        "Traceback (most recent call last):",
        '  File "/home/me/my_reward.py", line 3, in score',
    ],
)
def test_what_we_or_the_users_code_says_and_every_error_is_shown(line):
    assert ForPeople()(line)


@pytest.mark.parametrize(
    "line",
    [
        "10:00:00 INFO lm_eval.evaluator: Running generate_until requests",
        "10:00:00 WARNING transformers.modeling_utils: Setting pad_token_id",
        "10:00:00 WARNING DeepSpeed: an untested optimizer",
        f"10:00:00 WARNING py.warnings: {LIBRARY}:83: FutureWarning: `x` is deprecated",
        f"{LIBRARY}:83: FutureWarning: `x` is deprecated",
        "[2026-11-22 10:00:00,123] [WARNING] [engine.py:1:f] an untested optimizer",
        "[2026-11-22 10:00:00,123] [INFO] [real_accelerator.py:222:f] Setting ds_accelerator to cpu",
        "W1122 09:55:00.123000 4711 torch/distributed/run.py:852] Setting OMP_NUM_THREADS",
    ],
)
def test_what_libraries_say_below_an_error_is_not_shown(line):
    assert not ForPeople()(line)


def test_a_warnings_second_line_goes_with_it_and_the_next_one_does_not():
    is_shown = ForPeople()
    lines = [f"{LIBRARY}:83: FutureWarning: old", "  return func(*args)", "  printed later"]
    assert [is_shown(line) for line in lines] == [False, False, True]


def said_by(rank):
    code = (
        "import logging, warnings; from nanodag.worker import logs; logs.set_up();"
        "warnings.warn('two\\nlines', FutureWarning); log = logging.getLogger('nanodag.x');"
        "log.warning('said by all'); log.error('wrong here')"
    )
    environment = {**os.environ, "RANK": str(rank)}
    done = subprocess.run(
        [sys.executable, "-W", "default", "-c", code], env=environment, capture_output=True, text=True
    )
    return [found["text"] for line in done.stderr.splitlines() if (found := LINE.fullmatch(line))]


def test_the_first_rank_speaks_for_all_and_errors_come_from_each():
    assert said_by(0) == [
        "py.warnings: <string>:1: FutureWarning: two lines",
        "nanodag.x: said by all",
        "nanodag.x: wrong here",
    ]
    assert said_by(1) == ["nanodag.x: wrong here"]
