"""Files of a foreign folder: nothing outside is read, and nothing is waited for."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from rlkit.base.files import ForeignFileError, list_inside, open_inside, read_inside, relative_to


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a file in a folder, one of each trap, and a secret beside it."""
    folder = tmp_path / "folder"
    (folder / "in").mkdir(parents=True)
    (folder / "in" / "a.txt").write_text("a")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "a.txt").write_text("secret")
    (folder / "link").symlink_to(tmp_path / "secret" / "a.txt")
    (folder / "up").symlink_to("..")
    (folder / "within").symlink_to("in")
    (folder / "loop").symlink_to("loop")
    (folder / "zero").symlink_to("/dev/zero")
    os.mkfifo(folder / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / "socket"))
    with (folder / "huge").open("wb") as file:
        file.truncate(1 << 40)
    return folder


def test_a_file_inside_is_read(folder: Path, tmp_path: Path) -> None:
    assert read_inside(folder, "in/a.txt", 1) == b"a"
    (tmp_path / "alias").symlink_to(folder)
    assert read_inside(tmp_path / "alias", "in/a.txt", 1) == b"a"  # the user names the folder itself
    with open_inside(folder, "in/a.txt") as file:
        assert file.name > 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("link", "link is a link, expected a regular file"),
        ("up/secret/a.txt", "up is a link, expected a folder"),
        ("within/a.txt", "within is a link, expected a folder"),
        ("loop", "loop is a link"),
        ("zero", "zero is a link"),
        ("pipe", "pipe is a pipe"),
        ("socket", "socket is a socket"),
        ("in", "in is a folder, expected a regular file"),
        ("in/a.txt/b", "Not a directory"),
        ("huge", "huge has more than 9 bytes"),
        ("../secret/a.txt", "outside"),
        ("in/../../secret/a.txt", "outside"),
        ("/etc/passwd", "outside"),
        ("", "outside"),
        (".", "folder is a folder, expected a regular file"),
        ("a\0b", "outside"),
        ("x" * 5000, "File name too long"),
        ("missing", "No such file"),
    ],
)
def test_what_is_no_file_inside_is_an_error(folder: Path, name: str, message: str) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match=message) as raised:
        read_inside(folder, name, 9)
    assert "\n" not in str(raised.value)
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_file_that_is_replaced_while_it_is_opened_is_closed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opens = os.open

    def late(part: str, flags: int, *, dir_fd: int | None = None) -> int:
        if part == "a.txt":
            (folder / "in" / "a.txt").unlink()
            os.mkfifo(folder / "in" / "a.txt")
        return opens(part, flags, dir_fd=dir_fd)

    descriptors = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "open", late)
    with pytest.raises(ForeignFileError, match="expected a regular file"):
        read_inside(folder, "in/a.txt", 9)
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_names_are_relative_to_the_folder(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert relative_to(Path("folder"), Path("folder/in/a.txt")) == "in/a.txt"
    assert relative_to(Path("folder"), folder / "in/a.txt") == "in/a.txt"
    assert relative_to(Path("folder"), Path("folder/../secret")) is None
    assert relative_to(folder, tmp_path / "secret") is None
    assert relative_to(folder, tmp_path / "folder-2" / "a") is None


@pytest.mark.parametrize("trap", ["link", "within", "loop", "pipe", "socket"])
def test_a_folder_with_a_trap_is_not_listed(folder: Path, tmp_path: Path, trap: str) -> None:
    assert list(list_inside(folder, "in")) == ["in/a.txt"]
    (folder / trap).rename(folder / "in" / trap)
    with pytest.raises(ForeignFileError, match=rf"in/{trap} is a (link|pipe|socket), expected files and folders"):
        list(list_inside(folder, "in"))


def test_a_deep_folder_is_listed_in_order(tmp_path: Path) -> None:
    deep = tmp_path
    for _ in range(99):
        deep = deep / "d"
        deep.mkdir()
    (deep / "z").touch()
    (tmp_path / "d" / "a").touch()
    assert list(list_inside(tmp_path, "d")) == ["d/a", "d/" * 99 + "z"]
    assert list(list_inside(tmp_path, "missing")) == []
    assert read_inside(tmp_path, "d/" * 99 + "z", 1) == b""
