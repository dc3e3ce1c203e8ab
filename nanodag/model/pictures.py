"""Images of a prompt as a vision-language model of transformers reads them: the processor's pixels, and positions.

Token ids spell the images' digests (nanodag.host.images). Source of positions by time, row and column: Qwen2-VL,
arXiv:2409.12191, whose class computes them.
"""

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanodag.errors import ConfigError
from nanodag.host.images import IMAGE_TOKENS, VISION_TYPES, digests_in, opened

KEPT_IMAGES = 16  # whose pixels are held: the samples of a prompt ask for the same ones


class Pictures:
    """Reader of images for one model. whole: its class of transformers. Raises ConfigError for a folder without a
    processor of images."""

    def __init__(self, folder: Path, whole: Any) -> None:
        from transformers import AutoImageProcessor

        self._whole = whole
        try:
            self._processor = AutoImageProcessor.from_pretrained(
                folder, backend="pil", local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, ImportError) as error:
            raise ConfigError(f"transformers cannot read the processor of images in {folder}: {error}") from error
        # By ids that spell an image. The class looks for its placeholder, which a model may say and a user may write.
        whole.model.get_placeholder_mask = _image_mask
        whole.get_input_embeddings().register_forward_pre_hook(_without_image_ids)
        self._pixels = lru_cache(maxsize=KEPT_IMAGES)(self._read)

    def _read(self, digest: str) -> tuple[Tensor, Tensor]:
        """Patches (P, C) float32 of an image, and its grid (1, 3) int64: time, rows, columns."""
        made = self._processor(images=[opened(digest)], return_tensors="pt")
        return made["pixel_values"], made["image_grid_thw"]

    def inputs_of(self, ids: Tensor) -> dict[str, Tensor]:
        """Inputs of the model beside (R, T) ids: pixels and grids of the images that they spell, and positions
        (3, R, T). Raises SourceError for an image that is not here, ConfigError for one of another size.

        Without an image nothing; but where gradients are computed, or weights are spread over ranks, a blank image
        that has no place: all ranks run the vision layers at the same point, and each has a gradient of them.
        """
        weight = self._whole.lm_head.weight
        is_image = ids >= IMAGE_TOKENS
        if not is_image.any():
            return self._blank(ids, weight) if torch.is_grad_enabled() or hasattr(weight, "ds_id") else {}
        patches, grids = [], []
        for begin, end, digest in (run for row in ids.cpu().numpy() for run in digests_in(row)):
            pixels, grid = self._pixels(digest)
            if end - begin != (expected := int(grid.prod()) // self._processor.merge_size**2):
                raise ConfigError(f"The image {digest} takes {expected} tokens, and {end - begin} stand for it.")
            patches.append(pixels)
            grids.append(grid)
        grid = torch.cat(grids).to(ids.device)
        positions, _ = self._whole.model.get_rope_index(ids, mm_token_type_ids=is_image.int(), image_grid_thw=grid)
        pixels = torch.cat(patches).to(ids.device, weight.dtype)
        return {"pixel_values": pixels, "image_grid_thw": grid, "position_ids": positions}

    def _blank(self, ids: Tensor, weight: Tensor) -> dict[str, Tensor]:
        vision, side = self._whole.config.vision_config, self._processor.merge_size
        width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        grid = torch.tensor([[1, side, side]], device=weight.device)
        positions = torch.arange(ids.shape[1], device=ids.device).expand(3, *ids.shape)
        pixels = weight.new_zeros(side * side, width)
        return {"pixel_values": pixels, "image_grid_thw": grid, "position_ids": positions}


def _image_mask(input_ids: Tensor, **features: Any) -> tuple[Tensor, Tensor]:
    """True where an image stands (R, T, 1), and where a video does: nowhere."""
    is_image = (input_ids >= IMAGE_TOKENS)[..., None]
    return is_image, torch.zeros_like(is_image)


def _without_image_ids(module: Any, arguments: tuple[Tensor]) -> tuple[Tensor]:
    """Arguments of an embedding with some word in the place of an image's ids, whose features come later."""
    (ids,) = arguments
    return (ids.masked_fill(ids >= IMAGE_TOKENS, 0),)


def takes_images(config: Any) -> bool:
    """True for a configuration of transformers whose model reads images here."""
    return config.model_type in VISION_TYPES
