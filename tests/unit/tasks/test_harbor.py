"""Harbor's task folders as rows, and what they need that a machine without containers has not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlkit.base.errors import RecipeError
from rlkit.tasks import Harbor
from rlkit.testing import check_task

OFFLINE = "[environment]\nallow_internet = false\n"


def write_task(folder: Path, settings: str = OFFLINE, **files: str) -> Path:
    """Write a task that asks for the sum in a file."""
    texts = {
        "task.toml": settings,
        "instruction.md": "Write the sum of /app/numbers.txt to /app/sum.txt",
        "environment/numbers.txt": "1 2",
        "tests/test.sh": "bash /tests/check.sh\n",
        "tests/check.sh": 'n=$(cat /app/sum.txt); [ "$n" = 3 ] && r=1 || r=0; echo $r > /logs/verifier/reward.txt\n',
        "solution/solve.sh": "echo 3 > /app/sum.txt\n",
    }
    for name, text in (texts | files).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_a_folder_of_tasks_is_rows(tmp_path: Path) -> None:
    write_task(tmp_path / "b-sum")
    write_task(tmp_path / "a-sum", "[agent]\ntimeout_sec = 9\n" + OFFLINE + 'workdir = "/work"\n')
    task = Harbor(str(tmp_path), validation_path=str(tmp_path / "b-sum"))
    rows = task.rows("train")
    assert [(row["id"], row["workdir"]) for row in rows] == [("a-sum", "/work"), ("b-sum", "/app")]
    prompt = task.prompt(rows[1], 1)
    assert prompt.messages == [{"role": "user", "content": "Write the sum of /app/numbers.txt to /app/sum.txt"}]
    assert prompt.meta["files"] == {"numbers.txt": "1 2"}
    assert list(prompt.meta["tests"]) == ["/tests/check.sh", "/tests/test.sh"]
    assert [row["id"] for row in task.rows("validation")] == ["b-sum"]
    check_task(task)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("", "may use the network, as Harbor's tasks may unless .* ignore_network: true plays it without"),
        ("[environment]\nallow_internet = true\n", "may use the network"),
        ('[environment]\nnetwork_mode = "public"\n', "may use the network"),
        (OFFLINE + 'docker_image = "python:3.13"\n', "has an image or a Dockerfile; ignore_image: true plays it"),
        (OFFLINE + "gpus = 1\n", "needs environment.gpus=1; leave the task out, or play it in containers"),
        (OFFLINE + 'os = "windows"\n', "needs environment.os='windows'"),
        (OFFLINE + '[[environment.mcp_servers]]\nname = "m"\n', "needs environment.mcp_servers="),
        (OFFLINE + '[verifier]\nenvironment_mode = "separate"\n', "needs verifier.environment_mode='separate'"),
        (OFFLINE + '[verifier.env]\nKEY = "${KEY}"\n', "needs verifier.env="),
        (OFFLINE + '[[steps]]\nname = "one"\n', "needs steps="),
        ("environment = 3\n", "has environment=3, expected a section"),
        ("[environment", "cannot be read"),
    ],
)
def test_what_needs_a_container_is_refused_by_name(tmp_path: Path, settings: str, message: str) -> None:
    write_task(tmp_path / "task", settings)
    with pytest.raises(RecipeError, match=message):
        Harbor(str(tmp_path)).rows("train")


def test_defaults_that_are_written_out_are_no_needs(tmp_path: Path) -> None:
    settings = 'version = "1.0"\n[environment]\nnetwork_mode = "no-network"\nos = "linux"\ngpus = 0\nmcp_servers = []\n'
    write_task(tmp_path, settings + '[verifier]\nenvironment_mode = "shared"\ntimeout_sec = 9.0\n')
    assert len(Harbor(str(tmp_path)).rows("train")) == 1


def test_a_dockerfile_is_refused_or_read_for_its_directory(tmp_path: Path) -> None:
    dockerfile = "FROM ubuntu:24.04\nWORKDIR /srv\nRUN apt-get install -y vim\nWORKDIR /srv/site\n"
    write_task(tmp_path, **{"environment/Dockerfile": dockerfile})
    with pytest.raises(RecipeError, match="has an image or a Dockerfile; ignore_image: true plays it"):
        Harbor(str(tmp_path)).rows("train")
    row = Harbor(str(tmp_path), ignore_image=True).rows("train")[0]
    assert (row["workdir"], row["files"]) == ("/srv/site", {"numbers.txt": "1 2"})
    write_task(tmp_path, **{"environment/docker-compose.yaml": "services: {}"})
    with pytest.raises(RecipeError, match=r"has several containers \(docker-compose.yaml\)"):
        Harbor(str(tmp_path), ignore_image=True).rows("train")


def test_incomplete_tasks_are_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="expected a folder with a task.toml, or with folders of such"):
        Harbor(str(tmp_path)).rows("train")
    with pytest.raises(RecipeError, match="no validation rows: set task.validation_path"):
        Harbor(str(tmp_path)).rows("validation")
    write_task(tmp_path)
    (tmp_path / "environment" / "data.bin").write_bytes(b"\xff\x00")
    with pytest.raises(RecipeError, match=r"cannot read '.*data.bin' as a text"):
        Harbor(str(tmp_path)).rows("train")
    (tmp_path / "environment" / "data.bin").unlink()
    (tmp_path / "environment" / "passwd").symlink_to("/etc/passwd")
    with pytest.raises(RecipeError, match=r"environment/passwd is a link, expected files and folders alone"):
        Harbor(str(tmp_path)).rows("train")
    (tmp_path / "environment" / "passwd").unlink()
    (tmp_path / "tests" / "test.sh").unlink()
    with pytest.raises(RecipeError, match=r"has no tests/test.sh, which writes its reward"):
        Harbor(str(tmp_path)).rows("train")


TRAPS = {
    "settings": ("task/task.toml", "LINK", "task.toml is a link, expected a regular file"),
    "instruction": ("task/instruction.md", "LINK", "instruction.md is a link"),
    "files": ("task/environment", "LINK", "environment is a link, expected files and folders alone"),
    "a file": ("task/environment/numbers.txt", "LINK", "numbers.txt is a link"),
    "tests": ("task/tests", "LINK", "tests is a link"),
    "a test": ("task/tests/test.sh", "LINK", "test.sh is a link"),
    "task": ("task", "LINK", "task is a link, expected a folder"),
    "a loop": ("task/environment/numbers.txt", "numbers.txt", "numbers.txt is a link"),
    "a device": ("task/instruction.md", "/dev/zero", "instruction.md is a link"),
    "pipe as settings": ("task/task.toml", "PIPE", "task.toml is a pipe, expected a regular file"),
    "pipe as instruction": ("task/instruction.md", "PIPE", "instruction.md is a pipe"),
    "pipe as file": ("task/environment/numbers.txt", "PIPE", "numbers.txt is a pipe"),
    "huge settings": ("task/task.toml", "HUGE", "task.toml has more than 1,048,576 bytes"),
    "huge file": ("task/environment/numbers.txt", "HUGE", "numbers.txt has more than 1,048,576 bytes"),
}


@pytest.mark.parametrize("trap", TRAPS)
def test_a_task_that_leads_elsewhere_is_refused_in_a_line(trap: str, tmp_path: Path) -> None:
    name, kind, message = TRAPS[trap]
    outside = write_task(tmp_path / "outside" / "task")
    path = write_task(tmp_path / "tasks" / "task").parent / name
    path.rename(tmp_path / "removed")
    if kind == "PIPE":
        os.mkfifo(path)
    elif kind == "HUGE":
        path.touch()
        os.truncate(path, 1 << 40)
    else:
        path.symlink_to(outside.parent / name if kind == "LINK" else kind)
    with pytest.raises(RecipeError, match=message) as raised:
        Harbor(str(tmp_path / "tasks")).rows("train")
    assert "\n" not in str(raised.value)


def test_many_files_are_refused_while_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlkit_code.harbor.MAX_FILES", 3)
    write_task(tmp_path, **{f"environment/{i}": "" for i in range(4)})
    with pytest.raises(RecipeError, match=r"environment/3' as a text: with those before, over 3 files"):
        Harbor(str(tmp_path)).rows("train")


def test_line_ends_are_those_of_texts(tmp_path: Path) -> None:
    write_task(tmp_path)
    (tmp_path / "tests" / "test.sh").write_bytes(b"a\r\nb\r\n")
    assert Harbor(str(tmp_path)).rows("train")[0]["tests"]["/tests/test.sh"] == "a\nb\n"
