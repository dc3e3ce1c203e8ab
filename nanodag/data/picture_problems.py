"""Problems with pictures, made offline: `python:nanodag.data.picture_problems:count_shapes?size=800`.

Rows are made when they are taken and depend on the parameters and the index alone. Of two seeds two pictures are hardly
ever equal, so training and held-out problems take different ones.
"""

import io
import random
from collections.abc import Sequence
from typing import Any

GENERATORS = ("count_shapes",)  # what a pipeline may name of this module
COLOURS = {"red": (220, 40, 40), "green": (30, 160, 60), "blue": (40, 80, 220)}
CELLS, CELL, SIDE = 4, 16, 10  # cells a side, and pixels of one and of a square in it


class Counting(Sequence[dict[str, Any]]):
    """See count_shapes."""

    def __init__(self, *, size: int, seed: int, most: int) -> None:
        self._size, self._seed, self._most = size, seed, most

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Any]:  # type: ignore[override] # no slices
        from PIL import Image, ImageDraw

        if not 0 <= index < self._size:
            raise IndexError(index)
        stream = random.Random(f"count_shapes:{self._seed}:{index}")
        names = stream.sample(list(COLOURS), 2)
        count, others = stream.randint(1, self._most), stream.randint(0, self._most)
        image = Image.new("RGB", (CELLS * CELL, CELLS * CELL), "white")
        draw = ImageDraw.Draw(image)
        for number, cell in enumerate(stream.sample(range(CELLS**2), count + others)):
            left, top = (CELL * place + stream.randrange(CELL - SIDE) for place in divmod(cell, CELLS))
            draw.rectangle((left, top, left + SIDE, top + SIDE), COLOURS[names[number >= count]])
        image.save(content := io.BytesIO(), format="PNG")
        question = f"How many {names[0]} squares?"
        return {"question": question, "answer": str(count), "images": [content.getvalue()]}


def count_shapes(*, size: int = 1000, seed: int = 0, most: int = 4) -> Counting:
    """Pictures of 64 x 64 pixels: 1 to `most` squares of the colour that is asked for, and 0 to `most` of another."""
    if not 1 <= most <= CELLS**2 // 2:
        raise ValueError(f"most is {most}; it is 1 to {CELLS**2 // 2}")
    return Counting(size=size, seed=seed, most=most)
