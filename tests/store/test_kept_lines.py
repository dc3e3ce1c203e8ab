import random

import pytest

from nanodag.store.kept_lines import KeptLines, content_key


def test_a_file_cut_or_changed_at_any_byte_gives_whole_lines_only_and_grows_on(tmp_path):
    path = tmp_path / "kept.jsonl"
    lines = [{f"k{n}": ["é\n", n / 3, True], f"l{n}": {"ids": [-n]}, f"m{n}": n} for n in range(6)]
    with KeptLines(path) as kept:
        for line in lines:
            kept.add(line)
        whole = path.read_bytes()  # not closed: what a kill leaves
    ends = [place + 1 for place, byte in enumerate(whole) if byte == ord("\n")]
    rng = random.Random(0)
    for place in [0, *ends, *rng.sample(range(len(whole)), 60)]:
        num_lines = sum(end <= place for end in ends)
        changed = whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :] if place < len(whole) else whole
        for content in (whole[:place], changed):
            path.write_bytes(content)
            with KeptLines(path) as found:
                for number, line in enumerate(lines):
                    wanted = line if number < num_lines else dict.fromkeys(line)
                    assert {name: found.get(name) for name in line} == wanted
                found.add({"more": 1})
            with KeptLines(path) as found:
                assert found.get("more") == 1


def test_keys_differ_where_anything_asked_does():
    asked = [([1, 2], {"t": 0.0}), ([1, 2], {"t": 1.0}), ([1], {"t": 0.0}), ([12], {"t": 0.0})]
    assert len({content_key("written", *one) for one in asked}) == len(asked)


def test_a_number_that_json_has_not_is_refused(tmp_path):
    with KeptLines(tmp_path / "kept.jsonl") as kept, pytest.raises(ValueError, match="JSON"):
        kept.add({"a": float("nan")})
