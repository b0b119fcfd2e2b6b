"""The processor of a vision-language model: token ids and image tensors of a text with images."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlkit.base.errors import RecipeError, UnavailableError, shorten, show, unreachable

if TYPE_CHECKING:
    from PIL.Image import Image

    from rlkit.interfaces.model import ModelConfig, Tokenizer

PER_TOKEN = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
"""What a processor returns for each token; it follows from the token ids."""

REPLACED = ("image_processor", "tokenizer", "video_processor")
"""The components of the processors that rlkit loads without their video processor."""


class Processor(Protocol):
    """A processor of transformers: a tokenizer and an image processor."""

    tokenizer: Tokenizer
    image_processor: object
    chat_template: str | None

    def __call__(self, *, text: Sequence[str], images: Sequence[Image], **options: object) -> Mapping[str, Tensor]:
        """Return the model's inputs for texts, with the placeholder of each image repeated once per feature."""


def load_processor(location: str, trust_remote_code: bool) -> Processor:
    """Load a model's processor without its video processor, which needs torchvision; a video is a list of images here.

    Args:
        location: Folder of the model, or its name on the hub.
        trust_remote_code: Whether to run the code of a processor that comes with its model.

    Raises:
        RecipeError: The processor cannot be loaded, or has no image processor.
        UnavailableError: The processor is not on this machine, and the hub cannot be reached.
    """
    try:
        with _quiet("transformers.utils.import_utils"):
            processor = _load(location, trust_remote_code)
    except Exception as error:  # transformers may raise anything if a file is missing, malformed or unsupported
        first_line = shorten(str(error).strip().split("\n")[0], 300)
        problem = f"model.path is {show(location)}, whose processor of images cannot be loaded: {first_line}"
        if unreachable(error):
            raise UnavailableError(
                f"{problem} Where there is a network, download it with `hf download {show(location)[1:-1]} --local-dir "
                "FOLDER`, and set model.path to that folder"
            ) from error
        raise RecipeError(
            f"{problem} Prompts with images need a vision-language model with its preprocessor_config.json; choose "
            "another model, or add the files of its processor to its folder"
        ) from error
    if getattr(processor, "image_processor", None) is None:
        raise RecipeError(
            f"model.path is {show(location)}, which has no image processor, but prompts have images; choose a "
            "vision-language model, or remove the images"
        )
    return processor


def process(processor: Processor, text: str, images: Sequence[Image]) -> tuple[list[int], dict[str, Tensor]]:
    """Return the token ids of a rendered text, with its placeholders expanded, and the model's inputs for its images.

    Args:
        processor: Of the model.
        text: With one placeholder, as the chat template renders it, for each image.
        images: In the order of their placeholders.

    Raises:
        ValueError: The text has more or fewer placeholders than images.
    """
    if not images:
        return processor.tokenizer.encode(text, add_special_tokens=False, verbose=False), {}
    options = {"add_special_tokens": False, "padding": False, "truncation": False, "return_tensors": "pt"}
    inputs = processor(text=[text], images=list(images), **options)
    media = {name: value for name, value in inputs.items() if name not in PER_TOKEN}
    return inputs["input_ids"][0].tolist(), media


def join_media(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Join the inputs of several `process` calls into those of one forward pass over all of their tokens.

    Tensors are concatenated along the dimension of their images, and padded with zeros to the largest size in the other
    dimensions, as processors pad images of unequal size.

    Args:
        parts: In the order of the tokens, row by row; those of texts without images are empty.

    Raises:
        ValueError: Two parts with images have different inputs, so they are of different processors.
    """
    filled = [part for part in parts if part]
    if not filled:
        return {}
    names = filled[0].keys()
    for part in filled:
        if part.keys() != names:
            raise ValueError(f"a part has the inputs {sorted(part)}, expected those of the first: {sorted(names)}")
    # Idefics and SmolVLM have pixel values [texts, images, C, H, W], and their models flatten the first two dimensions,
    # so the images of all rows can be those of one text; LLaVA-NeXT has [images, tiles, C, H, W], and `image_sizes`
    image_dim = 1 if filled[0]["pixel_values"].ndim == 5 and "image_sizes" not in filled[0] else 0
    return {name: _concatenate([part[name] for part in filled], image_dim) for name in names}


def image_token_ids(config: ModelConfig, processor: Processor) -> frozenset[int]:
    """Return the ids of the placeholders that stand for features of images or videos.

    The processor's own id may be another: Gemma 3 expands the token that starts an image.
    """
    names = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")
    ids = frozenset(getattr(config, name) for name in names if isinstance(getattr(config, name, None), int))
    if ids:
        return ids
    own_id = getattr(processor, "image_token_id", None)
    return frozenset() if own_id is None else frozenset([own_id])


def _concatenate(tensors: Sequence[Tensor], dim: int) -> Tensor:
    sizes = [max(tensor.shape[axis] for tensor in tensors) for axis in range(tensors[0].ndim)]
    padded = []
    for tensor in tensors:
        missing = [0 if axis == dim else sizes[axis] - tensor.shape[axis] for axis in range(tensor.ndim)]
        widths = [width for size in reversed(missing) for width in (0, size)]
        padded.append(pad(tensor, widths) if any(missing) else tensor)
    return torch.cat(padded, dim)


def _load(location: str, trust_remote_code: bool) -> Processor:
    from transformers import AutoProcessor, AutoTokenizer
    from transformers.models.auto.image_processing_auto import AutoImageProcessor  # 5.12 exports it with torchvision

    options = {"trust_remote_code": trust_remote_code}
    original = _processor_class(location, trust_remote_code)
    if original is None:
        processor: Processor = AutoProcessor.from_pretrained(location, **options)
        return processor
    values, _ = original.get_processor_dict(location)
    values.pop("video_processor", None)
    components = {
        "image_processor": AutoImageProcessor.from_pretrained(location, backend="pil", **options),
        "tokenizer": AutoTokenizer.from_pretrained(location, **options),
        "video_processor": None,
    }
    arguments = [components[name] for name in original.get_attributes()]
    with _without_num2words(original.__module__):
        processor = _without_videos(original).from_args_and_dict(arguments, values)
    return processor  # noqa: RET504


def _processor_class(location: str, trust_remote_code: bool) -> Any:
    """Return the processor's class if it also has a video processor, else None, since `AutoProcessor` loads it."""
    from transformers import AutoConfig, ProcessorMixin
    from transformers.models.auto.image_processing_auto import get_image_processor_config
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES, processor_class_from_name

    files: list[Mapping[str, Any]] = [get_image_processor_config(location)]
    with suppress(OSError):  # older models have no processor_config.json
        files.insert(0, ProcessorMixin.get_processor_dict(location)[0])
    own_code = any("AutoProcessor" in (file.get("auto_map") or {}) for file in files)
    if own_code and trust_remote_code:
        return None
    names = [file["processor_class"] for file in files if file.get("processor_class")]
    if not names:
        config = AutoConfig.from_pretrained(location, trust_remote_code=trust_remote_code)
        names = [PROCESSOR_MAPPING_NAMES.get(config.model_type) or ""]
    processor_class = processor_class_from_name(names[0])
    components = [] if processor_class is None else processor_class.get_attributes()
    return processor_class if "video_processor" in components and set(components) <= set(REPLACED) else None


def _without_videos(original: Any) -> Any:
    """Return a processor's class whose instances have no video processor; it has the name of the original."""

    names = [name for name in original.get_attributes() if name != "video_processor"]
    members = {"get_attributes": staticmethod(lambda: names), "__module__": original.__module__}
    return type(original.__name__, (original,), members)


@contextmanager
def _without_num2words(module_name: str) -> Iterator[None]:
    """Replace the package num2words by `str` if it is missing: SmolVLM's processor requires it, for videos alone."""
    module: Any = sys.modules[module_name]
    if getattr(module, "num2words", str) is not None:
        yield
        return
    module.num2words = str
    try:
        yield
    finally:
        module.num2words = None


@contextmanager
def _quiet(logger_name: str) -> Iterator[None]:
    """Hide what a logger says below errors, such as that the image processor uses PIL and not torchvision."""
    logger = logging.getLogger(logger_name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
