from functools import partial
from pathlib import Path

import pytest

from nanodag.tokenizer import layout
from nanodag.tokenizer.bpe import save_tokenizer, train_bpe
from nanodag.tokenizer.encoding import Encoding
from nanodag.tokenizer.train import SAMPLES
from tests.api.scripted import Scripted, app_of, model_of, spelled, with_template
from tests.engines.conftest import samplers_are_forks  # noqa: F401 - for each module of this folder

HERMES_TEMPLATE = """\
{%- if tools -%}<|system|>Tools:{%- for tool in tools %} {{ tool | tojson }}{%- endfor -%}<|end|>{%- endif -%}
{%- for message in messages -%}
<|{{ message.role }}|>{{ message.content }}
{%- for call in message.tool_calls or [] -%}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>
{%- endfor -%}
<|end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer and chat template of ours."""
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_bpe(iter(SAMPLES.values()), 600), folder)
    return folder


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model and its tokenizer. An engine may write its log there."""
    from tests.evaluation.tiny import save_tiny_model  # imports torch, which most tests here do without

    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder, "qwen3")
    return folder


@pytest.fixture(scope="session")
def encoding(folder: Path) -> Encoding:
    return Encoding(folder)


@pytest.fixture(scope="session")
def ids_of(encoding):
    return partial(spelled, encoding)


@pytest.fixture
def saying(folder, ids_of):
    """saying("text", "<|end|>", pause_s=..., limits=...): an application over an engine that says this; the engine."""

    def make(*pieces, limits=None, where=folder, context=200, **how):
        backend = Scripted(ids_of(*pieces), **how)
        return app_of(model_of(where, backend, context=context), **({"limits": limits} if limits else {})), backend

    return make


@pytest.fixture(scope="session")
def hermes_folder(folder, tmp_path_factory) -> Path:
    """A tokenizer whose chat template writes calls as Qwen's does."""
    return with_template(folder, tmp_path_factory.mktemp("hermes"), HERMES_TEMPLATE, eos_token=layout.END)
