"""Credentials reach the service that needs them, and nothing that a run writes or shows."""

from __future__ import annotations

import base64
import json
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlkit.base.errors import RecipeError
from rlkit.cli.main import main
from rlkit.cli.parsing.parser import parse
from tests.conftest import FAST

LOGIN = "me:hunter2"


class Service(BaseHTTPRequestHandler):
    """Scores by length whoever knows the password."""

    def do_POST(self) -> None:
        items = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["items"]
        allowed = self.headers["Authorization"] == f"Basic {base64.b64encode(LOGIN.encode()).decode()}"
        self.send_response(200 if allowed else 401)
        self.end_headers()
        self.wfile.write(json.dumps({"scores": [len(item["text"]) for item in items]}).encode())

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def port() -> Iterator[int]:
    server = HTTPServer(("127.0.0.1", 0), Service)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_port
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_password_in_a_url_is_used_and_never_written(
    port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    url = f"--reward.url=http://{LOGIN}@127.0.0.1:{port}/"
    given = ["fit", "--recipe=quickstart", *FAST, "--reward=RemoteReward", url, "--save.every=1", f"--out={out}"]
    monkeypatch.setattr("sys.argv", ["rlkit", *given])
    assert main(given) == 0
    assert subprocess.run(("grep", "-ral", "hunter2", str(out)), capture_output=True, check=False).stdout == b""
    printed = capsys.readouterr()
    assert "hunter2" not in printed.out + printed.err
    reference = "${RLKIT_REWARD_URL_LOGIN}"
    assert yaml.safe_load((out / "recipe.yaml").read_text())["reward"]["init_args"]["url"] == (
        f"http://{reference}@127.0.0.1:{port}/"
    )
    again = ["fit", f"--recipe={out}/recipe.yaml", f"--out={tmp_path / 'again'}"]
    assert main(again) == 2
    assert f"reward.url refers to {reference}, which is not set" in capsys.readouterr().err
    monkeypatch.setenv("RLKIT_REWARD_URL_LOGIN", LOGIN)
    assert main(again) == 0
    written = [yaml.safe_load((folder / "recipe.yaml").read_text()) for folder in (out, tmp_path / "again")]
    assert written[0] == written[1]
    assert main(["fit", f"--resume={out}", "--train.steps=3", "--force"]) == 0


def test_a_password_error_does_not_show_the_password(
    port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"--reward.url=http://me:wrong@127.0.0.1:{port}/"
    options = ("--reward=RemoteReward", url, "--reward.retry.retries=0", f"--out={tmp_path / 'out'}")
    assert main(["fit", "--recipe=quickstart", *FAST, *options]) == 2
    printed = capsys.readouterr()
    assert "HTTP Error 401" in printed.err
    assert "me:wrong" not in printed.out + printed.err + (tmp_path / "out" / "result.json").read_text()


def test_references_in_a_recipe_stay_as_they_were_written(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--recipe=quickstart", "--reward=RemoteReward", "--reward.url=http://${RLKIT_SCORER}/"]
    with pytest.raises(RecipeError, match="reward.url refers to \\$.RLKIT_SCORER., which is not set"):
        parse("fit", options)
    monkeypatch.setenv("RLKIT_SCORER", "a:b@host")
    parsed = parse("fit", options)
    assert parsed.recipe.reward.url == "http://a:b@host/"  # type: ignore[attr-defined]
    assert "url: http://${RLKIT_SCORER}/" in parsed.yaml


def test_a_recipe_reads_no_variable_that_is_not_rlkits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3cret")
    with pytest.raises(RecipeError, match="only variables whose names begin with RLKIT_") as refused:
        parse(
            "fit", ["--recipe=quickstart", "--reward=RemoteReward", "--reward.url=http://h/?k=${AWS_SECRET_ACCESS_KEY}"]
        )
    assert "s3cret" not in str(refused.value)
