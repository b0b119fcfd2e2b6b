"""Pictures in requests to SGLang: files beside token ids in which one placeholder stands for each picture."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rlkit.interfaces.picture import Picture
from rlkit.types import JsonObject
from rlkit_servers.http import Fault

if TYPE_CHECKING:
    from rlkit.types import Media

MODEL_TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Models whose log-probs of prompts with pictures were seen to equal those of transformers."""

FIRST_RELEASE = (0, 5, 21)
"""The first release with `ARGUMENTS`."""

ARGUMENTS = ("--image-processor-backend", "pil", "--mm-preprocess-cache-size-mb", "64")
"""Arguments of a server; its processor is the trainer's."""

ENVIRONMENT = {"SGLANG_VLM_CACHE_SIZE_MB": "0"}
"""Environment of a server; features of pictures that it keeps would outlive the weights that computed them."""

KEPT_FILES = 64
"""Encoded pictures that are kept, which all samples of a prompt share."""


class RequestPictures:
    """Writes a conversation with pictures as SGLang reads it.

    SGLang expands placeholders itself: expanded ids would be decoded, and encoded again as others.

    Args:
        config: The policy's configuration, of one of `MODEL_TYPES`.
    """

    def __init__(self, config: Any) -> None:
        self.placeholder: int = config.image_token_id

    async def fields(self, tokens: Sequence[int], media: Media) -> JsonObject:
        """Return the fields of a request.

        Raises:
            Fault: Placeholders of two pictures follow each other, so that one cannot be told from the other.
        """
        collapsed: list[int] = []
        for token, repeated in groupby(tokens):
            collapsed += [token] if token == self.placeholder else list(repeated)
        count = collapsed.count(self.placeholder)
        if count != len(media):
            raise Fault(f"the chat template renders {count} separate pictures of {len(media)}", 400)
        files = await asyncio.gather(*(asyncio.to_thread(_data_uri, picture) for picture in media.pictures))
        return {"input_ids": collapsed, "image_data": files}


@lru_cache(KEPT_FILES)
def _data_uri(picture: Picture) -> str:
    """Return a picture as a PNG in RGB, from which every decoder gets the trainer's pixels."""
    return Picture.of(picture.decode()).data_uri
