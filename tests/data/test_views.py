import json

import pytest

from nanodag.data.opening import open_source
from nanodag.errors import SourceError

CONTENT = [
    {"question": "?", "context": [["Ed", ["Ed is", " a man."]], ["Bo", ["Bo sings."]]]},
    {"question": "?", "context": [["Bo", ["Bo sings."]], ["Ed", ["Another Ed."]], ["Nil", [" "]]]},
]


def test_a_view_of_passages_has_each_once_in_order_and_is_part_of_url_and_identity(tmp_path):
    (tmp_path / "q.json").write_text(json.dumps(CONTENT))
    plain, viewed = open_source(f"file:{tmp_path}/q.json"), open_source(f"file:{tmp_path}/q.json#passages")
    assert plain.length() == 2
    passages = [("Ed", "Ed is a man."), ("Bo", "Bo sings."), ("Ed", "Another Ed.")]
    assert [(row["title"], row["text"]) for _, row in viewed.rows()] == passages
    assert [row["text"] for _, row in viewed.rows(start=1)] == ["Bo sings.", "Another Ed."]
    assert plain.identity() != viewed.identity()


def test_a_view_of_something_else_is_refused(tmp_path):
    (tmp_path / "q.json").write_text('[{"question": "?"}]')
    with pytest.raises(SourceError, match=r"q\.json is not what the view 'passages' reads"):
        open_source(f"file:{tmp_path}/q.json#passages").length()
    with pytest.raises(SourceError, match="views are passages"):
        open_source(f"file:{tmp_path}/q.json#paragraphs").length()
