"""SearchTool: a ranking worked by hand, the cached index, and a real server that dies and comes back."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import rlkit_tool_search
from hypothesis import given
from hypothesis import strategies as st
from rlkit_tool_search import SearchServer, SearchTool, index, open_index
from rlkit_tool_search.__main__ import main
from rlkit_tool_search.client import SearchClient
from rlkit_tool_search.tool import cut

from rlkit.base.errors import RecipeError
from rlkit.base.retry import ServiceError
from rlkit.registry import load_plugins
from tests.stubs import Stub, serving

DOCS = [
    {"id": "a", "title": "Cats", "text": "The cat sleeps on the warm mat."},
    {"id": "b", "title": "Dogs", "text": "The dog barks at one cat."},
    {"id": "c", "title": "Rivers", "text": "The river Danube flows through Vienna."},
    {"id": "d", "title": "Vienna", "text": "Vienna: the capital of Austria; Vienna has a river, the Danube."},
]


def write(path: Path, docs: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    return path


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write(tmp_path / "docs.jsonl", DOCS)


def bound(**options: Any) -> SearchTool:
    tool = SearchTool(**options)
    tool.bind(None)  # type: ignore[arg-type]
    return tool


def ask(tool: SearchTool, *queries: str) -> list[str]:
    """Search for all queries at once."""

    async def all_of_them() -> list[Any]:
        return await asyncio.gather(*(tool.call({"query": q}, {}) for q in queries))

    return asyncio.run(all_of_them())


# --- the index


def test_the_ranking_by_hand(corpus: Path) -> None:
    found = open_index(corpus)
    # "barks" is in b alone; "vienna" is in c once and in d three times, title included; "cat" (not "cats") is once in
    # a and in b, which have five words each without stop words, so that they are equal
    assert [p.id for p in found.search("Who barks?", 3)] == ["b"]
    assert [p.id for p in found.search("vienna", 3)] == ["d", "c"]
    assert [p.id for p in found.search("cat", 3)] == ["a", "b"]
    assert [p.id for p in found.search("the Danube in Austria", 1)] == ["d"]
    assert found.search("the of at", 3) == found.search("zebra", 3) == found.search("", 3) == []
    best = found.search("barks", 1)[0]
    assert best._replace(score=0.0) == ("b", "Dogs", "The dog barks at one cat.", 0.0)
    assert best.score > 0


def test_equal_passages_keep_the_order_of_the_corpus(tmp_path: Path) -> None:
    docs = [{"id": str(i), "text": "one lonely word"} for i in range(50)]
    found = open_index(write(tmp_path / "same.jsonl", docs))
    assert [p.id for p in found.search("lonely", 4)] == ["0", "1", "2", "3"]


def test_an_index_is_built_once_for_a_content(corpus: Path) -> None:
    open_index(corpus).close()
    [folder] = corpus.parent.glob("docs.jsonl.*")
    built = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert len(open_index(corpus)) == 4
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == built
    write(corpus, [*DOCS, {"id": "e", "text": "A zebra."}])
    assert [p.id for p in open_index(corpus).search("zebra", 3)] == ["e"]
    assert len(list(corpus.parent.glob("docs.jsonl.*"))) == 2  # nothing unfinished is left behind


def test_an_index_may_be_built_by_several_at_the_same_time(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build, all_built = index._build, threading.Barrier(3)

    def build_together(corpus: Path, folder: Path) -> None:
        build(corpus, folder)
        all_built.wait(120)  # nobody renames before everybody has found no index and built one

    monkeypatch.setattr(index, "_build", build_together)
    with ThreadPoolExecutor(3) as pool:
        assert [len(opened) for opened in pool.map(open_index, [corpus] * 3)] == [4, 4, 4]
    assert len(list(corpus.parent.glob("docs.jsonl.*"))) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"id": 1, "text": "fine"}\n\n{"id": 2}\n', "line 3: expected an object with the text `text`, got {'id': 2}"),
        ('{"text": "fine"}\nnot json\n', "line 2: Expecting value"),
        ("[1]\n", "line 1: expected an object"),
        ("", "no words to search for in 0 passages"),
        ('{"text": "the of"}\n', "no words to search for in 1 passages"),
    ],
)
def test_a_corpus_of_another_form_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "docs.jsonl"
    path.write_text(content)
    with pytest.raises(RecipeError, match=message):
        bound(corpus=str(path))
    assert list(tmp_path.iterdir()) == [path]


def test_a_corpus_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"cannot read the corpus '.*none.jsonl' \(No such file or directory\)"):
        bound(corpus=str(tmp_path / "none.jsonl"))


def test_a_folder_that_cannot_be_written_to_is_named(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)  # permissions do not bind a test that runs as root
    with pytest.raises(RecipeError, match=r"cannot write the index .*\(Permission denied\); copy the corpus"):
        open_index(corpus)


# --- the tool


def test_passages_are_numbered_and_cut(corpus: Path) -> None:
    tool = bound(corpus=str(corpus), top_k=2, max_chars=12)
    assert ask(tool, "vienna", "zebra") == ["[1] Vienna\nVienna: the…\n\n[2] Rivers\nThe river…", "Nothing found."]
    tool.close()


@given(text=st.text(max_size=60), max_chars=st.integers(1, 30))
def test_a_cut_is_a_prefix_of_the_text(text: str, max_chars: int) -> None:
    short = cut(text, max_chars)
    assert text.strip().startswith(short.removesuffix("…"))
    assert len(short.removesuffix("…")) <= max_chars
    assert short == text.strip() or short.endswith("…")


def test_a_search_does_not_block_the_event_loop(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = bound(corpus=str(corpus))
    released = threading.Event()
    search = tool.index.search  # type: ignore[union-attr]

    def slow(query: str, top_k: int) -> list[Any]:
        assert released.wait(120)
        return search(query, top_k)

    monkeypatch.setattr(tool.index, "search", slow)

    async def release_while_it_searches() -> str:
        task = asyncio.create_task(tool.call({"query": "barks"}, {}))
        await asyncio.sleep(0.05)
        released.set()  # only a loop that is free gets here
        return await task  # type: ignore[return-value]

    assert asyncio.run(release_while_it_searches()).startswith("[1] Dogs")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "corpus=None and url=None, expected exactly one"),
        ({"corpus": "c", "url": "http://h"}, "expected exactly one"),
        ({"url": "localhost:1"}, "expected http://"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        SearchTool(**options)


def test_it_registers_and_tells_the_policy_what_it_takes() -> None:
    registry = load_plugins([("tool-search", rlkit_tool_search)], entry_points=False)
    registry.require_healthy()
    assert registry.parts["tools"]["SearchTool"].cls is SearchTool
    tool = SearchTool(corpus="c")
    assert (tool.name, tool.parameters["required"]) == ("search", ["query"])


# --- the server

SOURCE = Path(rlkit_tool_search.__file__).parents[1]
ENV = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCE), *filter(None, sys.path)])}


def start(corpus: Path, port: int = 0) -> tuple[subprocess.Popen[str], int]:
    """Start a server process; give it and its port."""
    command = (sys.executable, "-m", "rlkit_tool_search", "--corpus", str(corpus), "--port", str(port))
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENV)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("4 passages at http://127.0.0.1:"), line
    return process, int(line.rpartition(":")[2])


def stop(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def post(url: str, body: bytes) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(url, body, timeout=10) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.mark.slow
def test_a_server_that_dies_and_comes_back_costs_only_time(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process, port = start(corpus)
    tool = bound(url=f"http://127.0.0.1:{port}/", retries=40, timeout=300.0)
    expected = ask(bound(corpus=str(corpus)), "vienna")
    assert ask(tool, "vienna") == expected
    stop(process)

    attempt, again = SearchClient._ask, []

    async def restart_once_refused(client: SearchClient, *request: Any) -> Any:
        try:
            return await attempt(client, *request)
        except ServiceError:
            again.append(start(corpus, port)[0])
            raise

    with monkeypatch.context() as patch:
        patch.setattr(SearchClient, "_ask", restart_once_refused)
        assert ask(tool, "vienna") == expected
    [process] = again
    stop(process)

    gone = SearchTool(url=tool.client.url, retries=2)  # type: ignore[union-attr]
    with pytest.raises(ConnectionError, match=r"no answer from http://\S+ after 3 attempts: .*ClientConnectorError"):
        ask(gone, "vienna")
    hasty = SearchTool(url=tool.client.url, retries=99, timeout=1.0)  # type: ignore[union-attr]
    with pytest.raises(ConnectionError, match=r"there was no answer within 0.9 s"):  # the time was up, not the 99
        ask(hasty, "vienna")
    with pytest.raises(RecipeError, match=r"no search server answers at .*; start one with `python -m"):
        gone.bind(None)  # type: ignore[arg-type]


def test_many_concurrent_searches(corpus: Path) -> None:
    local = bound(corpus=str(corpus))
    queries = ["barks", "vienna", "zebra", "river Danube"] * 50
    expected = ask(local, *queries)
    assert expected[:4] == [ask(local, q)[0] for q in queries[:4]]
    with serving(SearchServer(open_index(corpus))) as url:
        assert ask(bound(url=url), *queries) == expected


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/search", b"{not json", 400, "Expecting property name"),
        ("/search", b'{"query": "\xff"}', 400, "decode"),
        ("/search", b"[" * 100_000, 400, "recursion"),
        ("/search", b"[1]", 400, "got [1], expected"),
        ("/search", b'{"top_k": 1}', 400, "got {'top_k': 1}, expected"),
        ("/search", b'{"query": 7}', 400, "expected"),
        ("/search", b'{"query": "x", "top_k": 0}', 400, "1 to 100"),
        ("/search", b'{"query": "x", "top_k": true}', 400, "1 to 100"),
        ("/elsewhere", b'{"query": "x"}', 404, "no /elsewhere here"),
    ],
)
def test_the_server_says_what_is_wrong_and_goes_on(
    corpus: Path, path: str, body: bytes, status: int, message: str
) -> None:
    with serving(SearchServer(open_index(corpus))) as url:
        code, answer = post(url + path, body)
        assert (code, message in answer["error"]) == (status, True), answer
        assert post(f"{url}/search", b'{"query": "barks"}')[1]["passages"][0]["id"] == "b"


def test_a_body_that_is_too_long_is_refused_before_it_is_read(corpus: Path) -> None:
    with serving(SearchServer(open_index(corpus))) as url:
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=10)
        connection.putrequest("POST", "/search")
        connection.putheader("Content-Length", "1048577")
        connection.endheaders()
        answer = connection.getresponse()
        assert (answer.status, json.load(answer)) == (
            413,
            {"error": "Content-Length is '1048577', expected at most 1048576"},
        )


class Odd(Stub):
    """Answers with what `answers` holds, in turn; the last one stays."""

    answers: list[tuple[int, bytes]]

    def do_POST(self) -> None:
        self.read()
        status, body = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        self.answer(body, status)


GOOD = (200, b'{"passages": [{"id": "x", "title": "X", "text": "y", "score": 1.0}]}')


@pytest.mark.parametrize("first", [(200, b"not json"), (200, b'{"passages": [{"a": 1}]}'), (503, b"busy"), (200, b"1")])
def test_a_client_tries_again_after_a_bad_answer(first: tuple[int, bytes]) -> None:
    handler = type("Handler", (Odd,), {"answers": [first, GOOD]})
    with serving(handler) as url:
        assert ask(SearchTool(url=url), "q") == ["[1] X\ny"]


def test_a_client_does_not_repeat_what_is_refused() -> None:
    handler = type("Handler", (Odd,), {"answers": [(400, b'{"error": "no such corpus"}'), GOOD]})
    with serving(handler) as url:
        with pytest.raises(ValueError, match="refused the search: answered 400: .*no such corpus"):
            ask(SearchTool(url=url), "q")
        assert handler.answers == [GOOD]  # type: ignore[attr-defined]


def test_the_command_line_explains_what_it_cannot_do(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["rlkit_tool_search", "--corpus", str(corpus.with_name("none"))])
    assert main() == 2
    assert "cannot read the corpus" in capsys.readouterr().err
    with serving(SearchServer(open_index(corpus))) as url:
        monkeypatch.setattr(sys, "argv", ["rlkit_tool_search", "--corpus", str(corpus), "--port", url.split(":")[2]])
        assert main() == 1
        assert "Address already in use; choose another --port" in capsys.readouterr().err
