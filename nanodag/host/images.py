"""Images on this machine by digest, and the token ids that stand for one in a prompt.

An image is a run of ids from IMAGE_TOKENS on, one for each place that a model gives it. The first four spell its
digest, 30 bits each, and the others repeat them. So prompts are equal where their images are, and all that carries
token ids carries images: packed rows, rollouts, requests, keys of a cache.
"""

import base64
import hashlib
import io
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from nanodag.errors import SourceError
from nanodag.host.folders import cache_folder

IMAGE_TOKENS = 1 << 30
WORDS = 4
PLACEHOLDER = "<|image_pad|>"
SETTINGS_FILES = ("preprocessor_config.json", "processor_config.json")  # the second is transformers 5's
FORMATS = ("PNG", "JPEG", "WEBP")
MAX_PIXELS = 1 << 24
MAX_BYTES = 32 << 20
THUMBNAIL = 256  # pixels of a page's pictures, along the longer side
IMAGES = "images"  # folder of them in a store, and beside rollouts
_DIGEST = re.compile("[0-9a-f]{30}")
FOLDER = "NANODAG_IMAGES"  # the environment variable by which processes of a stage know where images are


def image_folder() -> Path:
    """Folder of images: what NANODAG_IMAGES says, as in a stage, else one of the user's cache."""
    return Path(os.environ.get(FOLDER) or cache_folder() / IMAGES)


def keep(content: bytes) -> str:
    """Write an image into the folder where it is new; returns its digest, 30 hexadecimal digits. Raises SourceError for
    what is no PNG, JPEG or WebP of at most 16 megapixels."""
    _size_of(content)
    digest = hashlib.blake2b(content, digest_size=15).hexdigest()
    path = image_folder() / digest
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{digest}.{os.getpid()}.tmp")
        temporary.write_bytes(content)
        temporary.replace(path)
    return digest


def keep_url(url: str, place: str) -> str:
    """`keep` of a `data:` URL's content, which is the only one that is read: none is fetched. place: for messages."""
    header, comma, content = url.partition(",")
    if not (header.startswith("data:image/") and header.endswith(";base64") and comma):
        raise SourceError(f"{place} has an image by the URL {url[:80]!r}; only data:image/...;base64, is read")
    try:
        return keep(base64.b64decode(content, validate=True))
    except ValueError as error:
        raise SourceError(f"{place} has an image that is no base64: {error}") from error


def keep_value(value: Any) -> str:
    """`keep` of an image in a row: bytes, a hub's {bytes, path}, OpenAI's {url} of a data: URL, a file's path; or the
    digest of one that is kept."""
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("url") or value.get("path")
    if isinstance(value, bytes):
        return keep(value)
    if not isinstance(value, str):
        raise SourceError(f"An image is bytes, {{bytes, path}}, a data: URL or a path; found {value!r:.80}.")
    if _DIGEST.fullmatch(value):
        return value
    if value.startswith("data:"):
        return keep_url(value, "A row")
    path = Path(value).expanduser()
    if not path.is_file():
        raise SourceError(f"There is no image {path}, which a row names.")
    return keep(path.read_bytes())


def _size_of(content: bytes) -> tuple[int, int]:
    """Width and height in pixels."""
    from PIL import Image

    if len(content) > MAX_BYTES:
        raise SourceError(f"An image has {len(content):,} bytes; at most {MAX_BYTES:,} are read.")
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise SourceError(f"An image has {width} x {height} pixels; at most {MAX_PIXELS:,} are read.")
            image.load()
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise SourceError(f"An image cannot be read as {', '.join(FORMATS)}: {error}") from error
    return width, height


def content_of(digest: str) -> bytes:
    """An image's file. Raises SourceError where the folder lacks it."""
    path = image_folder() / digest
    if not _DIGEST.fullmatch(digest) or not path.is_file():
        raise SourceError(
            f"The image {digest[:80]} is not in {image_folder()}. What read it kept it there; read its data again with "
            "`--force`, or copy the folder."
        )
    return path.read_bytes()


def keep_beside(folder: Path, ids: Sequence[int]) -> None:
    """Copy the images that token ids spell into a folder, where they are new."""
    for _, _, digest in digests_in(ids):
        if not (folder / digest).exists():
            folder.mkdir(parents=True, exist_ok=True)
            temporary = folder / f".{digest}"
            temporary.write_bytes(content_of(digest))
            temporary.replace(folder / digest)


def opened(digest: str) -> Any:
    """An image as PIL has it, in RGB."""
    from PIL import Image

    return Image.open(io.BytesIO(content_of(digest)), formats=FORMATS).convert("RGB")


def picture_url(folder: Path, digest: str) -> str:
    """A `data:` URL of a small PNG of an image in a folder, for a page; empty where it holds none of this digest."""
    from PIL import Image

    try:
        if not _DIGEST.fullmatch(digest):
            return ""
        with Image.open(folder / digest, formats=FORMATS) as image:
            small = image.convert("RGB")
            small.thumbnail((THUMBNAIL, THUMBNAIL))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        return ""
    small.save(buffer := io.BytesIO(), format="PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def digests_in(ids: Sequence[int] | np.ndarray) -> list[tuple[int, int, str]]:
    """Begin, end and digest of each image in token ids. Raises SourceError for a run that is too short to spell one."""
    array = np.asarray(ids, dtype=np.int64)
    edges = np.flatnonzero(np.diff(array >= IMAGE_TOKENS, prepend=False, append=False)).reshape(-1, 2).tolist()
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
    return [token for token in ids if token < IMAGE_TOKENS]


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
        self._least = int(size.get("shortest_edge") or settings.get("min_pixels") or 56 * 56)
        self._most = int(size.get("longest_edge") or settings.get("max_pixels") or 28 * 28 * 1280)

    def ids_of(self, digest: str) -> list[int]:
        """The run of token ids that stands for an image of the folder."""
        number, (width, height) = int(digest, 16), _size_of(content_of(digest))
        rows, columns = self._units(height, width)
        if rows * columns < WORDS:
            raise SourceError(f"The image {digest} of {width} x {height} pixels takes fewer than {WORDS} tokens.")
        words = [IMAGE_TOKENS + (number >> 30 * place) % IMAGE_TOKENS for place in range(WORDS)]
        return list(np.resize(words, rows * columns).tolist())

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
    """The layout of a model's images, by its processor's file; None for a model that takes none."""
    for name in SETTINGS_FILES:
        if (path := folder / name).is_file():
            settings = json.loads(path.read_text(encoding="utf-8"))
            settings = settings.get("image_processor", settings)
            if "merge_size" in settings:
                return ImageLayout(settings)
    return None
