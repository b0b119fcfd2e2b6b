"""Credentials reach the service that needs them, and nothing that a run writes or shows."""

from __future__ import annotations

import base64
import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlkit.base.errors import RecipeError
from rlkit.cli.main import main
from rlkit.commands import parse
from rlkit.recipe.credentials import withhold
from tests.conftest import FAST
from tests.stubs import Stub, serving

LOGIN = "me:hunter2"


class Service(Stub):
    """Scores by length whoever knows the password."""

    def do_POST(self) -> None:
        items = self.read()["items"]
        allowed = self.headers["Authorization"] == f"Basic {base64.b64encode(LOGIN.encode()).decode()}"
        self.answer({"scores": [len(item["text"]) for item in items]}, 200 if allowed else 401)


@pytest.fixture
def port() -> Iterator[int]:
    with serving(Service) as url:
        yield int(url.rpartition(":")[2])


@pytest.mark.slow
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
    assert main(["fit", f"--resume={out}", "--train.steps=3", "--force", "--allow-code"]) == 0


def test_a_password_error_does_not_show_the_password(
    port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"--reward.url=http://me:wrong@127.0.0.1:{port}/"
    options = ("--reward=RemoteReward", url, "--reward.retry.retries=0", f"--out={tmp_path / 'out'}")
    assert main(["fit", "--recipe=quickstart", *FAST, *options]) == 2
    printed = capsys.readouterr()
    assert "answered 401" in printed.err
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


NAMES = [
    "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "GITHUB_PAT", "DB_PASS", "PGPASSWORD", "MYSQL_PWD", "OPENAI_KEY",
    "STRIPE_SK", "HF_TOKEN", "SLACK_WEBHOOK", "DATABASE_URL", "REDIS_DSN", "SENTRY_DSN", "JWT", "SESSION", "COOKIE",
    "SMTP_LOGIN", "KUBECONFIG", "SSH_ASKPASS", "NETRC", "AZURE_SAS", "GCP_JSON", "FOO", "bar", "Mixed-Case", "x", "PIN",
    "MODE", "LICENSE", "TWILIO_SID",
]  # fmt: skip
URLS = (
    "https://me:{}@h/x", "https://{}@h/x", "postgres://:{}@h:5432/db", "s3://KEY:{}/a@bucket/x", "https://h/x?sig={}",
    "https://h/x?a=1&X-Amz-Signature={}&b=2", "HTTPS://h/?key={}#top", "https://h/#access_token={}",
    "jdbc:sqlserver://h:1433;user=sa;password={}", "https://h/?{}",
)  # fmt: skip
AGENT = """
import json, os, urllib.request
assert all(value.startswith("hunter2") for value in map(os.environ.get, os.environ["RLKIT_NAMES"].split()))
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": os.environ["RLKIT_TASK"]}]}).encode()
headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers))
print(dict(os.environ))
"""


def recipe_with_secrets(folder: Path, port: int) -> dict[str, Any]:
    """Return a recipe with credentials: 30 variables of its agent, 11 URLs, and a token in its command."""
    (folder / "agent.py").write_text(AGENT)
    words = [url.format(f"hunter2url{number:02}") for number, url in enumerate(URLS)]
    command = ["python", str(folder / "agent.py"), *words, "--password", "hunter2option", "ghp_hunter2hunter2ABC"]
    environment = {name: f"hunter2{name}" for name in NAMES}
    options = {"command": shlex.join(command), "allow_code": True, "sandbox": False, "environment": environment}
    url = f"http://{LOGIN}@127.0.0.1:{port}/?sig=hunter2reward"
    wandb = {"class_path": "Wandb", "init_args": {"project": "p", "offline": True}}
    return {
        "agent": {"class_path": "CommandAgent", "init_args": options},
        "reward": {"class_path": "RemoteReward", "init_args": {"url": url}},
        "log": {"loggers": ["CSV", "TensorBoard", wandb]},
    }


@pytest.mark.slow
def test_no_credential_is_written_or_shown(
    port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 30 variables and 11 URLs, none is in the run folder, the terminal, an export or the files of trackers."""
    recipe, out, exported = recipe_with_secrets(tmp_path, port), tmp_path / "out", tmp_path / "exported"
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(recipe))
    names = f"--agent.environment.RLKIT_NAMES={' '.join(NAMES)}"
    given = ["fit", "--recipe=quickstart", f"--recipe={tmp_path / 'mine.yaml'}", *FAST, "--validation=null", names]
    given += ["--agent.environment.CLI=hunter2cli", "--rollout.group_size=2", "--save.every=1", f"--out={out}"]
    monkeypatch.setattr("sys.argv", ["rlkit", *given])
    monkeypatch.setenv("WANDB_SILENT", "true")
    assert main(given) == 0
    assert main(["export", f"--checkpoint={out}", f"--out={exported}"]) == 0
    assert main(["report", str(out)]) == 0
    assert main(["recipe", "show", f"--recipe={tmp_path / 'mine.yaml'}", "--recipe=quickstart"]) == 0
    shown = capsys.readouterr()
    assert "hunter2" not in shown.out + shown.err
    grep = ("grep", "-rail", "hunter2", str(out), str(exported))
    assert subprocess.run(grep, capture_output=True, text=True, check=False).stdout == ""
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["conversation/agent_failed"] for row in metrics] == [0, 0]

    resumed = ["fit", f"--resume={out}", "--train.steps=3", "--allow-code"]
    assert main(resumed) == 2
    missing = set(re.findall(r"\$\{(RLKIT_\w+)", capsys.readouterr().err))
    values: dict[str, str] = {}
    recipe["agent"]["init_args"]["environment"] |= {"CLI": "hunter2cli", "RLKIT_NAMES": " ".join(NAMES)}
    withhold(recipe, values)
    assert missing == set(values)
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    assert main(resumed) == 0
