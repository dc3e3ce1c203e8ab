"""Which lines of a worker's log are shown to people, and that of several ranks one speaks."""

import os
import subprocess
import sys

import httpx
import pytest

from nanodag.worker.logs import LINE, ForPeople

LIBRARY = httpx.__file__  # any installed one


@pytest.mark.parametrize(
    ("line", "is_shown"),
    [
        ("10:00:00 INFO nanodag.train.loop: Step 1 of 20: loss 9.7633", True),
        ("10:00:00 WARNING nanodag.train.setup: No source has held_out", True),
        ("10:00:00 INFO __main__: sort exact_match 0.1", True),
        ("10:00:00 WARNING my_reward: three answers had no number", True),
        ("10:00:00 ERROR transformers.trainer: it cannot go on", True),
        ("10:00:00 WARNING py.warnings: /home/me/my_reward.py:3: UserWarning: look here", True),
        ("/home/me/my_reward.py:3: UserWarning: look here", True),
        ("printed by my function", True),
        ("Traceback (most recent call last):", True),
        ('  File "/home/me/my_reward.py", line 3, in score', True),
        ("10:00:00 INFO lm_eval.evaluator: Running generate_until requests", False),
        ("10:00:00 WARNING transformers.modeling_utils: Setting pad_token_id", False),
        ("10:00:00 WARNING DeepSpeed: an untested optimizer", False),
        (f"10:00:00 WARNING py.warnings: {LIBRARY}:83: FutureWarning: `x` is deprecated", False),
        (f"{LIBRARY}:83: FutureWarning: `x` is deprecated", False),
        ("[2026-11-22 10:00:00,123] [WARNING] [engine.py:1:f] an untested optimizer", False),
        ("[2026-11-22 10:00:00,123] [INFO] [real_accelerator.py:222:f] Setting ds_accelerator to cpu", False),
        ("W1122 09:55:00.123000 4711 torch/distributed/run.py:852] Setting OMP_NUM_THREADS", False),
    ],
)
def test_our_lines_the_users_and_every_error_are_shown_and_what_libraries_say_below_is_not(line, is_shown):
    assert ForPeople()(line) == is_shown


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
    command, environment = [sys.executable, "-W", "default", "-c", code], {**os.environ, "RANK": str(rank)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    return [found["text"] for line in done.stderr.splitlines() if (found := LINE.fullmatch(line))]


def test_the_first_rank_speaks_for_all_and_errors_come_from_each():
    warning, wrong = "py.warnings: <string>:1: FutureWarning: two lines", "nanodag.x: wrong here"
    assert said_by(0) == [warning, "nanodag.x: said by all", wrong]
    assert said_by(1) == [wrong]
