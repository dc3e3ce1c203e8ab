"""How often Python looks for garbage in cycles."""

import gc

NEW_OBJECTS, YOUNG_ROUNDS, OLD_ROUNDS = 100_000, 20, 100


def collect_rarely() -> None:
    """For a process that reads large JSON: each answer of 1,000 tokens is as many small lists, none of them in a cycle,
    and Python's default looks at all of them after 700 new objects. Reading then takes four times as long."""
    gc.set_threshold(NEW_OBJECTS, YOUNG_ROUNDS, OLD_ROUNDS)
