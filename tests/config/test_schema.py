"""The JSON Schema of a pipeline file: what an editor takes, and what it marks."""

import json

import pytest
from jsonschema import Draft7Validator, Draft202012Validator

from nanodag.config.document import read_yaml
from nanodag.config.kinds import shipped
from nanodag.config.schema import pipeline_schema
from nanodag.host.folders import PROJECT

PAGE = PROJECT / "docs" / "reference" / "pipeline.schema.json"
SCHEMA = json.loads(pipeline_schema())
DIALECTS = (Draft7Validator, Draft202012Validator)  # editors read the first, pydantic writes the second


def faults(**stages):
    """Whether each dialect finds something wrong in a preset of these stages."""
    found = {not dialect(SCHEMA).is_valid({"presets": {"mine": {"stages": stages}}}) for dialect in DIALECTS}
    assert len(found) == 1
    return found.pop()


def test_the_shipped_file_names_the_schema_in_docs():
    first = (PROJECT / "pipeline.yaml").read_text(encoding="utf-8").partition("\n")[0]
    assert first == f"# yaml-language-server: $schema={PAGE.relative_to(PROJECT)}"


def test_the_shipped_file_is_right_by_a_schema_that_is_one():
    for dialect in DIALECTS:
        dialect.check_schema(SCHEMA)
        assert [error.message for error in dialect(SCHEMA).iter_errors(read_yaml(PROJECT / "pipeline.yaml"))] == []


@pytest.mark.parametrize(
    "stage",
    [
        "drop",
        {"num_steps": 50},
        {"kind": "rl", "data": ["hub:openai/gsm8k/main:train", {"url": "file:a.jsonl", "held_out": 0.1}]},
        {"kind": "rl", "inputs": ["model"]},
        {"kind": "rl", "inputs": {"model": "sft"}},
        {"kind": "rl", "reward": "math"},
        {"kind": "rl", "reward": {"math": 1, "mine:score": 0.5}},
        {"kind": "rl", "reward": [{"name": "math", "weight": 2}, "mine:score"]},
        {"kind": "rl", "advantage": "grpo", "algorithm": {"policy_loss": {"options": {}}}},
        {"kind": "rl", "clip_high": 0.3},
        {"kind": "rl", "algorithm": {"clip_high": 0.3}},
        {"kind": "preference", "loss": "dpo"},
        {"kind": "mine:KIND", "whatever": 1},
    ],
)
def test_short_forms_and_partial_stages_are_right(stage):
    assert not faults(rl=stage)


@pytest.mark.parametrize(
    "stage",
    [
        "dropped",
        {"num_stepps": 50},
        {"kind": "rll"},
        {"kind": "rl", "num_stepps": 50},
        {"kind": "rl", "vocabulary": 2048},
        {"kind": "rl", "num_steps": "many"},
        {"kind": "rl", "num_steps": 0},
        {"kind": "rl", "sampler": {"contxt": 64}},
        {"kind": "rl", "data": [{"weight": 1}]},
        {"kind": "rl", "data": []},
        {"kind": "rl", "advantage": "grpoo"},
        {"kind": "rl", "reward": {"name": "math", "wieght": 2}},
        {"kind": "tokenizer", "vocabulary": 511},
    ],
)
def test_a_misspelled_setting_a_wrong_type_and_a_value_out_of_range_are_found(stage):
    assert faults(rl=stage)


def test_what_stands_beside_presets_and_in_one_is_looked_at():
    right = {
        "default": "a",
        "seed": 1,
        "presets": {"a": {"stages": {}}, "b": {"extends": "a", "server": {"port": 4300}}},
    }
    for dialect in DIALECTS:
        assert dialect(SCHEMA).is_valid(right)
        for wrong in ({"sede": 1}, {"store": "there"}, {"presets": {"a": {"extend": "b"}}}, {"presets": {"a": None}}):
            assert not dialect(SCHEMA).is_valid({**right, **wrong}), wrong
        assert not dialect(SCHEMA).is_valid({"default": "a"})


def described(table):
    """Names of a table's settings that have no words of their own, nor at what they refer to."""
    for name, field in table["properties"].items():
        while field is not None and not field.get("description"):
            reference = field.get("$ref", "").removeprefix("#/")
            field = SCHEMA if reference else None
            for part in reference.split("/") if reference else ():
                field = field[part]
        if field is None:
            yield name


def test_every_setting_of_every_kind_is_described_and_every_kind_is_offered():
    tables = [inner for table in SCHEMA["$defs"].values() for inner in (table, *table.get("anyOf", ()))]
    tables = [table for table in (SCHEMA, *tables) if "properties" in table]
    assert len(tables) > 40
    assert [name for table in tables for name in described(table)] == []
    offered = {table["properties"]["kind"]["const"] for name, table in SCHEMA["$defs"].items() if name[:5] == "kind_"}
    assert offered == set(shipped())
    assert SCHEMA["$defs"]["kind_rl"]["properties"]["num_steps"]["default"] == 100
