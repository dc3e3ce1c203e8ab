"""What turns and the API promise, with the vocabularies and chat templates of Qwen and Llama as they are."""

import json
import random
from dataclasses import replace

import pytest

from nanodag.api.bodies import Tool
from nanodag.api.choice import ParsedAnswer
from nanodag.api.served_model import TokenText
from nanodag.api.tool_format import knows_calls, read_whole, reader_of
from nanodag.rl.environments.tools import TOOLS
from nanodag.rl.environments.transcript import Transcript
from nanodag.tokenizer.bpe import save_tokenizer, train_bpe
from nanodag.tokenizer.chat import load_renderer
from nanodag.tokenizer.encoding import Encoding
from nanodag.tokenizer.train import SAMPLES
from tests.rl.fakes import completion
from tests.rl.transcripts import num_continued, said
from tests.tokenizer.byte_ids import encode_bytes
from tests.tokenizer.real_tokenizers import chat_template, llama, packages, qwen, save

pytestmark = pytest.mark.slow
QWEN_MARKS = {"bos": "<|endoftext|>", "eos": "<|im_end|>"}
LLAMA_MARKS = {"bos": "<|begin_of_text|>", "eos": "<|eot_id|>"}
MODELS = {
    "qwen2_5": (qwen, QWEN_MARKS), "qwen3": (qwen, QWEN_MARKS), "qwen3_instruct_2507": (qwen, QWEN_MARKS),
    "qwen3_6": (qwen, QWEN_MARKS), "llama3_1": (llama, LLAMA_MARKS), "llama3_2": (llama, LLAMA_MARKS),
}  # fmt: skip
TALK = "你好，世界！🙂👩‍👩‍👧 café naïve 𝔘 12345 don't\n\n\tif x < 1:  # ok"
QUESTION = {"role": "user", "content": "4*2?"}


@pytest.fixture(scope="module")
def formats(tmp_path_factory):
    """Renderer and encoding of each model, made when it is asked for."""

    class Formats(dict):
        def __missing__(self, name):
            make, marks = MODELS[name]
            folder = save(make(), chat_template(name), tmp_path_factory.mktemp(name), **marks)
            self[name] = load_renderer(folder), Encoding(folder)
            return self[name]

    return Formats()


def test_the_vocabularies_are_those_of_the_models(formats):
    assert formats["qwen3"][1].size == 151_669 and formats["llama3_1"][1].size == 128_256
    names = {"<|im_end|>": 151_645, "<tool_call>": 151_657, "</think>": 151_668}
    assert {name: formats["qwen3"][1].token_id(name) for name in names} == names
    assert [formats["llama3_1"][1].token_id(f"<|{name}|>") for name in ("eot_id", "python_tag")] == [128_009, 128_010]
    assert formats["llama3_1"][1].encode("hello world") == [15_339, 1_917]
    assert formats["qwen3"][1].encode("hello world") == [14_990, 1_879]


@pytest.mark.parametrize("name", MODELS)
def test_each_sampled_token_is_trained_once_behind_the_very_ids_that_it_was_sampled_from(formats, name):
    # the prompt of qwen3_6 begins a thought, which history leaves out
    assert num_continued(*formats[name], num_seeds=25) > 10 or name == "qwen3_6"


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tool", TOOLS)
def test_a_call_as_the_template_writes_it_is_read_and_its_result_stands_behind_the_sampled_ids(formats, name, tool):
    renderer, encoding = formats[name]
    (argument,) = TOOLS[tool]["function"]["parameters"]["required"]
    value = "print('你好 🙂')\nif 1 < 2:\n    pass" if tool == "python" else "4*2"
    function = {"name": tool, "arguments": json.dumps({argument: value}, ensure_ascii=False)}
    call = {"id": "call_0", "type": "function", "function": function}
    transcript = Transcript(renderer, encoding)
    first = transcript.asked([QUESTION], [TOOLS[tool]])
    before = encoding.decode(first.ids)
    whole = renderer.opened([QUESTION, said("", [call]), {"role": "tool", "content": "8"}], tools=[TOOLS[tool]])
    # the answer as it is written, behind what the prompt begins of it
    text = encoding.decode(whole)
    answer = text[len(before) : text.index(encoding.decode([renderer.stop_ids[0]]), len(before))]
    sampled = spelled_otherwise(encoding, answer)
    assert sampled != encoding.encode(answer)
    reader = reader_of(renderer, [Tool.model_validate(TOOLS[tool])])
    content = read_whole(reader, encoding, sampled)
    assert [(one.name, json.loads(one.arguments)) for one in reader.calls] == [(tool, {argument: value})]
    transcript.answered(first, completion([*sampled, renderer.stop_ids[0]]), said(content, [call]))
    second = transcript.asked([QUESTION, said(content, [call]), {"role": "tool", "content": "8"}], [TOOLS[tool]])
    assert second.sequence == 0
    assert second.ids[: len(first.ids) + len(sampled)] == (*first.ids, *sampled)
    assert encoding.decode(second.ids) == text


def spelled_otherwise(encoding, text):
    """Ids of a text that the tokenizer itself would not give: each letter by itself, added tokens whole."""
    added = {encoding.decode([token]): token for token in range(encoding.size - 300, encoding.size)
             if encoding.decode([token]) in text and encoding.decode([token]).startswith("<")}  # fmt: skip
    ids = []
    while text:
        name = next((name for name in added if text.startswith(name)), None)
        ids += [added[name]] if name else encode_bytes(encoding, text[0].encode())
        text = text[len(name or text[0]) :]
    return ids


@pytest.mark.parametrize("name", ["qwen3", "llama3_1"])
@pytest.mark.parametrize("seed", range(10))
def test_a_stream_gives_whole_characters_whatever_tokens_they_are_split_over(formats, name, seed):
    renderer, encoding = formats[name]
    draw, data = random.Random(seed), TALK.encode()
    places = sorted(draw.sample(range(1, len(data)), 40))
    pieces = [data[begin:end] for begin, end in zip([0, *places], [*places, len(data)], strict=True)]
    ids = [token for piece in pieces for token in encode_bytes(encoding, piece)]
    said_so_far, stop = "", "# ok"
    answer = ParsedAnswer(TokenText(encoding.folder), reader_of(renderer, []), stops=[stop])
    for size in range(1, len(ids) + 1):
        answer.take(replace(completion(ids[:size]), finish_reason=None))
        said_so_far += answer.new().content
        assert "\ufffd" not in said_so_far and TALK.startswith(said_so_far)
        if answer.finish_reason is not None:
            break
    assert said_so_far == TALK.removesuffix(stop) and answer.stop_reason == stop


def test_of_the_templates_that_trl_keeps_those_that_render_calls_are_read(tmp_path):
    """Each with a tokenizer of ours: 44 of the 46 that declare tools; the other two leave calls out of history. A call
    of each tool that is shipped comes back, but where a template writes quotes within quotes."""
    save_tokenizer(train_bpe(iter(SAMPLES.values()), 600), tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    declared, read, lossy = [], [], set()
    for path in sorted((packages() / "trl" / "chat_templates").glob("*.jinja")):
        settings["chat_template"] = path.read_text(encoding="utf-8")
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        renderer = load_renderer(tmp_path)
        declared += [path.stem] if renderer.takes_tools else []
        if knows_calls(renderer):
            read.append(path.stem)
            lossy |= {(path.stem, tool) for tool in TOOLS if not comes_back(renderer, Encoding(tmp_path), tool)}
    assert len(declared) == 46 and set(declared) - set(read) == {"lfm2", "lfm2_training"}
    assert lossy == {("lfm2_2_5", "python"), ("lfm2_2_5_v2", "python")}


def comes_back(renderer, encoding, tool):
    """Whether a call of a tool is read out of what the template makes of it."""
    (argument,) = TOOLS[tool]["function"]["parameters"]["required"]
    given = {argument: "print('a')\nif 1 < 2:\n    pass" if tool == "python" else "(48 / 2) ** 2"}
    call = {"id": "call_0000", "type": "function", "function": {"name": tool, "arguments": json.dumps(given)}}
    before = encoding.decode(renderer.opened([QUESTION], tools=[TOOLS[tool]]))
    text = encoding.decode(renderer.opened([QUESTION, said("", [call])], tools=[TOOLS[tool]]))
    begin = len(before) if text.startswith(before) else text.rindex(QUESTION["content"])
    answer, _, _ = text[begin:].partition("<|eot_id|>")
    reader = reader_of(renderer, [Tool.model_validate(TOOLS[tool])])
    read_whole(reader, encoding, encoding.encode(answer))
    return [(one.name, json.loads(one.arguments)) for one in reader.calls] == [(tool, given)]
