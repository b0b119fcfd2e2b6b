"""Pictures in messages: encoded files, read as data within limits of bytes and pixels."""

from __future__ import annotations

import base64
import hashlib
import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

from rlkit.base.errors import explain, shorten, show

if TYPE_CHECKING:
    from PIL.Image import Image

T = TypeVar("T")

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
"""Formats of pictures, as Pillow names them: of these alone a decoder is called."""

MAX_BYTES = 1 << 26
"""Bytes of the largest encoded picture."""

MAX_PIXELS = 1 << 26
"""Pixels of the largest picture. A small file may hold more than memory has: a decompression bomb."""

MAX_RATIO = 200
"""The largest ratio of the sides, which processors of vision-language models accept."""


@dataclass(frozen=True, repr=False)
class Picture:
    """An encoded picture of a message: the part `{"type": "image", "image": Picture(...)}`.

    Args:
        data: The file, in one of `FORMATS`.
    """

    data: bytes

    @classmethod
    def of(cls, value: object) -> Picture:
        """Return the picture in bytes, in an image of Pillow, or in a data URI.

        Raises:
            ValueError: It is none of these, is empty or too large.
        """
        if isinstance(value, Picture):
            return value
        if isinstance(value, bytes | bytearray | memoryview):
            return cls(bytes(value))
        if type(value).__module__.partition(".")[0] == "PIL":
            return cls._encoded(value)  # type: ignore[arg-type]
        if isinstance(value, str) and value.startswith("data:"):
            return _from_data_uri(value)
        raise ValueError(f"{show(value)} is no picture, expected bytes, an image of Pillow or a data URI")

    @classmethod
    def _encoded(cls, image: Image) -> Picture:
        if getattr(image, "n_frames", 1) > 1:
            raise ValueError(animated(image))
        buffer = io.BytesIO()
        try:
            as_rgb(image).save(buffer, "PNG")
        except Exception as error:  # an image of Pillow may be lazy, and decoders raise anything
            raise ValueError(f"the image cannot be read: {explain(error)}") from error
        return cls(buffer.getvalue())

    @cached_property
    def digest(self) -> str:
        """The digest of the file, in 32 hexadecimal digits."""
        return hashlib.blake2b(self.data, digest_size=16).hexdigest()

    @property
    def data_uri(self) -> str:
        """The file in a URI, such as `data:image/png;base64,...`."""
        kind = "jpeg" if self.suffix == ".jpg" else self.suffix[1:]
        return f"data:image/{kind};base64,{base64.b64encode(self.data).decode()}"

    @cached_property
    def suffix(self) -> str:
        """The suffix of a file with this picture, by its first bytes; `.png` if they are unknown."""
        suffixes = {b"\xff\xd8": ".jpg", b"GIF8": ".gif", b"RIFF": ".webp", b"BM": ".bmp"}
        return next((suffix for start, suffix in suffixes.items() if self.data.startswith(start)), ".png")

    def check(self) -> None:
        """Check what the beginning of the file says: its format, its size and its frames; no pixels are read.

        Raises:
            ValueError: It is not accepted; the message says why.
        """
        self._read(lambda _: None)

    def decode(self) -> Image:
        """Return the picture in RGB, upright as its EXIF data says.

        Raises:
            ValueError: It is truncated, too large, animated, or in no known format; the message says which.
        """
        return self._read(_upright)

    def _read(self, work: Callable[[Image], T]) -> T:
        """Open the file, and return what a function returns for it."""
        from PIL import Image, UnidentifiedImageError

        if not self.data:
            raise ValueError("the picture is empty (0 bytes)")
        if len(self.data) > MAX_BYTES:
            raise ValueError(f"the picture has {len(self.data):,} bytes, expected at most {MAX_BYTES:,}; shrink it")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of large images, which are refused here, and of broken EXIF data
                with Image.open(io.BytesIO(self.data), formats=FORMATS) as image:
                    _check_size(image)
                    return work(image)
        except _RefusedError:
            raise
        except Image.DecompressionBombError as error:
            raise ValueError(f"the picture has too many pixels, expected at most {MAX_PIXELS:,}; shrink it") from error
        except UnidentifiedImageError as error:
            raise ValueError(
                f"{self._kind()} is no picture in a known format ({', '.join(FORMATS)}); convert it to PNG"
            ) from error
        except Exception as error:  # decoders raise anything for damaged files
            raise ValueError(f"the picture is damaged: {explain(error)}; replace the file") from error

    def _kind(self) -> str:
        start = self.data[:256].lstrip().lower()
        if start.startswith((b"<svg", b"<?xml")):
            return "an SVG or XML file"
        if start.startswith((b"<!doctype html", b"<html")):
            return "an HTML page"
        return f"a file of {len(self.data):,} bytes"

    def __repr__(self) -> str:
        return f"Picture({len(self.data):,} bytes, digest {self.digest})"


def from_base64(text: object) -> Picture:
    """Return the picture whose file is a text in base64.

    Raises:
        ValueError: It is not base64, or too long.
    """
    if not isinstance(text, str) or len(text) > MAX_BYTES * 4 // 3 + 4:
        raise ValueError(f"{show(text)} is no picture, expected at most {MAX_BYTES:,} bytes in base64")
    try:
        return Picture(base64.b64decode(text, validate=True))
    except ValueError as error:
        raise ValueError(f"{shorten(text, 80)} is not base64: {error}") from error


def _from_data_uri(text: str) -> Picture:
    header, comma, content = text.partition(",")
    if not comma or not header.endswith(";base64"):
        raise ValueError(f"{shorten(text, 80)} is a data URI without base64, expected data:image/png;base64,...")
    return from_base64(content)


class _RefusedError(ValueError):
    """The picture can be read, but is not accepted."""


def as_rgb(image: Image) -> Image:
    """Return an image in RGB. Transparent pixels become white, and values of 16 bits are scaled to 8."""
    from PIL import Image

    if image.mode.startswith("I;16") or image.mode == "I":
        image = image.convert("I").point(lambda value: value / 256).convert("L")
    if image.mode == "F":
        raise _RefusedError("the picture has floating-point pixels, expected 8 bits a channel; convert it to PNG")
    if image.has_transparency_data:
        layers = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layers.size, "white"), layers).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def animated(image: Image) -> str:
    """Return the reason why an animated image is refused."""
    frames = getattr(image, "n_frames", 1)
    return f"the picture is animated, with {frames} frames; give one of them, or all in a column `videos`"


def _upright(image: Image) -> Image:
    """Return an opened image in RGB, turned as its EXIF data says, without copies: one may have 200 MB."""
    from PIL import ImageOps

    image.load()
    ImageOps.exif_transpose(image, in_place=True)
    return as_rgb(image)


def _check_size(image: Image) -> None:
    width, height = image.size
    if getattr(image, "n_frames", 1) > 1:
        raise _RefusedError(animated(image))
    if width * height == 0:
        raise _RefusedError(f"the picture has {width} x {height} pixels, expected at least 1 x 1")
    if width * height > MAX_PIXELS:
        raise _RefusedError(
            f"the picture has {width:,} x {height:,} pixels, expected at most {MAX_PIXELS:,}; shrink it"
        )
    if max(width, height) > MAX_RATIO * min(width, height):
        raise _RefusedError(
            f"the picture has {width:,} x {height:,} pixels, expected sides of a ratio of at most {MAX_RATIO}; crop it"
        )
