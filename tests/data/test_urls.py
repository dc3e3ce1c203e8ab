import pytest
from pydantic import ValidationError

from nanodag.data.config import SourceConfig, mixes_by_epochs
from nanodag.data.urls import hub_path, parse_url
from nanodag.errors import ConfigError, SourceError


@pytest.mark.parametrize(("url", "name", "revision", "config", "split"), [
    ("hub:openai/gsm8k", "openai/gsm8k", "", "", "train"),
    ("hub:openai/gsm8k/main", "openai/gsm8k", "", "main", "train"),
    ("hub:openai/gsm8k/main:test", "openai/gsm8k", "", "main", "test"),
    ("hub:a/b@0f1e/cfg:validation[0:5]", "a/b", "0f1e", "cfg", "validation"),
    ("hub:a/b:test", "a/b", "", "", "test"),
])  # fmt: skip
def test_a_hub_url_names_data_set_revision_config_and_split(url, name, revision, config, split):
    path = hub_path(parse_url(url))
    assert (path.name, path.revision, path.config, path.split) == (name, revision, config, split)


@pytest.mark.parametrize(("text", "path", "parameters", "start"), [
    ('reasoning_gym:chain_sum?size=10&digits=[1,2]&deep=true&word=plain&quoted="7"&share=0.5', "chain_sum",
     {"size": 10, "digits": [1, 2], "deep": True, "word": "plain", "quoted": "7", "share": 0.5}, 0),
    ("file:data/part-?.jsonl[2:]", "data/part-?.jsonl", {}, 2),  # a wildcard, not a query
    ("file:part-[0-9].txt", "part-[0-9].txt", {}, 0),  # no slice
])  # fmt: skip
def test_parameters_are_json_values_or_bare_words_and_a_glob_is_no_query_or_slice(text, path, parameters, start):
    url = parse_url(text)
    assert (url.path, url.parameters, url.start, url.stop) == (path, parameters, start, None)


@pytest.mark.parametrize(("url", "words"), [
    ("hbu:a/b", "Did you mean 'hub:'"), ("gsm8k", "has no known kind"), ("hub:gsm8k", "hub:owner/name"),
    ("hub:a/b?x=1", "takes no parameters"), ("input:conversations?a=1", "takes no parameters"),
    ("file:", "names nothing"), ("file:x.txt?by=word", "?by=line"), ("file:x.jsonl[5:5]", "slices no rows"),
    *((f"https://{rest}", "host/path.zip") for rest in ("h/../x.zip", "h/.x/y.zip", "a@h/x.zip", "h/x.tar", "x.zip")),
    ("http://h/x.zip?key=1", "takes no parameters"), ("package:some-wheel", "package:distribution/path"),
    ("python:module", "python:module:function"),
])  # fmt: skip
def test_a_wrong_url_says_what_is_wrong(url, words):
    with pytest.raises(SourceError, match=words.replace("?", r"\?")):
        parse_url(url)


def test_a_config_may_be_a_bare_url_and_refuses_what_it_does_not_know():
    assert SourceConfig.model_validate("hub:a/b").url == "hub:a/b"
    with pytest.raises(ValidationError, match="wieght"):
        SourceConfig(url="hub:a/b", wieght=2)
    with pytest.raises(ValidationError, match="keep one"):
        SourceConfig(url="hub:a/b", weight=2, epochs=1)
    with pytest.raises(ValidationError, match="Did you mean 'gsm8k'"):
        SourceConfig(url="hub:a/b", adapter="gsm8")
    with pytest.raises(ValidationError, match="no option 'tool'; it takes"):
        SourceConfig(url="hub:openai/gsm8k/main", options={"tool": True})


def test_weights_for_some_sources_only_are_refused():
    with pytest.raises(ConfigError, match=r"hub:a/b has a weight and hub:c/d has none"):
        mixes_by_epochs([SourceConfig(url="hub:a/b", weight=1), SourceConfig(url="hub:c/d", epochs=1)])
    assert mixes_by_epochs([SourceConfig(url="hub:a/b"), SourceConfig(url="hub:c/d", epochs=2)])
