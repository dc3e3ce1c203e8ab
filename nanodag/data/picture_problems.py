"""Problems with pictures, made offline: `python:nanodag.data.picture_problems:count_shapes?size=800`.

Rows are made when they are taken and depend on the parameters and the index alone. Of two seeds, or splits, two
pictures are hardly ever equal.
"""

import io
import random

from nanodag.data.lists import Split, rows_of
from nanodag.data.sources import LazyRows, Row

GENERATORS = ("count_shapes",)  # what a pipeline may name of this module
COLOURS = {"red": (220, 40, 40), "green": (30, 160, 60), "blue": (40, 80, 220)}
CELLS, CELL, SIDE = 4, 16, 10  # cells a side, and pixels of one and of a square in it


def count_shapes(*, size: int = 1000, seed: int = 0, split: Split = "train", most: int = 4) -> LazyRows:
    """Pictures of 64 x 64 pixels: 1 to `most` squares of the colour that is asked for, and 0 to `most` of another."""
    if not 1 <= most <= CELLS**2 // 2:
        raise ValueError(f"most is {most}; it is 1 to {CELLS**2 // 2}")
    drawn = "count_shapes" if split == "train" else "count_shapes:test"

    def row(index: int) -> Row:
        from PIL import Image, ImageDraw

        stream = random.Random(f"{drawn}:{seed}:{index}")
        names = stream.sample(list(COLOURS), 2)
        count, others = stream.randint(1, most), stream.randint(0, most)
        image = Image.new("RGB", (CELLS * CELL, CELLS * CELL), "white")
        draw = ImageDraw.Draw(image)
        for number, cell in enumerate(stream.sample(range(CELLS**2), count + others)):
            left, top = (CELL * place + stream.randrange(CELL - SIDE) for place in divmod(cell, CELLS))
            draw.rectangle((left, top, left + SIDE, top + SIDE), COLOURS[names[number >= count]])
        image.save(content := io.BytesIO(), format="PNG")
        return {"question": f"How many {names[0]} squares?", "answer": str(count), "images": [content.getvalue()]}

    return rows_of(size, split, row)
