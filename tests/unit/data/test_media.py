"""Pictures of rows: the forms in which data sets hold them, and broken ones, each refused by its row."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rlkit_tasks.rows import Rows

from rlkit.base.errors import RecipeError
from rlkit.data.prompts import make_prompt
from rlkit.interfaces.picture import Picture
from rlkit.tasks import TRL, HFDataset, Jsonl, Verl
from rlkit.types import Prompt


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def plain(colour: Any = "red", size: tuple[int, int] = (12, 8), mode: str = "RGB") -> Image.Image:
    return Image.new(mode, size, colour)


RED, BLUE = encoded(plain("red")), encoded(plain("blue"))


def made(row: dict[str, Any], **options: Any) -> Prompt:
    row = {"answer": "a", **row}
    return make_prompt(Rows([row]), [row], 0, pictures=True, **options)


def parts(prompt: Prompt, message: int = 0) -> list[Any]:
    """Return the parts of a message: texts, and the colours of pictures."""
    content = prompt.messages[message]["content"]
    if isinstance(content, str):
        return [content]
    return [part["text"] if part["type"] == "text" else part["image"].decode().getpixel((0, 0)) for part in content]


R, B = (255, 0, 0), (0, 0, 255)


@pytest.mark.parametrize(
    "value",
    [
        RED,
        {"bytes": RED, "path": None},
        plain("red"),
        "data:image/png;base64," + base64.b64encode(RED).decode(),
        {"image_url": {"url": "data:image/png;base64," + base64.b64encode(RED).decode()}},
        {"base64": base64.b64encode(RED).decode()},
        Picture(RED),
    ],
)
def test_a_picture_may_be_held_in_many_forms(value: Any) -> None:
    assert parts(made({"prompt": "What?", "image": value})) == [R, "What?"]
    assert parts(made({"prompt": "What?", "images": [value, BLUE]})) == [R, B, "What?"]


def test_markers_and_places_take_the_pictures_in_order() -> None:
    assert parts(made({"prompt": "A <image> b <image>?", "images": [RED, BLUE]})) == ["A ", R, " b ", B, "?"]
    typed = [{"type": "image"}, {"type": "text", "text": "or <image>?"}]
    prompt = made({"prompt": [{"role": "user", "content": typed}], "images": [RED, BLUE]})
    assert parts(prompt) == [R, "or ", B, "?"]
    own = [{"type": "image", "image": BLUE}, {"type": "text", "text": "?"}]
    assert parts(made({"prompt": [{"role": "user", "content": own}]})) == [B, "?"]
    url = "data:image/png;base64," + base64.b64encode(RED).decode()
    api = [{"type": "image_url", "image_url": {"url": url}, "text": None}]
    assert parts(made({"prompt": [{"role": "user", "content": api}]})) == [R]


def test_pictures_of_several_messages_and_answers() -> None:
    messages = [
        {"role": "system", "content": "Look."},
        {"role": "user", "content": "First <image>"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Second <image>"},
    ]
    prompt = made({"prompt": messages, "images": [RED, BLUE]})
    assert (parts(prompt, 1), parts(prompt, 3)) == (["First ", R], ["Second ", B])
    row = {"messages": [*messages[1:], {"role": "assistant", "content": "Blue."}], "images": [RED, BLUE]}
    recorded = make_prompt(TRL("unread.parquet"), [row], 0, pictures=True)
    assert parts(recorded) == ["First ", R]
    assert recorded.recorded[0].messages[1]["content"][1]["image"].decode().getpixel((0, 0)) == B


def test_a_video_is_read_as_its_frames() -> None:
    assert parts(made({"prompt": "<video>What moves?", "videos": [[RED, BLUE]]})) == [R, B, "What moves?"]
    assert parts(made({"prompt": "What?", "video": [RED, BLUE]})) == [R, B, "What?"]
    assert parts(made({"prompt": "<video>?", "videos": [{"video": [RED]}]})) == [R, "?"]


def test_rows_without_pictures_keep_their_texts() -> None:
    prompt = made({"prompt": "<image> is a tag", "images": []})
    assert prompt.messages == [{"role": "user", "content": "<image> is a tag"}]
    assert (
        made({"prompt": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}).messages[0]["content"] == "a"
    )


def test_pictures_are_not_in_the_meta_data_of_rewards() -> None:
    prompt = made({"prompt": "What?", "images": [RED], "level": 3})
    assert "images" not in prompt.meta
    assert prompt.meta["level"] == 3


def test_paths_are_relative_to_the_file_of_the_row(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures/a.png").write_bytes(RED)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "What?", "answer": "a", "images": ["pictures/a.png"]}\n')
    task = Jsonl(str(tmp_path / "rows.jsonl"))
    assert parts(make_prompt(task, task.rows("train"), 0, pictures=True)) == [R, "What?"]


def test_features_of_datasets_are_read(tmp_path: Path) -> None:
    import datasets

    features = datasets.Features({"prompt": datasets.Value("string"), "photo": datasets.Image()})
    rows = {"prompt": ["What?", "And?"], "photo": [{"bytes": RED, "path": None}, None]}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "a.parquet")
    task = HFDataset(str(tmp_path / "a.parquet"), answer_field=None)
    table = task.rows("train")
    assert parts(make_prompt(task, table, 0, pictures=True)) == [R, "What?"]
    assert parts(make_prompt(task, table, 1, pictures=True)) == ["And?"]


def test_verls_rows_load_as_they_are(tmp_path: Path) -> None:
    row = {
        "data_source": "hiyouga/geometry3k",
        "prompt": [{"role": "user", "content": "<image>Find x."}],
        "images": [{"bytes": RED, "path": None}],
        "reward_model": {"style": "rule", "ground_truth": "3"},
        "extra_info": {"index": 0},
    }
    prompt = make_prompt(Verl("unread.parquet"), [row], 0, pictures=True)
    assert (parts(prompt), prompt.answer, prompt.source_name) == ([R, "Find x."], "3", "hiyouga/geometry3k")


def test_modes_of_pixels_become_rgb() -> None:
    half = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    assert Picture(encoded(half)).decode().getpixel((0, 0)) == (255, 255, 255)  # transparent pixels are white
    assert Picture(encoded(plain(0, mode="L"))).decode().getpixel((0, 0)) == (0, 0, 0)
    assert Picture(encoded(plain(65535, mode="I;16"))).decode().getpixel((0, 0)) == (255, 255, 255)
    cmyk = Picture(encoded(plain((0, 255, 255, 0), mode="CMYK"), "JPEG")).decode()
    assert cmyk.mode == "RGB"
    assert cmyk.getpixel((0, 0))[0] > 200
    upright = Image.Exif()
    upright[0x0112] = 6  # turned by 90 degrees
    assert Picture(encoded(plain(size=(12, 8)), "JPEG", exif=upright)).decode().size == (8, 12)


def bomb(width: int = 30_000, height: int = 30_000) -> bytes:
    """Return a small PNG that says that it has many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(b"\0" * 1000)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def animation() -> bytes:
    frames = [plain(), plain("blue")]
    return encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])


TEXT = [{"role": "user", "content": "What?"}]
BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "empty": ({"image": {"bytes": b"", "path": "a.png"}}, "a.png cannot be read|does not exist"),
    "zero bytes": ({"images": [b"\0" * 40]}, "no picture in a known format"),
    "text": ({"image": b"hello"}, "a file of 5 bytes is no picture in a known format"),
    "svg": ({"image": b"<svg xmlns='http://www.w3.org/2000/svg'/>"}, "an SVG or XML file"),
    "html": ({"image": b"<!DOCTYPE html><html>404</html>"}, "an HTML page"),
    "pdf": ({"image": b"%PDF-1.7 ..."}, "no picture in a known format"),
    "postscript": ({"image": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"}, "no picture in a known format"),
    "header alone": ({"image": RED[:20]}, "no picture in a known format|damaged"),
    "bomb": ({"image": bomb()}, "too many pixels|30,000 x 30,000 pixels, expected at most"),
    "wide": ({"image": bomb(30_000, 1)}, "sides of a ratio of at most 200"),
    "no width": ({"image": bomb(0, 10)}, "damaged|0 x 10|known format"),
    "animated": ({"image": animation()}, "animated, with 2 frames"),
    "missing file": ({"image": "missing.png"}, "missing.png"),
    "folder": ({"image": "."}, "a folder"),
    "device": ({"image": "/dev/zero"}, "outside of .*, the folder of the rows; if you trust"),
    "long name": ({"image": "x" * 5000}, "cannot be read"),
    "nul in name": ({"image": "a\0.png"}, "cannot be read|null"),
    "protocol": ({"image": "file:///etc/passwd"}, "has the protocol 'file'"),
    "chained url": ({"image": "https::file:///etc/passwd"}, "protocol|cannot be read"),
    "not base64": ({"image": "data:image/png;base64,???"}, "is not base64"),
    "no base64": ({"image": "data:image/svg+xml,<svg/>"}, "data URI without base64"),
    "number": ({"image": 7}, "7 is no picture"),
    "unknown keys": ({"images": [{"pixels": 3}]}, "the keys pixels"),
    "nan": ({"images": [RED, float("inf")]}, "inf is no picture"),
    "two columns": (
        {"image": RED, "photo": {"bytes": BLUE, "path": None}},
        "the columns image and photo hold pictures",
    ),
    "audio": ({"audio": {"array": [0.0], "sampling_rate": 8000}}, "holds audio"),
    "video file": ({"videos": ["cat.mp4"]}, "rlkit reads no video files"),
    "empty video": ({"prompt": "<video>?", "videos": [{"video": []}]}, "expected a list of its frames"),
    "too few": ({"prompt": "<image> <image>?", "images": [RED]}, "more than 1 images, but the row has 1"),
    "too many": ({"prompt": "<image>?", "images": [RED, BLUE]}, "has 2 images in 'images'.*places for 1"),
    "places only": ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "the row has 0"),
    "unknown part": (
        {"prompt": [{"role": "user", "content": [{"type": "thinking"}]}], "image": RED},
        "type text, image",
    ),
    "no text": ({"prompt": [{"role": "user", "content": [{"type": "text"}]}], "image": RED}, "'type': 'text'"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_pictures_are_refused_by_row(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    row, expected = BROKEN[kind]
    fine = {"prompt": "What?", "answer": "a", "image": RED}
    rows = [fine, {"prompt": "What?", "answer": "a", **row}, fine]
    with pytest.raises(RecipeError, match=f"(?s)row 1: .*({expected})"):
        make_prompt(Rows(rows), rows, 1, pictures=True)
    assert parts(make_prompt(Rows(rows), rows, 2, pictures=True)) == [R, "What?"]


TRUNCATED: dict[str, Callable[[], bytes]] = {
    "truncated PNG": lambda: encoded(Image.effect_noise((64, 64), 90).convert("RGB"))[:-400],
    "truncated JPEG": lambda: encoded(Image.effect_noise((64, 64), 90).convert("RGB"), "JPEG")[:300],
    "wrong checksum": lambda: RED[:45] + bytes([RED[45] ^ 255]) + RED[46:],
}


@pytest.mark.parametrize("kind", TRUNCATED)
def test_damaged_pixels_are_refused_when_they_are_read(kind: str) -> None:
    with pytest.raises(ValueError, match="damaged"):
        Picture(TRUNCATED[kind]()).decode()


def test_a_large_file_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    with (tmp_path / "large.png").open("wb") as file:
        file.truncate((1 << 26) + 1)
    with pytest.raises(RecipeError, match="large.png has more than 67,108,864 bytes"):
        made({"prompt": "What?", "image": str(tmp_path / "large.png")}, sources=[str(tmp_path)])
    with pytest.raises(RecipeError, match="67,108,865 bytes, expected at most 67,108,864"):
        made({"prompt": "What?", "image": bytes((1 << 26) + 1)})
