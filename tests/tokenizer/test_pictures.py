"""Images in conversations: where their ids stand, what is learned, and what is refused."""

import base64
from typing import Any

import pytest

from nanodag.errors import SourceError
from nanodag.host.images import FOLDER, content_of, digests_in
from nanodag.tokenizer import bounds
from nanodag.tokenizer.bpe import save_tokenizer
from nanodag.tokenizer.chat import load_renderer
from nanodag.tokenizer.messages import meant, plain
from tests.model.vision_models import TEMPLATE, conversation, write_processor

MARKED, COMPARED = TEMPLATE, TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")


@pytest.fixture(autouse=True)
def images(tmp_path: Any, monkeypatch: Any) -> Any:
    monkeypatch.setenv(FOLDER, str(tmp_path / "images"))


@pytest.mark.parametrize("template", [MARKED, COMPARED])
def test_the_answer_alone_is_learned_behind_a_picture(tmp_path: Any, template: str) -> None:
    write_processor(tmp_path, template)
    renderer = load_renderer(tmp_path)
    messages = conversation(0)["messages"]
    ((ids, mask),) = renderer.render_batch([messages])
    ((begin, end, digest),) = digests_in(ids)
    assert messages[0]["content"][0] == {"type": "image", "image": digest}
    assert end - begin == 16
    token = renderer._encoding.token_id
    assert [ids[begin - 1], ids[end]] == [token("<|vision_start|>"), token("<|vision_end|>")]
    assert ids[mask].tolist() == [*messages[1]["content"].encode(), token("<|im_end|>")]
    prompt = renderer.prompt(messages[:1])
    assert prompt == ids[: mask.argmax()].tolist()


def test_a_message_that_comes_over_the_api_is_asked_as_one_of_a_row(tmp_path: Any) -> None:
    write_processor(tmp_path)
    messages = conversation(0)["messages"][:1]
    image, text = messages[0]["content"]
    url = f"data:image/png;base64,{base64.b64encode(content_of(image['image'])).decode()}"
    sent = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}, text]}
    assert plain(sent) == messages[0]
    assert meant(sent) == meant(messages[0])
    renderer = load_renderer(tmp_path)
    assert renderer.opened([sent]) == renderer.prompt(messages)
    for part, said in (({"type": "image_url", "image_url": {"url": "http://x/a.png"}}, "only data:image"),
                       ({"type": "video", "video": "x"}, "only text and images are read")):  # fmt: skip
        with pytest.raises(SourceError, match=said):
            renderer.opened([{"role": "user", "content": [part]}])


def test_a_second_turn_with_a_picture_follows_the_sampled_one(tmp_path: Any) -> None:
    write_processor(tmp_path)
    renderer = load_renderer(tmp_path)
    first, second = conversation(0)["messages"], conversation(1)["messages"][:1]
    prompt, sampled = renderer.prompt(first[:1]), [*first[1]["content"].encode(), renderer.stop_ids[0]]
    ids = renderer.following([*first, *second], 1, sampled, {}, tools=())
    assert ids is not None and [*prompt, *sampled, *ids] == renderer.prompt([*first, *second])


def test_a_text_that_spells_a_place_for_a_picture_is_a_text_and_refused_beside_a_picture(tmp_path: Any) -> None:
    write_processor(tmp_path)
    renderer, spelling = load_renderer(tmp_path), {"role": "user", "content": "look: <|image_pad|>"}
    assert digests_in(renderer.prompt([spelling])) == []
    with pytest.raises(SourceError, match="has 2 places for 1 images, or a message spells"):
        renderer.prompt([*conversation(0)["messages"], spelling])


def test_messages_of_many_images_are_refused_before_their_ids_are_made(tmp_path: Any) -> None:
    write_processor(tmp_path)
    image = conversation(0)["messages"][0]["content"][0]
    token = bounds.in_force.set(bounds.Bound(100))
    try:
        with pytest.raises(bounds.TooManyTokens):
            load_renderer(tmp_path).opened([{"role": "user", "content": [image] * 7}])
    finally:
        bounds.in_force.reset(token)


@pytest.mark.parametrize("image", ["../secret", "x" * 30, "/etc/passwd"])
def test_a_message_names_an_image_by_its_digest_alone(tmp_path: Any, image: str) -> None:
    write_processor(tmp_path)
    with pytest.raises(SourceError, match="only data:image"):
        load_renderer(tmp_path).opened([{"role": "user", "content": [{"type": "image", "image": image}]}])


def test_parts_of_text_alone_need_a_template_that_knows_parts(tmp_path: Any) -> None:
    write_processor(tmp_path, TEMPLATE.replace("{% elif m.content is string %}", "{% elif true %}"))
    said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": [{"type": "text", "text": "2"}]}]
    with pytest.raises(SourceError, match="takes text alone"):
        load_renderer(tmp_path).render_batch([said])


def test_a_model_that_reads_no_pictures_refuses_them(tmp_path: Any) -> None:
    messages = conversation(0)["messages"]
    save_tokenizer({bytes([value]): value for value in range(256)}, tmp_path)
    with pytest.raises(SourceError, match="no place for parts such as images"):
        load_renderer(tmp_path).render_batch([messages])
    write_processor(tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(SourceError, match="has no processor of images"):
        load_renderer(tmp_path).render_batch([messages])
