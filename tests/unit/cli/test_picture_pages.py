"""The pictures of rollouts in the report: those of the run alone, whatever a row names."""

from __future__ import annotations

from pathlib import Path

from rlkit_report.pictures import MAX_BYTES, RunPictures

from rlkit.interfaces.content import described
from rlkit.types import JsonObject

NAME = f"media/{'a' * 32}.png"


def row(*names: object) -> JsonObject:
    parts = [{"type": "image", "image": name} for name in names]
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}], "conversation": 3}


def test_pictures_of_the_run_are_data_uris(tmp_path: Path) -> None:
    (tmp_path / "media").mkdir()
    (tmp_path / NAME).write_bytes(b"picture")
    assert RunPictures(tmp_path).of(row(NAME, NAME)) == {NAME: "data:image/png;base64,cGljdHVyZQ=="}


def test_no_other_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "media").mkdir()
    secret = tmp_path.parent / "secret.png"
    secret.write_bytes(b"secret")
    link = tmp_path / "media" / f"{'b' * 32}.png"
    link.symlink_to(secret)
    names = ["../secret.png", str(secret), "media/../../secret.png", f"media/{link.name}", NAME, 7, None, "x\0.png"]
    assert RunPictures(tmp_path).of(row(*names)) == {}
    assert RunPictures(tmp_path).of({"messages": "text", "conversation": [None, {"content": [1]}]}) == {}


def test_more_than_a_page_may_hold_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "media").mkdir()
    second = f"media/{'c' * 32}.jpg"
    with (tmp_path / NAME).open("wb") as file:
        file.truncate(MAX_BYTES)
    (tmp_path / second).write_bytes(b"more")
    pictures = RunPictures(tmp_path)
    assert set(pictures.of(row(NAME, second))) == {NAME}


def test_contents_are_described_in_a_line() -> None:
    assert described([{"type": "image", "image": NAME}, {"type": "text", "text": "What?"}]) == "[picture]What?"
    assert described("plain") == "plain"
