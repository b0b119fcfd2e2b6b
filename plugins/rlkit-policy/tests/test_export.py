"""`rlkit export`: its model card, and what a push sends to a stand-in of the hub's HTTP API."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import redirect_stderr
from http.server import ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard, constants
from huggingface_hub.utils import close_session

from rlkit.cli.main import main
from tests.stubs import Stub, serving

FEW = ("--train.steps=2", "--train.prompts_per_step=2", "--validation.limit=4", "--save.every=1")


class Hub(ThreadingHTTPServer):
    """Repositories by name: their visibility, and their commits, each a file's content by its path."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.repositories: dict[str, tuple[bool, list[dict[str, bytes]]]] = {}
        self.objects: dict[str, bytes] = {}
        self.tokens: set[str] = set()
        self.faults: dict[str, int | str] = {}


class Handler(Stub):
    server: Hub
    protocol_version = "HTTP/1.1"

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def fault(self) -> bool:
        """Fail as the test asks for requests of this path; return whether it did."""
        [*faults] = [fault for part, fault in self.server.faults.items() if part in f"{self.command} {self.path}"]
        if faults == ["dies"]:
            self.rfile.read1(1000)
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return True
        if faults == ["slow"]:
            threading.Event().wait(0.3)
            return False
        if faults:
            self.body()
            self.answer({"error": "as the test asks"}, int(faults[0]))
        return bool(faults)

    def do_POST(self) -> None:
        if self.fault():
            return
        body, hub = self.body(), self.server
        hub.tokens.add(self.headers.get("Authorization", ""))
        if self.path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            is_new = name not in hub.repositories
            hub.repositories.setdefault(name, (asked.get("visibility") == "private" or asked.get("private"), []))
            self.answer({"url": f"{hub.url}/{name}", "error": "it exists"}, 200 if is_new else 409)
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            modes = [
                {"path": f["path"], "uploadMode": "lfs" if f["path"].endswith("tensors") else "regular"} for f in files
            ]
            self.answer({"files": [{**mode, "shouldIgnore": False} for mode in modes]})
        elif self.path.endswith("/objects/batch"):
            objects = json.loads(body)["objects"]
            actions = [{**o, "actions": {"upload": {"href": f"{hub.url}/lfs/{o['oid']}"}}} for o in objects]
            self.answer({"transfer": "basic", "objects": actions})
        elif "/commit/" in self.path:
            name = self.path.removeprefix("/api/models/").partition("/commit/")[0]
            hub.repositories[name][1].append(dict(map(self.file_of, filter(None, map(json.loads, body.splitlines())))))
            self.answer({"commitUrl": f"{hub.url}/{name}/commit/c1", "commitOid": "c1"})

    def file_of(self, line: dict[str, Any]) -> tuple[str, bytes]:
        value = line["value"]
        content = {
            "file": lambda: base64.b64decode(value["content"]),
            "lfsFile": lambda: self.server.objects[value["oid"]],
        }
        return value.get("path", ""), content.get(line["key"], bytes)()

    def do_PUT(self) -> None:
        if not self.fault():
            self.server.objects[self.path.removeprefix("/lfs/")] = self.body()
            self.answer({})


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)  # between attempts
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    close_session()
    with serving(server):
        yield server
        close_session()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "mine"
    assert main(["fit", "--recipe=quickstart", *FEW, f"--out={folder}"]) == 0
    return folder


def test_a_push_adds_a_commit_to_a_private_repository(run: Path, tmp_path: Path, hub: Hub, capsys: Any) -> None:
    for number in (1, 2):
        out = tmp_path / str(number)
        assert main(["export", f"--checkpoint={run}", f"--out={out}", "--push=me/sums"]) == 0
    assert f"pushed to {hub.url}/me/sums/commit/c1" in capsys.readouterr().out
    private, commits = hub.repositories["me/sums"]
    assert private
    assert [{path: content for path, content in commit.items() if path} for commit in commits] == [
        {str(file.relative_to(out)): file.read_bytes() for file in out.rglob("*") if file.is_file()}
        for out in (tmp_path / "1", tmp_path / "2")
    ]
    assert "Bearer hf_secret" in hub.tokens


@pytest.mark.parametrize(
    ("part", "fault"),
    [("/repos/create", 401), ("/repos/create", 403), ("/preupload/", 500), ("/commit/", 409), ("PUT /lfs/", "dies")],
)
def test_a_failed_push_keeps_the_export(run: Path, tmp_path: Path, hub: Hub, part: str, fault: int | str) -> None:
    hub.faults, out = {part: fault}, tmp_path / "out"
    with redirect_stderr(StringIO()) as stderr:
        assert main(["export", f"--checkpoint={run}", f"--out={out}", "--push=me/sums"]) == 1
    error = stderr.getvalue()
    assert ("Error" if fault == "dies" else f"{fault}") in error
    assert "the push to 'me/sums' failed" in error
    assert f"hf upload me/sums {out} --private" in error
    assert "hf_secret" not in error
    assert {"README.md", "config.json", "model.safetensors"} <= {file.name for file in out.iterdir()}
    assert not hub.repositories.get("me/sums", (False, []))[1]


def test_a_push_with_credentials_is_refused(
    run: Path, tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A file that a run of an earlier version or its base model brings along: it and the kind are named, no value."""
    monkeypatch.setattr("rlkit_policy.export.export_card", lambda *_: "see\nhttps://me:hunter2@host/x")
    export = ["export", f"--checkpoint={run}", "--push=me/sums"]
    assert main([*export, f"--out={tmp_path / '1'}"]) == 1
    error = capsys.readouterr().err
    assert "nothing was pushed to 'me/sums'" in error
    assert "\n  README.md, line 2: a login in a URL\n" in error
    assert "hunter2" not in error
    assert not hub.repositories
    assert main([*export, f"--out={tmp_path / '2'}", "--allow-credentials"]) == 0
    assert len(hub.repositories["me/sums"][1]) == 1


@pytest.mark.slow
def test_a_slow_hub_gets_a_public_repository(run: Path, tmp_path: Path, hub: Hub) -> None:
    hub.faults = {"": "slow"}
    assert main(["export", f"--checkpoint={run}", f"--out={tmp_path / 'out'}", "--push=me/sums", "--public"]) == 0
    private, commits = hub.repositories["me/sums"]
    assert not private
    assert len(commits) == 1


def test_a_push_is_refused_before_the_export(
    run: Path, tmp_path: Path, hub: Hub, capsys: Any, monkeypatch: Any
) -> None:
    out = tmp_path / "out"
    assert main(["export", f"--checkpoint={run}", f"--out={out}", "--push=a/b/c"]) == 2
    assert "--push is 'a/b/c', expected a repository such as 'user/model'" in capsys.readouterr().err
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert main(["export", f"--checkpoint={run}", f"--out={out}", "--push=me/sums"]) == 2
    assert "--push needs a token of the hub" in capsys.readouterr().err
    assert not out.exists()


def test_the_card_describes_the_run(run: Path, tmp_path: Path) -> None:
    assert main(["export", f"--checkpoint={run}", f"--out={tmp_path / 'out'}"]) == 0
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert (card.data.library_name, card.data.tags, card.data.base_model) == ("transformers", ["rlkit"], None)
    assert "| steps | `2 of 2` |" in card.text
    result = json.loads((run / "result.json").read_text())["validation"]
    low, high = result["after"]["accuracy_low"], result["after"]["accuracy_high"]
    assert f"{result['after']['accuracy']:.4g} [{low:.3f}, {high:.3f}]" in card.text
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(f"| {row['step']} | {row['reward/mean']:.4g} |" in card.text for row in rows)
    assert "rlkit fit --recipe recipe.yaml" in card.text
    version = json.loads((run / "environment.json").read_text())["packages"]["transformers"]
    assert f"| `transformers` | `{version}` |" in card.text
    recipe = "\n".join(line[4:] for line in card.text.split("## Repeat")[1].splitlines() if line.startswith("    "))
    assert yaml.safe_load(recipe) == yaml.safe_load((run / "recipe.yaml").read_text())


def test_the_card_of_an_old_run_has_no_credentials(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "mine"
    shutil.copytree(run, copy)
    recipe = yaml.safe_load((copy / "recipe.yaml").read_text())
    recipe["agent"] = {"class_path": "CommandAgent", "init_args": {"environment": {"MODE": "hunter2"}}}
    (copy / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["export", f"--checkpoint={copy}", f"--out={tmp_path / 'out'}"]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "hunter2" not in card
    assert "MODE: ${RLKIT_AGENT_ENVIRONMENT_MODE}" in card


def test_no_value_leaves_its_cell_or_its_code(run: Path, tmp_path: Path) -> None:
    hostile = "x`|\n---\nlicense: mit\n```\n<script>alert(1)</script>\r# H\x1b[2J"
    copy = tmp_path / "mine"
    shutil.copytree(run, copy)
    recipe = yaml.safe_load((copy / "recipe.yaml").read_text())
    recipe["task"] = {"class_path": "HFDataset", "init_args": {"path": hostile}}
    parts = [{"path": "openai/gsm8k"}, {"path": "openai/gsm8k"}, {"path": hostile}]
    recipe["task"]["init_args"]["parts"] = parts
    style = yaml.safe_dump(recipe) + "# <b>\n"
    (copy / "recipe.yaml").write_text(style)
    environment = json.loads((copy / "environment.json").read_text())
    environment |= {"devices": hostile, "packages": {hostile: hostile}, "git_sha": hostile}
    (copy / "environment.json").write_text(json.dumps(environment))
    assert main(["export", f"--checkpoint={copy}", f"--out={tmp_path / 'out'}"]) == 0
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.to_dict() == {"datasets": ["openai/gsm8k"], "library_name": "transformers", "tags": ["rlkit"]}
    assert "\x1b" not in card.text
    lines = card.text.split("## Repeat")[0].splitlines()
    assert not [line for line in lines if line.startswith(("license", "---", "<script", "# H", "\r"))]
    assert all("`" in line.partition("<script>")[0] for line in lines if "<script>" in line)
    unindented = [line for line in card.text.split("## Repeat")[1].splitlines() if not line.startswith("    ")]
    assert not [line for line in unindented if "<" in line or line.startswith("#")]
    assert unindented.count("```") == 1


def test_the_card_of_a_checkpoint_names_its_step(run: Path, tmp_path: Path) -> None:
    [checkpoint] = (run / "checkpoints").glob("step-000001")
    assert main(["export", f"--checkpoint={checkpoint}", f"--out={tmp_path / 'out'}"]) == 0
    assert "| exported | the checkpoint of step 1 |" in (tmp_path / "out" / "README.md").read_text()


def test_the_card_of_a_model_without_a_run_is_valid(tmp_path: Path) -> None:
    assert main(["export", "--checkpoint=tiny", f"--out={tmp_path / 'out'}"]) == 0
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.to_dict() == {"library_name": "transformers", "tags": ["rlkit"]}
    assert "## " not in card.text


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    for out in (file, file / "out"):
        assert main(["export", "--checkpoint=tiny", f"--out={out}"]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: --out is '{out}', which cannot be written: ")
        assert error.count("\n") == 1
    assert main(["export", "--checkpoint=tiny", f"--out={tmp_path}"]) == 2
    assert f"--out is '{tmp_path}', which is not empty; choose a new folder" in capsys.readouterr().err
    assert file.read_text() == "mine"


def test_a_failed_export_leaves_no_new_folder(tmp_path: Path) -> None:
    empty, new = tmp_path / "empty", tmp_path / "new"
    empty.mkdir()
    for out in (empty, new):
        assert main(["export", f"--checkpoint={empty}", f"--out={out}"]) == 1
    assert list(tmp_path.iterdir()) == [empty]
    assert main(["export", "--checkpoint=tiny", f"--out={empty}"]) == 0
    assert (empty / "README.md").exists()
