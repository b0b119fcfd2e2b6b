"""`rlkit recipe new`: a file with every option and what it does, which means what the recipe that it is from means."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from rlkit.cli.main import main
from rlkit.registry import load_plugins


def shown(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(["recipe", "show", name]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", sorted(load_plugins(entry_points=False).recipes)[::6])
def test_it_means_the_same_as_what_it_is_from(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.yaml"
    assert main(["recipe", "new", str(file), "--from", name]) == 0
    assert f"rlkit fit --recipe {file}" in " ".join(capsys.readouterr().out.split())
    assert yaml.safe_load(file.read_text()) == yaml.safe_load(shown(name, capsys))
    assert shown(str(file), capsys) == shown(name, capsys)


def test_each_option_stands_under_what_it_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.yaml"
    assert main(["recipe", "new", str(file), "--from=quick_tool", "--advantage=RLOO", "--train.lr=2e-5"]) == 0
    lines = file.read_text().splitlines()
    assert max(map(len, lines)) <= 120
    place = lines.index("  lr: 2.0e-05")
    assert lines[place - 1] == "  # The peak learning rate."
    calculator = next(i for i, line in enumerate(lines) if line.strip() == "calculator:")
    assert lines[calculator + 1].endswith("class_path: rlkit.tools.Calculator")
    choice = " ".join(line.strip("# ") for line in lines[: lines.index("advantage:")][-3:])
    assert "GRPO" in choice
    assert "RLOO" in choice
    sections = [i for i, line in enumerate(lines) if line and not line.startswith((" ", "#", "-"))]
    assert all(lines[i - 1].startswith("#") or lines[i - 1] == "" for i in sections)


@pytest.mark.parametrize("name", ["on", "7", "a # b", "x: y", "'"])
def test_names_are_quoted_where_they_must_be(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own, file = tmp_path / "own.yaml", tmp_path / "mine.yaml"
    own.write_text(
        yaml.safe_dump({"reward": {"class_path": "Router", "init_args": {"rewards": {name: "ExactReward"}}}})
    )
    assert main(["recipe", "new", str(file), "--from=quickstart", f"--recipe={own}"]) == 0
    assert list(yaml.safe_load(file.read_text())["reward"]["init_args"]["rewards"]) == [name]
    assert shown(str(file), capsys)


def test_what_cannot_be_written_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.yaml").write_text("as before")

    def refused(*words: str) -> str:
        assert main(["recipe", "new", *words]) == 2
        return " ".join(capsys.readouterr().err.split())

    assert "exists already; name a new file" in refused(str(tmp_path / "mine.yaml"), "--from=quickstart")
    assert (tmp_path / "mine.yaml").read_text() == "as before"
    assert "cannot be written" in refused(str(tmp_path / "none" / "mine.yaml"), "--from=quickstart")
    assert "needs a file to write" in refused("--from=quickstart")
    assert "needs --from NAME" in refused(str(tmp_path / "x.yaml"))
    assert "nothing" in refused(str(tmp_path / "x.yaml"), "--from=nothing")
    assert not (tmp_path / "x.yaml").exists()
