"""Requests with pictures as SGLang reads them."""

from __future__ import annotations

import asyncio
import base64
import io
from typing import Any

import pytest
import torch
from PIL import Image
from rlkit_servers.http import Fault
from rlkit_servers.sglang.api import SGLangApi
from rlkit_servers.sglang.pictures import RequestPictures

from rlkit.base.errors import EngineError
from rlkit.interfaces.picture import Picture
from rlkit.types import JsonObject, Media, MediaSegment, Request, SampleKey, Sampling

PAD, START, END = 9, 7, 8
TOKENS = (1, START, PAD, PAD, PAD, PAD, END, 2, START, PAD, END, PAD - 4, PAD - 4)


class Config:
    """What is read of a model's configuration."""

    image_token_id = PAD


class Server:
    """Answers with one token, after a number of tokens that it has read."""

    url = "http://server"

    def __init__(self, prompt_tokens: int, version: str = "0.5.21") -> None:
        self.prompt_tokens, self.version = prompt_tokens, version
        self.body: JsonObject = {}

    async def get(self, path: str, deadline: float) -> JsonObject:
        return {"version": self.version, "tp_size": 1}

    async def post(self, path: str, body: JsonObject, deadline: float) -> JsonObject:
        self.body = body
        about = {"prompt_tokens": self.prompt_tokens, "finish_reason": {"type": "length"}, "weight_version": "run-0"}
        return {"output_ids": [3], "meta_info": {**about, "output_token_logprobs": [[-0.5, 3, None]]}}


def two_pictures() -> Media:
    """A JPEG with a transposed orientation, and a PNG with transparent pixels."""
    turned, clear = io.BytesIO(), io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (30, 20), "red").save(turned, "JPEG", exif=exif)
    Image.new("RGBA", (4, 4), (0, 0, 255, 0)).save(clear, "PNG")
    pictures = tuple(Picture(file.getvalue()) for file in (turned, clear))
    return Media([MediaSegment({"pixel_values": torch.zeros(1)}, pictures, 10)])


def request(tokens: tuple[int, ...] = TOKENS) -> Request:
    return Request(tokens, Sampling(max_tokens=1), SampleKey(0, 1, "p", 0), "s", media=two_pictures())


def generate(server: Server, asked: Request) -> Any:
    return asyncio.run(SGLangApi(server, RequestPictures(Config())).generate(asked))  # type: ignore[arg-type]


def test_one_placeholder_stands_for_each_picture() -> None:
    server = Server(len(TOKENS))
    assert generate(server, request()).tokens == [3]
    assert server.body["input_ids"] == [1, START, PAD, END, 2, START, PAD, END, PAD - 4, PAD - 4]
    files = [uri.removeprefix("data:image/png;base64,") for uri in server.body["image_data"]]
    turned, clear = (Image.open(io.BytesIO(base64.b64decode(file))) for file in files)
    assert (turned.mode, turned.size) == ("RGB", (20, 30))
    assert (clear.mode, clear.getpixel((0, 0))) == ("RGB", (255, 255, 255))


def test_a_text_is_sent_as_before() -> None:
    server = Server(0)
    generate(server, Request((1, 2), Sampling(max_tokens=1), SampleKey(0, 1, "p", 0), "s"))
    assert server.body["input_ids"] == [1, 2]
    assert "image_data" not in server.body


def test_pictures_that_cannot_be_told_apart_are_refused() -> None:
    with pytest.raises(Fault, match="renders 1 separate pictures of 2"):
        generate(Server(4), request((1, PAD, PAD, PAD)))


def test_another_number_of_tokens_is_an_error() -> None:
    with pytest.raises(Fault, match="as 12 tokens, expected 13: its processor of images is not the trainer's"):
        generate(Server(12), request())


def test_a_release_that_prepares_pictures_otherwise_is_refused() -> None:
    with pytest.raises(EngineError, match=r"runs SGLang 0\.5\.18; pictures need 0\.5\.21 or later"):
        asyncio.run(SGLangApi(Server(0, "0.5.18"), RequestPictures(Config())).inspect(False))  # type: ignore[arg-type]
    asyncio.run(SGLangApi(Server(0, "0.5.18")).inspect(False))  # type: ignore[arg-type]
