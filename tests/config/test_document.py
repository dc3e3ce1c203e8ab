"""The reader of pipeline files against PyYAML, where both mean the same, and against whatever one may write."""

import json
import os
import time

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanodag.config import resolve
from nanodag.config.document import LARGEST, MAX_BYTES, parse_yaml
from nanodag.config.resolve import leaves
from nanodag.errors import ConfigError
from nanodag.host.folders import PROJECT
from tests.config.stages import STAGES

SHIPPED = (PROJECT / "pipeline.yaml").read_text()
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "60"))  # of each kind
# What is special in YAML, and in a pipeline file; a fuzzer's own letters rarely meet it.
PIECES = [
    *("&a ", "*a", "<<: ", "- ", ": ", "\n", "\n  ", "\n    ", "{", "}", "[", "]", ",", "? ", "|", ">", "#", '"', "'"),
    *("!!int ", "!x ", "!!python/object:os.system ", "---\n", "...\n", "%YAML 1.1\n", "\t", "\0", "\x85", "\ufeff"),
    *("presets", "one", "stages", "extends", "default", "inputs", "kind", "rl", "store", "url", "data", "drop", "null"),
    *("true", "1e999", "0x", "010", ".nan", "~", "9" * 30, "-1", "reward", "sampler", "unchecked", "shape", "auto"),
]


def test_the_shipped_file_means_what_it_means_to_pyyaml():
    assert parse_yaml(SHIPPED, str) == yaml.safe_load(SHIPPED)


@pytest.mark.parametrize(("text", "value"), [
    *(("12", 12), ("-12", -12), ("0o17", 15), ("0x1F", 31), ("0", 0)),
    *(("1.5", 1.5), (".5", 0.5), ("5.", 5.0), ("2e-6", 2e-6), ("1e-300", 1e-300), ("-.inf", float("-inf"))),
    *(("1e6", 1_000_000), ("1.5e3", 1500), ("1000.0", 1000.0)),
    *(("true", True), ("False", False), ("~", None), ("", None), ("NULL", None)),
    *(("yes", "yes"), ("on", "on"), ("1:30", "1:30"), ("1_000", "1_000"), ("2026-11-22", "2026-11-22")),
    *(("'12'", "12"), ('"true"', "true"), ("!!str 12", "12"), ("!!float 3", 3.0), ("! 12", "12")),
    ("{1: a, yes: b, null: c}", {"1": "a", "yes": "b", "null": "c"}),
    ("- &x {a: 1, b: 2}\n- {<<: *x, b: 3}", [{"a": 1, "b": 2}, {"a": 1, "b": 3}]),
    ("- &x {a: 1}\n- &y {a: 2, b: 2}\n- {<<: [*x, *y]}", [{"a": 1}, {"a": 2, "b": 2}, {"a": 1, "b": 2}]),
])  # fmt: skip
def test_scalars_are_those_of_yaml_1_2(text, value):
    found = parse_yaml(text, str)
    assert found == value and type(found) is type(value)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-LARGEST, LARGEST) | st.floats(-LARGEST, LARGEST),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("abc", min_size=1), inner, max_size=4),
        max_leaves=20,
    )
)
@settings(max_examples=EXAMPLES, deadline=None)
def test_json_is_read_as_json(value):
    assert parse_yaml(json.dumps(value), str) == value


def refused_or_read(path, content, overrides=()):
    began = time.process_time()
    path.write_bytes(content)
    try:
        resolve(path, "auto", overrides)
    except ConfigError as error:
        assert len(str(error)) < 4000, "a message that nobody reads"
    assert time.process_time() - began < 2


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz") / "p.yaml"


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=60))
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_text_gives_a_traceback_or_a_hang(path, pieces):
    refused_or_read(path, "".join(pieces).encode("utf-8", "surrogatepass"))


@given(st.integers(0, len(SHIPPED)), st.integers(0, 80), st.lists(st.sampled_from(PIECES), max_size=4))
@settings(max_examples=EXAMPLES // 2, deadline=None)
def test_no_slip_in_the_shipped_file_gives_a_traceback_or_a_hang(path, start, length, pieces):
    refused_or_read(path, (SHIPPED[:start] + "".join(pieces) + SHIPPED[start + length :]).encode())


PIPELINE = json.dumps({"default": "one", "presets": {"one": {"stages": STAGES}}}).encode()


@pytest.fixture(scope="module")
def fields(path):
    """Dotted names of all that a pipeline has, and of some tables."""
    path.write_bytes(PIPELINE)
    names = [name for name, _ in leaves(resolve(path, "one").pipeline) if name != "preset"]
    return [*names, "store", "server", "nightly", "rl", "rl.sampler", "base.shape", "stages", "rl.inputs"]


VALUES = [
    None, True, -1, 0, 1e300, 10**18, 10**15, 1e14, 2.5, "", "auto", "none", "x:y", "file:", [], {}, [[]], {"a": []},
    ["auto"],
]  # fmt: skip


@given(st.data())
@settings(max_examples=EXAMPLES, deadline=None)
def test_no_value_of_any_field_gives_a_traceback_or_a_hang(path, fields, data):
    chosen = data.draw(st.lists(st.sampled_from(fields), min_size=1, max_size=2))
    overrides = [f"{name}={json.dumps(data.draw(st.sampled_from(VALUES)))}" for name in chosen]
    refused_or_read(path, PIPELINE, overrides)


@pytest.mark.parametrize("piece", ["[", "{", "- ", "? ", "a: ", "&a ", "a: b\n", "- a\n", "!!x ", "'", "|\n", "#\n"])
def test_the_largest_file_of_one_piece_is_read_or_refused_within_2_s(path, piece):
    refused_or_read(path, (piece * (MAX_BYTES // len(piece))).encode())


def test_a_value_lies_in_at_most_49_lists():
    assert parse_yaml("[" * 49 + "1" + "]" * 49, str)
    with pytest.raises(ConfigError, match="nested deeper than 50"):
        parse_yaml("[" * 50 + "1" + "]" * 50, str)
