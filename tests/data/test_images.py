"""Images by digest, the ids that spell them, and rows that hold them."""

import base64
import io
import json
from typing import Any

import numpy as np
import pytest
from PIL import Image

from nanodag.data.adapters import open_adapter
from nanodag.data.config import SourceConfig
from nanodag.data.picture_problems import COLOURS, count_shapes
from nanodag.data.question_form import asking
from nanodag.data.records import held_out_score, message_text
from nanodag.errors import SourceError
from nanodag.host.images import (
    FOLDER,
    IMAGE_TOKENS,
    ImageLayout,
    content_of,
    digests_in,
    image_folder,
    keep,
    keep_beside,
    keep_url,
    keep_value,
    layout_of,
    opened,
    picture_url,
    words_in,
)
from nanodag.train.packing import conversation_piece
from tests.model.vision_models import write_processor

LAYOUT = ImageLayout({"patch_size": 8, "merge_size": 2, "size": {"shortest_edge": 1024, "longest_edge": 128 * 128}})


@pytest.fixture(autouse=True)
def folder(tmp_path: Any, monkeypatch: Any) -> Any:
    monkeypatch.setenv(FOLDER, str(tmp_path / "images"))
    return tmp_path


def picture(width: int = 64, height: int = 48, form: str = "PNG", colour: str = "red") -> bytes:
    Image.new("RGB", (width, height), colour).save(content := io.BytesIO(), format=form)
    return content.getvalue()


def test_ids_spell_an_image_of_any_number_of_tokens_and_are_read_back() -> None:
    one, other = keep(picture()), keep(picture(colour="blue"))
    ids = [5, *LAYOUT.ids_of(one), 6, 7, *LAYOUT.ids_of(other), *[8]]
    assert digests_in(ids) == [(1, 13, one), (15, 27, other)]
    assert words_in(ids) == [5, 6, 7, 8]
    assert content_of(one) == picture()


@pytest.mark.parametrize(("width", "height"), [(64, 48), (33, 100), (7, 7), (400, 300), (1000, 60), (16, 64), (23, 25)])
def test_an_image_takes_as_many_tokens_as_transformers_processor_makes(width: int, height: int) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    sizes = {"shortest_edge": 1024, "longest_edge": 128 * 128}
    processor = Qwen2VLImageProcessorPil(patch_size=8, merge_size=2, size=sizes)
    grid = processor(images=[Image.new("RGB", (width, height))], return_tensors="np")["image_grid_thw"]
    assert len(LAYOUT.ids_of(keep(picture(width, height)))) == int(np.prod(grid)) // 4


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"GIF89a", "cannot be read"),
        (picture()[:60], "cannot be read"),
        (picture(5000, 5000), "5000 x 5000 pixels"),
        (b"\x89PNG" + bytes(33 << 20), "bytes; at most"),
    ],
)
def test_a_file_that_is_no_image_or_a_huge_one_is_refused_and_not_kept(content: bytes, said: str) -> None:
    with pytest.raises(SourceError, match=said):
        keep(content)
    assert not image_folder().exists()


@pytest.mark.parametrize("digest", ["../secret", "a" * 31, "A" * 30, ""])
def test_no_file_is_read_by_what_is_no_digest(folder: Any, digest: str) -> None:
    (folder / "secret").write_bytes(picture())
    image_folder().mkdir()
    with pytest.raises(SourceError, match="is not in"):
        content_of(digest)
    with pytest.raises(SourceError):
        LAYOUT.ids_of(digest)
    assert picture_url(image_folder(), digest) == ""


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1/a.png", "file:///etc/passwd", "data:text/html;base64,AAAA", "/etc/x"]
)
def test_an_image_by_a_url_is_read_from_the_url_alone(url: str) -> None:
    with pytest.raises(SourceError, match="only data:image"):
        keep_url(url, "messages.0")


def test_an_image_is_one_image_however_a_row_holds_it(folder: Any) -> None:
    (folder / "a.png").write_bytes(picture())
    url = f"data:image/png;base64,{base64.b64encode(picture()).decode()}"
    forms = [picture(), {"bytes": picture(), "path": None}, url, {"url": url}, keep(picture())]
    assert len({keep_value(form) for form in forms}) == 1
    path = str(folder / "a.png")
    for form in (path, {"bytes": None, "path": path}, {"bytes": None, "path": "hf://datasets/a/b/x.png"}, 7):
        with pytest.raises(SourceError, match="and no path"):
            keep_value(form)


def conversation_of(row: dict[str, Any]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = open_adapter("messages", "file:x", "conversation", {})(0, row)["messages"]
    return messages


def test_images_of_a_row_stand_where_its_messages_have_places_for_them() -> None:
    parts = [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "image", "image": picture(colour="blue")}]
    turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": "two"}]
    made = conversation_of({"messages": turns, "images": [{"bytes": picture(), "path": "x"}]})
    blue, red = keep(picture(colour="blue")), keep(picture())
    image = {"type": "image"}
    assert made[0]["content"] == [image | {"image": red}, {"type": "text", "text": "and"}, image | {"image": blue}]
    for images, said in (([], "places for more images"), ([picture()] * 2, "its images, 1, have no place")):
        with pytest.raises(SourceError, match=said):
            conversation_of({"messages": turns, "images": images})
    for adapter, kind, row in (
        ("messages", "conversation", {"messages": [{"role": "user", "content": "<image>?"}], "images": [picture()]}),
        ("prompt", "prompt", {"prompt": "?", "answer": "1", "images": [picture()]}),
    ):
        with pytest.raises(SourceError, match="its images, 1, have no place"):
            open_adapter(adapter, "file:x", kind, {})(0, row)


def test_parts_of_tools_stay_what_they_are_beside_an_image() -> None:
    parts = [
        {"type": "tool_call", "text": "1+1"},
        {"type": "tool_result", "text": "2"},
        {"type": "text", "text": "two"},
    ]
    asked = [{"type": "image", "image": picture()}, {"type": "text", "text": "1 + 1?"}]
    made = conversation_of({"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": parts}]})
    assert made[1]["content"] == parts


def test_a_document_of_a_conversation_with_an_image_is_refused() -> None:
    with pytest.raises(SourceError, match="text alone is read"):
        open_adapter("problem", "file:x", "document", {})(0, count_shapes()[0])


def test_counting_problems_show_as_many_squares_as_they_say() -> None:
    for row in (count_shapes(seed=3)[index] for index in range(50)):
        image = np.array(Image.open(io.BytesIO(row["images"][0])))
        _, _, colour, _ = row["question"].split()
        assert (image == COLOURS[colour]).all(-1).sum() == 11 * 11 * int(row["answer"])


def test_images_are_kept_beside_rollouts_once(folder: Any) -> None:
    ids = LAYOUT.ids_of(keep(picture()))
    for _ in range(2):
        keep_beside(folder / "records", [1, *ids, 2])
    (kept,) = (folder / "records").iterdir()
    assert kept.read_bytes() == picture()
    assert picture_url(folder / "records", kept.name).startswith("data:image/png;base64,")
    with pytest.raises(SourceError, match="spell no image"):
        digests_in([IMAGE_TOKENS] * 3)


def test_an_image_that_was_changed_where_it_is_kept_is_refused() -> None:
    digest = keep(picture())
    (image_folder() / digest).write_bytes(picture(colour="blue"))
    with pytest.raises(SourceError, match="is not the image"):
        content_of(digest)


def test_an_image_is_read_upright_and_a_strip_is_refused() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    Image.new("RGB", (64, 32)).save(content := io.BytesIO(), format="JPEG", exif=exif)
    assert opened(keep(content.getvalue())).size == (32, 64)
    with pytest.raises(SourceError, match="at most 200 times"):
        keep(picture(1, 500))


def test_a_processors_own_limits_of_pixels_hold_before_those_of_its_size() -> None:
    small = ImageLayout({"patch_size": 8, "merge_size": 2, "size": {"longest_edge": 1 << 20}, "max_pixels": 64 * 64})
    assert len(small.ids_of(keep(picture(640, 640)))) == 16


def test_a_conversation_that_is_too_long_is_cut_before_an_image_not_in_it() -> None:
    ids = [5, 6, *LAYOUT.ids_of(keep(picture())), 7, 8]
    piece = conversation_piece(np.array(ids, np.int32), np.ones(len(ids), bool))
    for length in range(1, len(ids)):
        cut = piece.shortened(length)
        assert cut.num_positions == (2 if 2 < length < 14 else length), length
        digests_in(cut.input_ids)


def test_what_reads_text_alone_refuses_an_image_and_an_instruction_is_put_around_the_text() -> None:
    record = open_adapter("problem", "file:x", "prompt", {})(0, count_shapes()[0])
    with pytest.raises(SourceError, match="text alone is read"):
        message_text(record["messages"][0])
    assert held_out_score(record, "prompt") != held_out_score(
        open_adapter("problem", "file:x", "prompt", {})(
            0, {**count_shapes()[0], "images": count_shapes()[1]["images"]}
        ),
        "prompt",
    )
    asked = asking(SourceConfig(url="file:x", instruction="{question} Say a number."), "prompt")(record)
    image, text = asked["messages"][0]["content"]
    assert image == record["messages"][0]["content"][0] and text["text"].endswith("squares? Say a number.")


def test_parts_of_text_alone_are_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert conversation_of({"messages": [{"role": "user", "content": parts}], "image": "unread"})[0]["content"] == "ab"


def test_a_processor_beside_a_model_of_text_makes_no_layout(folder: Any) -> None:
    write_processor(folder)
    for kind, reads in (("qwen2", False), ("qwen2_5_vl", True)):
        place = folder / kind
        place.mkdir()
        (place / "config.json").write_text(json.dumps({"model_type": kind}))
        (place / "preprocessor_config.json").write_bytes((folder / "preprocessor_config.json").read_bytes())
        assert (layout_of(place) is not None) == reads
