"""Run folders of strangers: no verb reads or writes outside of one, hangs, or runs its code unasked."""

from __future__ import annotations

import contextlib
import gzip
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from rlkit_policy.checkpoint import with_checkpoint

from rlkit.base.errors import RecipeError
from rlkit.cli.main import main
from rlkit.commands import with_recipe_of
from rlkit.recipe.trust import risk
from tests.conftest import FAST
from tests.flow.fuzz.texts import bomb

RECIPE = "model: {path: tiny}\ntask: Arithmetic\nreward: MathReward\nadvantage: GRPO\nloss: ClipLoss\n"


def write_run(folder: Path) -> Path:
    for name, content in {
        "recipe.yaml": RECIPE.encode(), "environment.json": b"{}", "result.json": b'{"steps": 1}',
        "metrics.jsonl": b'{"step": 1, "reward/mean": 0.5}\n', "final/config.json": b"{}", "wandb/run": b"",
        "rollouts/step-00001.jsonl.gz": gzip.compress(b'{"text": "4", "messages": []}\n'), "rollouts/media/a.png": b"",
        "checkpoints/step-000001/state.json": b"{}", "profile/a.txt": b"",
    }.items():  # fmt: skip
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def link(target: str | None = None) -> Callable[[Path, Path], None]:
    """Return what leads to a target, or outside."""
    return lambda path, outside: path.symlink_to(target or outside)


def pipe(path: Path, _: Path) -> None:
    os.mkfifo(path)


def bound_socket(path: Path, _: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server, contextlib.chdir(path.parent):  # a socket's name may not be long
        server.bind(path.name)


LINKED = (
    "lock", "reserved", "rollouts", "final", "final.partial", "checkpoints", "metrics.jsonl", "result.json", "ranks",
    "environment.json", "recipe.yaml", "recipe.yaml.partial", "report.html", "ema", "profile", "tensorboard", "wandb",
    "mlflow.db", "mlflow-run", "metrics.csv", "rollouts/step-00001.jsonl.gz", "rollouts/media", "rollouts/media/a.png",
    "rollouts/validation-before.jsonl.gz", "checkpoints/step-000001", "checkpoints/step-000001/state.json",
    "checkpoints/step-000002.partial", "final/config.json", "final/model.safetensors", "profile/a.txt",
)  # fmt: skip
TRAPS: dict[str, tuple[str, Callable[[Path, Path], None]]] = {
    **{f"link {name}": (name, link()) for name in LINKED},
    "dangling": ("lock", link("nowhere")),
    "loop": ("result.json", link("result.json")),
    "device": ("metrics.jsonl", link("/dev/zero")),
    "upwards": ("rollouts", link("../..")),
    "pipe as metrics": ("metrics.jsonl", pipe),
    "pipe as result": ("result.json", pipe),
    "pipe as rollouts": ("rollouts/step-00001.jsonl.gz", pipe),
    "pipe as lock": ("lock", pipe),
    "pipe as model": ("final/config.json", pipe),
    "socket": ("environment.json", bound_socket),
    "socket below": ("ranks/0.json", bound_socket),
    "log of a pool": ("pools/values-0.log", link("../../elsewhere")),
}


def times_of(folder: Path) -> dict[Path, tuple[int, int]]:
    """Return when each file below a folder was read and changed, and each folder changed: to list one is to read it."""
    stats = {path: path.stat() for path in folder.rglob("*")}
    return {path: (0 if path.is_dir() else stat.st_atime_ns, stat.st_mtime_ns) for path, stat in stats.items()}


@pytest.mark.parametrize("trap", TRAPS)
def test_no_verb_follows_a_trap(
    trap: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, make = TRAPS[trap]
    run, _, outside = (write_run(tmp_path / folder) for folder in ("run", "fine", "outside"))
    (run / name).parent.mkdir(exist_ok=True)
    if (run / name).exists():
        (run / name).rename(tmp_path / "removed")
    make(run / name, outside / name if (outside / name).exists() else outside)
    before = times_of(outside)
    monkeypatch.chdir(tmp_path)
    for argv in (
        ["report", "run"], ["diff", "run", "fine"], ["diff", "fine", "run"], ["replay", "run", "--step=1"],
        ["validate", "--checkpoint=run"], ["generate", "--checkpoint=run"], ["export", "--checkpoint=run", "--out=o"],
        ["validate", "--recipe=quickstart", "--model.path=run"], ["fit", "--resume=run"],
        ["reward", "try", "--rollouts=run"],
    ):  # fmt: skip
        assert main(argv) in (1, 2), argv
        error = capsys.readouterr().err.strip()
        assert error.startswith("error: "), argv
        assert "\n" not in error
    assert times_of(outside) == before
    assert not (tmp_path / "o").exists()


def test_a_run_that_goes_on_is_looked_through(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "lock").symlink_to(tmp_path / "written")
    assert main(["fit", "--recipe=quickstart", *FAST, f"--out={tmp_path}/run", "--resume=auto"]) == 2
    assert "run/lock is a link, expected files and folders alone; a run folder that leads" in capsys.readouterr().err
    assert not (tmp_path / "written").exists()


def test_links_of_wandb_and_of_agents_are_theirs(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "wandb" / "latest-run").symlink_to("run")
    (run / "kept").mkdir()
    os.mkfifo(run / "kept" / "pipe")
    assert main(["report", str(run)]) == 0
    assert main(["diff", str(run), str(run)]) == 0


@pytest.mark.parametrize("name", ["result.json", "environment.json", "recipe.yaml", "metrics.jsonl", "profile/a.txt"])
def test_a_huge_file_is_not_read_whole(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run")
    os.truncate(run / name, 1 << 40)
    assert main(["report", str(run)]) == 0
    printed = capsys.readouterr()
    assert ("more than 67,108,864 bytes" in printed.out) == (name not in ("metrics.jsonl", "profile/a.txt"))
    assert ("metrics.jsonl, line 2 is longer than" in printed.out) == (name == "metrics.jsonl")


CODE = RECIPE.replace("MathReward", "{class_path: PythonReward, init_args: {function: 'r.py:f', allow_code: true}}")


@pytest.fixture
def run_with_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a folder with `run`, whose reward is code that leaves the file `ran`."""
    run = write_run(tmp_path / "run")
    (run / "recipe.yaml").write_text(CODE)
    (tmp_path / "r.py").write_text("open('ran', 'w')\ndef f(completions): return [0.0]\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "argv",
    [
        ["validate", "--checkpoint=run"],
        ["validate", "--checkpoint=run/final"],
        ["generate", "--checkpoint", "run"],
        ["replay", "run", "--step=1"],
        ["reward", "try", "--rollouts=run"],
        ["fit", "--resume=run"],
        ["fit", "--resume=run/checkpoints/step-000001", "--out=other"],
    ],
)
def test_code_of_a_run_folder_needs_a_flag(
    argv: list[str], run_with_code: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert "run/recipe.yaml has reward.init_args.allow_code: true, so that 'r.py:f' would run; rlkit asks for" in error
    assert "as it may be a stranger's: if you trust it, add --allow-code, or name it yourself: --recipe run/" in error
    assert not (run_with_code / "ran").exists()


@pytest.mark.parametrize("verb", [["fit", "--resume=run"], ["reward", "try", "--rollouts=run"], ["replay", "run"]])
def test_a_value_of_the_flag_allows_nothing(verb: list[str], run_with_code: Path) -> None:
    assert main([*verb, "--allow-code=false"]) == 2
    assert not (run_with_code / "ran").exists()


def test_the_flag_and_a_named_recipe_allow_the_code(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "recipe.yaml").write_text(CODE)
    recipe = ["--recipe", str(run / "recipe.yaml")]
    assert with_recipe_of(run, ["--allow-code"]) == [*recipe, "--allow-code"]
    assert with_checkpoint([*recipe, f"--checkpoint={run}"])[:2] == recipe


def test_a_comparison_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [write_run(tmp_path / name) for name in ("a", "b")]
    for run in runs:
        (run / "recipe.yaml").write_text(CODE)
    (tmp_path / "r.py").write_text("open('ran', 'w')\n")
    monkeypatch.chdir(tmp_path)
    assert main(["diff", "a", "b"]) == main(["report", "a", "b"]) == 0
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["a", "-"])
def test_aliases_that_stand_for_too_much_are_one_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """9**9 values by names of YAML, of which a hyphen is one."""
    monkeypatch.chdir(tmp_path)
    for run in ("a", "b"):
        write_run(tmp_path / run)
        (tmp_path / run / "recipe.yaml").write_text(bomb(9).replace("&a", f"&{name}").replace("*a", f"*{name}"))
    for argv in (
        ["diff", "a", "b"],
        ["fit", "--resume=a"],
        ["validate", "--checkpoint=a"],
        ["replay", "a", "--step=1"],
    ):
        assert main(argv) == 2
        printed = capsys.readouterr().err
        assert printed.startswith("error: a/recipe.yaml ")
        assert printed.endswith(" it is nested more than 20 deep, or has more than 20,000 nodes\n")
    assert main(["report", "a", "b"]) == 0


@pytest.mark.parametrize(
    ("option", "key"),
    [
        ("teacher: {path: tiny, urls: ['HTTPS://evil.example']}", "teacher.urls.0"),
        ("reward: {class_path: RemoteReward, init_args: {url: 'https://evil.example'}}", "reward.init_args.url"),
        ("reward: {class_path: RemoteReward, init_args: {url: '${RLKIT_SCORER}.evil'}}", "reward.init_args.url"),
        (
            "reward: {class_path: JudgeReward, init_args: {criteria: c, server: "
            "{url: 'https://evil.example', model: m, key_variable: RLKIT_JUDGE_KEY}}}",
            "reward.init_args.server.url",
        ),
        ("reward: \"{class_path: RemoteReward, init_args: {url: 'https://evil.example'}}\"", "reward.init_args.url"),
    ],
)
def test_an_address_of_a_run_folder_needs_the_flag(
    option: str, key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Completions would go there, and keys that the user has exported for an address of their own."""
    monkeypatch.setenv("RLKIT_SCORER", "http://scorer")
    run = write_run(tmp_path / "run")
    (run / "recipe.yaml").write_text(RECIPE.replace("reward: MathReward\n", "") + option + "\n")
    for argv in (["fit", f"--resume={run}"], ["validate", f"--checkpoint={run}"], ["replay", str(run), "--step=1"]):
        assert main(argv) == 2
        assert f"recipe.yaml has {key}: '" in (error := capsys.readouterr().err)
        assert "', so that samples and credentials would be sent there; rlkit asks for every run folder" in error
    assert with_recipe_of(run, ["--allow-code"])[-1] == "--allow-code"


def test_code_of_a_part_that_is_written_as_text_needs_the_flag(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    reward = "{class_path: PythonReward, init_args: {function: 'r.py:f', allow_code: true}}"
    (run / "recipe.yaml").write_text(RECIPE.replace("MathReward", f'"{reward}"'))
    with pytest.raises(RecipeError, match=r"has reward\.init_args\.allow_code: true, so that 'r\.py:f' would run"):
        with_recipe_of(run, [])


def test_risks_are_found_at_any_depth() -> None:
    assert risk({"reward": {"init_args": {"allow_code": False}}, "tools": [{"a": {"allow_code": None}}]}) is None
    assert risk({"task": {"system": "See https://docs.example.", "path": "s3://bucket/rows.jsonl"}}) is None
    for tree, key in (
        ({"tools": [{"a": 1}, {"init_args": {"allow_code": "yes"}}]}, "tools.1.init_args.allow_code"),
        ({"reward.allow_code": True}, "reward.allow_code"),
        ({"model": {"path": "a/b", "trust_remote_code": True}}, "model.trust_remote_code"),
        ({"tools": [{"url": "wss://h"}]}, "tools.0.url"),
    ):
        assert (risk(tree) or "").startswith(f"{key}: ")
    assert "s3cret" not in (risk({"url": "http://me:s3cret@h"}) or "")
    assert risk({"allow_code": True}) == "allow_code: true, so that code which it names would run"
    command = {"allow_code": True, "command": "python run.py --token s3cret"}
    assert risk(command) == "allow_code: true, so that 'python run.py --token ***' would run"
