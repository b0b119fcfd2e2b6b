"""Pictures in rendered conversations: one call of the processor makes the token ids and the model's inputs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from rlkit.base.errors import RecipeError, explain
from rlkit.interfaces.picture import Picture
from rlkit.models.processor import Processor, process
from rlkit.recipe import Vision
from rlkit.types import MediaSegment, Rendered

if TYPE_CHECKING:
    from PIL.Image import Image


class PictureReader:
    """Makes token ids and model inputs of rendered texts with pictures.

    Args:
        processor: The model's.
        placeholders: Ids of the tokens that stand for features of pictures; the policy may not sample them.
        options: Bounds of the pictures' sizes.
    """

    def __init__(self, processor: Processor, placeholders: Collection[int], options: Vision) -> None:
        self.processor = processor
        self.placeholders = frozenset(placeholders)
        self.options = options
        self.markers = frozenset(processor.tokenizer.decode([token]) for token in placeholders) | frozenset(
            filter(None, (getattr(processor, name, None) for name in ("image_token", "boi_token")))
        )
        """Texts that stand for pictures in rendered texts, and may be nowhere else."""

    def read(self, text: str, pictures: Sequence[Picture]) -> Rendered:
        """Return the ids of a text, with its placeholders expanded, and its pictures' tensors.

        Raises:
            RecipeError: A picture cannot be read, or the processor refuses the text.
        """
        try:
            decoded = [picture.decode() for picture in pictures]
        except ValueError as error:
            raise RecipeError(f"{error}") from error
        images = [resized(image, self.options) for image in decoded]
        try:
            tokens, tensors = process(self.processor, text, images)
        except Exception as error:  # processors raise anything
            sizes = ", ".join(f"{image.width} x {image.height}" for image in images)
            raise RecipeError(
                f"{type(self.processor).__name__} refuses pictures of {sizes} pixels: {explain(error)}"
            ) from error
        expanded = [index for index, token in enumerate(tokens) if token in self.placeholders]
        if not expanded:
            raise RecipeError(
                "the chat template renders no placeholder for a picture; choose a model whose template does, or "
                "correct its chat_template.jinja"
            )
        read = tuple(
            picture if image is original else Picture.of(image)
            for picture, original, image in zip(pictures, decoded, images, strict=True)
        )
        return Rendered(tokens, MediaSegment(tensors, read, expanded[-1] + 1))


def resized(image: Image, options: Vision) -> Image:
    """Return an image within the bounds of its number of pixels, with the same ratio of its sides."""
    from PIL.Image import Resampling

    pixels = image.width * image.height
    bound = min(max(pixels, options.min_pixels or 1), options.max_pixels)
    if bound == pixels:
        return image
    scale = (bound / pixels) ** 0.5
    rounded = round if bound > pixels else int  # down, so that the bound holds
    width, height = (max(1, rounded(side * scale)) for side in image.size)
    return image.resize((width, height), Resampling.BICUBIC)


def tensor_bytes(rendering: Rendered) -> int:
    """Return the bytes of the tensors of a rendering's pictures."""
    tensors = {} if rendering.media is None else rendering.media.tensors
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
