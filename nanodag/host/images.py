"""Images on this machine by digest, and the token ids that stand for one in a prompt.

An image is a run of ids from IMAGE_TOKENS on, one for each place that a model gives it. The first four spell its
digest, 30 bits each, and the others repeat them. So prompts are equal where their images are, and all that carries
token ids carries images: packed rows, rollouts, requests, keys of a cache. A chat template puts a token around each.
"""

import base64
import binascii
import hashlib
import io
import json
import math
import os
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from nanodag.errors import BadRequest, SourceError
from nanodag.host.folders import cache_folder

IMAGE_TOKENS = 1 << 30
WORDS = 4
VISION_TYPES = ("qwen2_5_vl", "qwen3_vl")
PLACEHOLDER = "<|image_pad|>"
SETTINGS_FILES = ("preprocessor_config.json", "processor_config.json")  # the second is transformers 5's
FORMATS = ("PNG", "JPEG", "WEBP")
MAX_PIXELS = 1 << 24
MAX_BYTES = 32 << 20
MAX_ASPECT = 200
THUMBNAIL_PIXELS = 256  # of a page's pictures, along the longer side
IMAGES = "images"  # folder of them in a store, and beside rollouts
FOLDER = "NANODAG_IMAGES"  # the environment variable by which processes of a stage know where images are


def image_folder() -> Path:
    """Folder of images: what NANODAG_IMAGES says, as in a stage, else one of the user's cache."""
    return Path(os.environ.get(FOLDER) or cache_folder() / IMAGES)


def keep(content: bytes) -> str:
    """Write an image into the folder where it is new; returns its digest, 30 hexadecimal digits. Raises SourceError for
    what is no PNG, JPEG or WebP of at most 16 megapixels, or 200 times as long as it is wide."""
    width, height = _read(content).size
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise SourceError(f"An image has {width} x {height} pixels; one side is at most {MAX_ASPECT} times the other.")
    _write(image_folder(), digest := _digest_of(content), content)
    return digest


def keep_url(url: str, place: str) -> str:
    """`keep` of a `data:` URL's content, which is the only one that is read: none is fetched. place: for messages."""
    header, comma, content = url.partition(",")
    if not (header.startswith("data:image/") and header.endswith(";base64") and comma):
        raise SourceError(f"{place} has an image by the URL {url[:80]!r}; only data:image/...;base64, is read")
    try:
        return keep(base64.b64decode(content, validate=True))
    except binascii.Error as error:
        raise SourceError(f"{place} has an image that is no base64: {error}") from error


def keep_value(value: Any) -> str:
    """`keep` of an image in a row: bytes, a hub's {bytes, path}, OpenAI's {url} of a data: URL; or the digest of one
    that is kept. A path alone is not read: what lies there is in no stage's key."""
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("url") or value
    if isinstance(value, bytes):
        return keep(value)
    if not isinstance(value, str) or not (is_digest(value) or value.startswith("data:")):
        raise SourceError(f"An image in a row is bytes, {{bytes}} or a data: URL, and no path; found {value!r:.80}.")
    return value if is_digest(value) else keep_url(value, "A row")


def is_digest(text: str) -> bool:
    """True for a text that may be the digest of an image."""
    return re.fullmatch("[0-9a-f]{30}", text) is not None


def _digest_of(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=15).hexdigest()


def _write(folder: Path, digest: str, content: bytes) -> None:
    if (folder / digest).exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{uuid.uuid4().hex}"  # of this thread on this machine alone
    temporary.write_bytes(content)
    temporary.replace(folder / digest)


def _read(content: bytes) -> Any:
    """An image as PIL has it, in RGB, upright."""
    from PIL import Image, ImageOps

    if len(content) > MAX_BYTES:
        raise SourceError(f"An image has {len(content):,} bytes; at most {MAX_BYTES:,} are read.")
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise SourceError(f"An image has {width} x {height} pixels; at most {MAX_PIXELS:,} are read.")
            return ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        if isinstance(error, SourceError):
            raise
        raise SourceError(f"An image cannot be read as {', '.join(FORMATS)}: {error}") from error


def content_of(digest: str) -> bytes:
    """An image's file. Raises SourceError where the folder lacks it, or has another one under its name."""
    path = image_folder() / digest
    if not is_digest(digest) or not path.is_file():
        raise SourceError(
            f"The image {digest[:80]} is not in the folder that NANODAG_IMAGES names, `images` of the store. What read "
            "it kept it there: copy it, or remove `held_out` beside it, and build what read it with `--force`."
        )
    if _digest_of(content := path.read_bytes()) != digest:
        raise SourceError(f"{path} is not the image {digest}: remove it, and read its data again.")
    return content


def keep_beside(folder: Path, ids: Sequence[int]) -> None:
    """Copy the images that token ids spell into a folder, where they are new."""
    for _, _, digest in digests_in(ids):
        if not (folder / digest).exists():
            _write(folder, digest, content_of(digest))


def opened(digest: str) -> Any:
    """An image as PIL has it, in RGB, upright."""
    return _read(content_of(digest))


def picture_url(folder: Path, digest: Any) -> str:
    """A `data:` URL of a small PNG of an image in a folder, for a page; empty where it holds none of this digest."""
    if not isinstance(digest, str) or not is_digest(digest) or not (folder / digest).is_file():
        return ""
    try:
        small = _read((folder / digest).read_bytes())
    except SourceError:
        return ""
    small.thumbnail((THUMBNAIL_PIXELS, THUMBNAIL_PIXELS))
    small.save(buffer := io.BytesIO(), format="PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def digests_in(ids: Sequence[int] | np.ndarray) -> list[tuple[int, int, str]]:
    """Begin, end and digest of each image in token ids. Raises SourceError for a run that is too short to spell one."""
    array = np.asarray(ids, dtype=np.int64)
    is_image = (array >= IMAGE_TOKENS) & (array < 2 * IMAGE_TOKENS)
    edges = np.flatnonzero(np.diff(is_image, prepend=False, append=False)).reshape(-1, 2).tolist()
    runs = []
    for begin, end in edges:
        run = array[begin:end] - IMAGE_TOKENS
        if len(run) < WORDS or not np.array_equal(run, np.resize(run[:WORDS], len(run))):
            raise SourceError(f"Token ids {begin} to {end} spell no image: {array[begin:end].tolist()!s:.80}")
        number = sum(word << 30 * place for place, word in enumerate(run[:WORDS].tolist()))
        runs.append((begin, end, f"{number:030x}"))
    return runs


def words_in(ids: Sequence[int]) -> list[int]:
    """The ids that stand for no image."""
    return [token for token in ids if not IMAGE_TOKENS <= token < 2 * IMAGE_TOKENS]


def images_in(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Digests of the images in messages, in their order."""
    for message in messages:
        if not isinstance(content := message.get("content"), str | None):
            yield from (part["image"] for part in content if part.get("type") == "image")


class ImageLayout:
    """How many tokens a model gives an image: pixels are scaled to whole patches of `patch_size`, `merge_size` squared
    of which are one token. Source: Qwen2-VL, arXiv:2409.12191, and `smart_resize` of transformers."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        size = settings.get("size") or {}
        self._unit = int(settings["patch_size"]) * int(settings["merge_size"])
        self._least = int(settings.get("min_pixels") or size.get("shortest_edge") or 56 * 56)
        self._most = int(settings.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280)
        self._size_of = lru_cache(maxsize=4096)(lambda digest: opened(digest).size)

    def ids_of(self, digest: str) -> list[int]:
        """The run of token ids that stands for an image of the folder."""
        (width, height), number = self._size_of(digest), int(digest, 16)
        rows, columns = self._units(height, width)
        if rows * columns < WORDS:
            raise SourceError(f"The image {digest} of {width} x {height} pixels takes fewer than {WORDS} tokens.")
        words = [IMAGE_TOKENS + (number >> 30 * place) % IMAGE_TOKENS for place in range(WORDS)]
        return list(np.resize(words, rows * columns).tolist())

    def check(self, ids: Sequence[int], *, is_scored: bool) -> None:
        """Raise BadRequest where ids spell an image that is not here, or in another number of ids than it takes, or
        where a prompt with one is to be scored."""
        try:
            for begin, end, digest in digests_in(ids):
                if is_scored:
                    raise BadRequest("logprob_start_len 0: a prompt with images has no log-probabilities; set -1")
                if (expected := len(self.ids_of(digest))) != end - begin:
                    raise BadRequest(f"the image {digest} takes {expected} tokens, and {end - begin} stand for it")
        except SourceError as error:
            raise BadRequest(str(error)) from error

    def _units(self, height: int, width: int) -> tuple[int, int]:
        unit, pixels = self._unit, height * width
        rows, columns = (round(side / unit) for side in (height, width))
        if rows * columns * unit**2 > self._most:
            shrink = math.sqrt(pixels / self._most)
            return tuple(max(1, math.floor(side / shrink / unit)) for side in (height, width))  # type: ignore[return-value]
        if rows * columns * unit**2 < self._least:
            grow = math.sqrt(self._least / pixels)
            return tuple(math.ceil(side * grow / unit) for side in (height, width))  # type: ignore[return-value]
        return rows, columns


@lru_cache(maxsize=8)
def layout_of(folder: Path) -> ImageLayout | None:
    """The layout of a model's images, by its processor's file; None for a model that takes none, whatever is there."""
    path = folder / "config.json"
    if path.is_file() and json.loads(path.read_text(encoding="utf-8")).get("model_type") not in VISION_TYPES:
        return None
    for name in SETTINGS_FILES:
        if (path := folder / name).is_file():
            settings = json.loads(path.read_text(encoding="utf-8"))
            settings = settings.get("image_processor", settings)
            if "merge_size" in settings:
                return ImageLayout(settings)
    return None
