"""Pictures that rows name: in the folder of their file, or where the user allows it, and nowhere else."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from rlkit_tasks.rows import Rows

from rlkit.base.errors import RecipeError
from rlkit.commands import parse
from rlkit.data import picture_files as files
from rlkit.data.prompts import make_prompt
from rlkit.interfaces.rows import LocatedRow
from rlkit.tasks import Jsonl
from tests.unit.base.test_http_client import CHUNKED, HOSTILE, OK, serving
from tests.unit.data.test_media import RED, R, parts


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of the rows, beside pictures and a secret."""
    for name, content in (("rows/a.png", RED), ("pictures/a.png", RED), ("pictures/secret", b"hunter2hunter2")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "rows" / "link.png").symlink_to(tmp_path / "pictures" / "a.png")
    (tmp_path / "rows" / "there").symlink_to(tmp_path / "pictures")
    (tmp_path / "rows" / "loop.png").symlink_to("loop.png")
    os.mkfifo(tmp_path / "rows" / "pipe.png")
    return tmp_path / "rows"


def read(folder: Path, name: object, *sources: str) -> list[object]:
    """Return what a policy reads of a row that names a picture."""
    (folder / "rows.jsonl").write_text(json.dumps({"prompt": "What?", "answer": "a", "image": name}))
    task = Jsonl(str(folder / "rows.jsonl"))
    return parts(make_prompt(task, task.rows("train"), 0, pictures=True, sources=sources))


def test_paths_inside_the_folder_are_read(folder: Path) -> None:
    assert read(folder, "a.png") == read(folder, str(folder / "a.png")) == read(folder, "./a.png") == [R, "What?"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("../pictures/a.png", r"--model.vision.sources='\[FOLDER\]'"),
        ("PARENT/pictures/a.png", "outside of .*/rows, the folder of the rows; if you trust the rows"),
        ("/etc/passwd", "is outside"),
        ("/dev/zero", "is outside"),
        ("~/a.png", "is outside"),
        ("~nobody-of-this-name/a.png", "No such file"),
        ("loop.png", "loop.png is a link"),
        ("link.png", "link.png is a link, expected a regular file"),
        ("there/a.png", "there is a link, expected a folder"),
        ("there/secret", "there is a link"),
        ("pipe.png", "pipe.png is a pipe"),
        ("a.png/b.png", "Not a directory"),
        ({"bytes": None, "path": "../pictures/secret"}, "is outside"),
        ({"image_url": {"url": "../pictures/secret"}}, "is outside"),
    ],
)
def test_paths_outside_are_refused_in_a_line(folder: Path, name: object, message: str) -> None:
    name = name.replace("PARENT", str(folder.parent)) if isinstance(name, str) else name
    with pytest.raises(RecipeError, match=message) as raised:
        read(folder, name)
    assert "\n" not in str(raised.value)
    assert "hunter2" not in str(raised.value)


def test_a_folder_that_the_user_names_is_read(folder: Path) -> None:
    pictures = str(folder.parent / "pictures")
    for name in ("../pictures/a.png", f"{pictures}/a.png", "link.png", "there/a.png"):
        assert read(folder, name, "https://example.com", pictures) == [R, "What?"]
    with pytest.raises(RecipeError, match="a file of 14 bytes is no picture in a known format") as raised:
        read(folder, "../pictures/secret", pictures)
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize(
    "name", ["org/data, split train, row 1", "data, split train, row 1", "https://h/a.jsonl, line 1"]
)
def test_rows_of_the_hub_have_no_folder(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    row = LocatedRow.at(name, {"prompt": "What?", "answer": "a", "image": "a.png"})
    with pytest.raises(RecipeError, match="No such file"):
        make_prompt(Rows([row]), [row], 0, pictures=True)
    row.location = f"{folder}, split train, row 1"  # a local folder in the hub's form
    assert parts(make_prompt(Rows([row]), [row], 0, pictures=True)) == [R, "What?"]


def test_the_hubs_cache_is_read_through_its_links(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = folder.parent / "hub"
    for name in ("blobs", "snapshots"):
        (cache / name).mkdir(parents=True)
    (cache / "blobs" / "0f").write_bytes(RED)
    (cache / "snapshots" / "a.png").symlink_to("../blobs/0f")
    monkeypatch.setattr(files, "_caches", lambda: [str(cache)])
    assert read(folder, {"bytes": None, "path": str(cache / "snapshots" / "a.png")}) == [R, "What?"]
    (cache / "snapshots" / "b.png").symlink_to(folder.parent / "pictures" / "a.png")
    with pytest.raises(RecipeError, match="is outside"):
        read(folder, str(cache / "snapshots" / "b.png"))


@pytest.mark.parametrize(
    ("url", "sources", "message"),
    [
        ("https://example.com/a.png", (), r"rows may name none .*--model.vision.sources='\[https://example.com\]', or"),
        ("https://me:pw@example.com/a.png", (), r"sources='\[https://example.com\]'"),
        ("s3://bucket/a.png", (), r"--model.vision.sources='\[s3://bucket\]'$"),
        ("s3://bucket/a.png", ("*",), "rows may name none that you do not allow"),
        ("hf://datasets/a/b/c.png", ("https://example.com",), "rows may name none"),
        ("http://example.com/a.png", ("https://example.com",), "rows may name none"),
        ("https://example.com.evil/a.png", ("https://example.com",), "rows may name none"),
        ("https://example.com@evil/a.png", ("https://example.com",), "rows may name none"),
        ("file:///etc/passwd", ("*", "/"), "has the protocol 'file'"),
        ("https::file:///etc/passwd", ("*", "/"), "expected one of .* and a host"),
        ("http://127.0.0.1:9/a.png", ("*",), "127.0.0.1 is a private address, which data may not name"),
        ("http://169.254.169.254/latest", ("*",), "169.254.169.254 is a private address"),
        ("http://[::1]:9/a.png", ("*",), "::1 is a private address"),
        ("http://[bad/a.png", ("*",), "cannot be read|Invalid IPv6"),
    ],
)
def test_addresses_need_a_permission(folder: Path, url: str, sources: tuple[str, ...], message: str) -> None:
    with pytest.raises(RecipeError, match=message) as raised:
        read(folder, url, *sources)
    assert "\n" not in str(raised.value)
    assert "pw" not in str(raised.value)


def test_an_address_that_the_user_names_is_read(folder: Path) -> None:
    """A private one, too; in chunks, without a length."""
    halves = [RED[:40], RED[40:]]
    chunked = CHUNKED + b"".join(b"%x\r\n%b\r\n" % (len(half), half) for half in halves) + b"0\r\n\r\n"
    for answer in (chunked, OK + b"Connection: close\r\n\r\n" + RED):
        with serving(answer) as server:
            assert read(folder, f"{server.url}/a.png", f"{server.url}/pictures/") == [R, "What?"]  # its host counts


@pytest.mark.parametrize("kind", ["endless", "silent", "bomb"])
def test_a_hostile_address_is_an_error(folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "FETCH_SECONDS", 0.2 if kind == "silent" else 30.0)
    monkeypatch.setattr(files, "MAX_BYTES", 2**16)
    with serving(HOSTILE[kind][0]) as server, pytest.raises(RecipeError, match=f"cannot be read: .*{HOSTILE[kind][2]}"):
        read(folder, f"{server.url}/a.png", server.url)


def test_no_redirect_leads_inwards(folder: Path) -> None:
    with serving(OK + b"\r\n" + RED) as inner:
        moved = b"HTTP/1.1 302 Found\r\nLocation: %b/a.png\r\nContent-Length: 0\r\n\r\n" % inner.url.encode()
        with serving(moved) as server, pytest.raises(RecipeError, match="a redirect to .*, which is not followed"):
            read(folder, f"{server.url}/a.png", server.url)
        assert inner.requests == []


def test_only_the_user_names_sources(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("model: {path: tiny-vision, vision: {sources: [/]}}\n")
    with pytest.raises(RecipeError, match="model.vision.sources is .*, which no recipe file may set"):
        parse("fit", ["--recipe=quick_image", f"--recipe={tmp_path}/recipe.yaml"], trains=True)
    parsed = parse("fit", ["--recipe=quick_image", "--model.vision.sources=[/data, '*']"], trains=True)
    assert list(parsed.recipe.model.vision.sources) == ["/data", "*"]
