"""Words, ranges and short names of settings."""

import pytest

from nanodag.cli.show import explain_setting
from nanodag.config import resolve
from nanodag.config.kinds import shipped
from nanodag.config.pipeline import Pipeline
from nanodag.config.reference import COMMAND, models_in, reference, setting, words_of
from nanodag.config.rl_entries import EntryConfig
from nanodag.config.section import sections_of
from nanodag.errors import ConfigError
from nanodag.host.folders import PROJECT

FILE = PROJECT / "pipeline.yaml"


def classes(model=Pipeline, found=None):
    found = [] if found is None else found
    if model not in found:
        found.append(model)
        for field in model.model_fields.values():
            for inner in models_in(field.annotation):
                classes(inner, found)
    return found


def test_every_setting_has_words():
    models = classes()
    for kind in shipped().values():
        classes(kind.config, models)
    fields = [(model, name, field) for model in models for name, field in model.model_fields.items()]
    assert len(fields) > 300
    assert [f"{model.__name__}.{name}" for model, name, field in fields if name != "kind" and not words_of(field)] == []


def test_the_reference_in_docs_is_what_the_classes_say():
    found = (PROJECT / "docs" / "reference" / "config.md").read_text(encoding="utf-8")
    assert found == reference(), f"stale; run: {COMMAND}"


@pytest.mark.parametrize("kind", shipped())
def test_no_two_settings_of_a_stage_have_one_short_name(kind):
    stage = shipped()[kind].config
    names = [*stage.model_fields, *(name for section in sections_of(stage).values() for name in section.model_fields)]
    assert sorted(set(names)) == sorted(names)


def test_options_with_a_setting_of_their_own_name_one_that_exists():
    fields = shipped()["rl"].config.model_fields["algorithm"].annotation.model_fields
    for model in EntryConfig.__subclasses__():
        for name in model.settings.values():
            first, _, last = name.partition(".")
            assert first in fields and (not last or last in fields[first].annotation.model_fields), name


def test_a_short_name_says_what_the_setting_is_and_where_its_value_came_from():
    found = setting(resolve(FILE, "gsm8k-rl", ["rl.clip_low=0.1"]), "rl.clip_high")
    assert (found.name, found.type, found.default, found.value) == (
        "rl.algorithm.clip_high", "number, above 0, at most 100", "0.2", 0.28
    )  # fmt: skip
    assert found.words.startswith("Upper clip of ppo_clip") and found.origin == "preset gsm8k-rl"


@pytest.mark.parametrize(("name", "said"), [
    ("rl.clip_hihg", "no setting 'rl.clip_hihg'. Did you mean 'rl.algorithm.clip_high'"),
    ("rll.clip_high", "Did you mean 'rl.algorithm.clip_high'"),
    ("store.ulr", "Did you mean 'store.url'"),
    ("rl", "rl is a stage of kind rl; name a setting of it: kind, inputs, seed"),
])  # fmt: skip
def test_a_name_that_is_no_setting_is_refused_with_the_nearest(name, said):
    with pytest.raises(ConfigError, match=said):
        setting(resolve(FILE, "gsm8k-rl"), name)


def test_nanodag_config_explains_a_setting(capsys):
    explain_setting("rl.advantage", ["rl.advantage=rloo"], preset="gsm8k-rl", file=str(FILE))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "rl.algorithm.advantage, preset gsm8k-rl"
    assert "  shipped   grpo, dr_grpo, rloo, reinforce_pp," in lines[3]
    assert lines[4:] == ["  default   grpo", "  value     rloo    # override"]
