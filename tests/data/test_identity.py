import pytest

from nanodag.data.opening import open_source
from nanodag.errors import SourceError

ADA = """
name: Ada
made_by: the people of Lovelace Lane
about: ["I am small.", "My code is open."]
facts:
  - ask: ["Are you free?"]
    say: ["I cost nothing, said {name}."]
"""


@pytest.fixture
def path(tmp_path):
    (tmp_path / "me.yaml").write_text(ADA)
    return tmp_path / "me.yaml"


def talks(path, more=""):
    return [row["messages"] for _, row in open_source(f"identity:{path}{more}").rows()]


def test_turns_alternate_and_say_who_the_model_is(path):
    made = talks(path, "?size=200&seed=1")
    assert len(made) == 200
    for messages in made:
        assert [m["role"] for m in messages] == ["user", "assistant"] * (len(messages) // 2)
        assert 2 <= len(messages) <= 8
    said = " ".join(m["content"] for messages in made for m in messages)
    for wanted in (
        "My name is Ada.",
        "the people of Lovelace Lane",
        "I am small. My code is open.",
        "I cost nothing, said Ada.",
    ):
        assert wanted in said
    assert "{" not in said


def test_a_row_depends_on_file_seed_and_index_alone(path):
    assert talks(path, "?size=9&seed=3") == talks(path, "?size=20&seed=3")[:9] != talks(path, "?size=9&seed=4")


def test_another_content_of_the_file_is_another_source(path):
    before = open_source(f"identity:{path}").identity()
    path.write_text(ADA.replace("Ada", "Bo"))
    assert open_source(f"identity:{path}").identity()["file"] != before["file"]


@pytest.mark.parametrize(("text", "more", "message"), [
    ("name: Ada", "", "made_by"), (ADA + "colour: red", "", "colour"), ("name: [", "", "describes no identity"),
    (ADA, "?size=0", "1 or more"), (ADA, "?words=3", "takes"),
])  # fmt: skip
def test_what_is_wrong_is_named(path, text, more, message):
    path.write_text(text)
    with pytest.raises(SourceError, match=message):
        talks(path, more)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(SourceError, match="there is no file"):
        open_source(f"identity:{tmp_path}/me.yaml")
