"""Launchers: the command and the variables of ranks, and the script of a job."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from rlkit.base.errors import LaunchError, RecipeError
from rlkit.cli.main import main
from rlkit.commands import parse
from rlkit.interfaces.launcher import LAUNCHED, LaunchedRun
from rlkit.launchers import Slurm

CLUSTER = ("--launcher=Slurm", "--fabric.num_nodes=2", "--fabric.devices=4", "--out=run")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_of(out: str | Path = "/shared/run", resume: str | None = None, force: bool = False) -> LaunchedRun:
    return LaunchedRun(("--recipe=quickstart", "--train.lr=1e-3"), Path(out), resume, force, 2, 4, True)


def sbatch(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Put a program of that name on the PATH."""
    path = folder / "bin" / "sbatch"
    path.parent.mkdir()
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")


def test_ranks_have_the_variables_of_torchrun() -> None:
    variables = run_of().variables(1, 2, "10.0.0.1", 29500)
    assert {**variables} == {
        LAUNCHED: "1", "RANK": "6", "LOCAL_RANK": "2", "GROUP_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "rlkit",
    }  # fmt: skip


def test_a_run_that_was_started_before_never_goes_back() -> None:
    begin = ["python", "-m", "rlkit", "fit", "--recipe=quickstart", "--train.lr=1e-3", "--fabric.num_nodes=2"]
    begin += ["--fabric.devices=4", "--out=/shared/run"]
    run = run_of(resume="other/checkpoints/step-000004", force=True)
    assert run.command(python="python") == [*begin, "--resume=other/checkpoints/step-000004", "--force"]
    assert run.command(python="python", restarted=True) == [*begin, "--resume=auto", "--force"]
    assert run_of().command(python="python") == [*begin, "--resume=auto"]


def test_a_dry_run_prints_a_script_that_a_shell_accepts(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    words = ("--launcher.dry_run=true", "--launcher.time=4:00:00", "--launcher.partition=gpu", "--train.lr=2e-3")
    args = ("--launcher.args=['--constraint=h100']", "--fabric.accelerator=gpu")
    assert main(["fit", "--recipe=quickstart", *CLUSTER, *words, *args]) == 0
    script = capsys.readouterr().out
    for line in ("nodes=2", "ntasks-per-node=4", "gpus-per-node=4", "time=4:00:00", "partition=gpu", "constraint=h100"):
        assert f"#SBATCH --{line}\n" in script
    assert f"--fabric.num_nodes=2 --fabric.devices=4 --out={folder}/run --resume=auto" in script
    assert "--train.lr=2e-3" in script
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    assert not list(folder.iterdir())  # nothing is written, nothing submitted


def test_a_job_has_its_credentials_in_its_environment(
    capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLKIT_REWARD_URL_LOGIN", "another:one")
    login = "--reward.url=http://me:hunter2@127.0.0.1/"
    agent = (
        "--agent={class_path: CommandAgent, init_args: {command: x, allow_code: true, environment: {MODE: hunter2a}}}"
    )
    given = ["--recipe=quickstart", *CLUSTER, "--reward=RemoteReward", login, agent, "--agent.environment.B=hunter2b"]
    assert main(["fit", *given, "--launcher.dry_run=true"]) == 0
    script = capsys.readouterr().out
    assert "hunter2" not in script
    [line] = [line for line in script.splitlines() if line.startswith("srun")]
    words = [word for word in shlex.split(line) if word.startswith(("--recipe", "--reward", "--agent"))]
    options = parse("fit", words).recipe
    assert vars(options.reward)["url"] == "http://me:hunter2@127.0.0.1/"
    assert vars(options.agent)["environment"] == {"MODE": "hunter2a", "B": "hunter2b"}
    assert os.environ["RLKIT_REWARD_URL_LOGIN"] == "another:one"


def test_a_job_that_resumes_a_run_with_code_asks_nobody(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    run = folder / "run"
    run.mkdir()
    options = f"{{function: '{folder}/mine.py:score', allow_code: true}}"
    (folder / "mine.py").write_text("def score(text):\n    return 0.0\n")
    (run / "recipe.yaml").write_text(
        "model: {path: tiny}\ntask: Arithmetic\nadvantage: GRPO\nloss: ClipLoss\ntrain: {steps: 2}\n"
        f"reward: {{class_path: PythonReward, init_args: {options}}}\n"
    )
    given = ["fit", f"--resume={run}", *CLUSTER, "--launcher.dry_run=true"]
    assert main(given) == 2
    assert "mine.py:score' would run; rlkit asks for every run folder" in capsys.readouterr().err
    assert main([*given, "--allow-code"]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("srun")]
    words = shlex.split(line)[shlex.split(line).index("fit") + 1 :]
    assert "--allow-code" not in words
    assert f"--recipe={run / 'recipe.yaml'}" in words


def test_a_job_on_processors_asks_for_no_gpus() -> None:
    run = LaunchedRun((), Path("/run"), None, False, 1, 2, False)
    assert "gpus" not in Slurm().script(run)


@pytest.mark.parametrize("out", ["/shared/a b", "/shared/a\n#SBATCH --prolog=evil", "/shared/$(id)", "/shared/%j"])
def test_a_folder_that_would_be_other_options_is_refused(out: str) -> None:
    with pytest.raises(RecipeError, match="--out is .*expected no spaces, quotes"):
        Slurm().script(run_of(out))


def test_words_of_the_command_stay_words() -> None:
    run = LaunchedRun(("--train.lr=$(touch hacked); touch hacked",), Path("/run"), None, False, 1, 1, False)
    script = Slurm().script(run).replace("srun --kill-on-bad-exit=1", "echo")
    subprocess.run(["bash"], input=script, text=True, capture_output=True, check=False)
    assert not os.path.exists("hacked")


def test_a_recipe_file_sets_no_arguments_of_sbatch(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.yaml").write_text("launcher: {class_path: Slurm, init_args: {args: ['--prolog=/tmp/evil']}}\n")
    assert main(["fit", "--recipe=quickstart", "--recipe=mine.yaml"]) == 2
    assert "launcher.args" in capsys.readouterr().err
    Path("mine.yaml").write_text('launcher: {class_path: Slurm, init_args: {partition: "a\\n#SBATCH --prolog=x"}}\n')
    assert main(["fit", "--recipe=quickstart", "--recipe=mine.yaml"]) == 2
    assert "expected letters, digits and" in capsys.readouterr().err


def test_a_job_is_submitted(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    sbatch(folder, monkeypatch, 'cp "${@: -1}" given; echo "4711;cluster"')
    assert main(["fit", "--recipe=quickstart", *CLUSTER]) == 0
    shown = capsys.readouterr().out
    assert f"submitted job 4711 with {folder}/run.job.sh" in shown
    assert "scancel 4711" in shown
    assert Path("given").read_text() == Path("run.job.sh").read_text()
    assert Path("run.job.sh").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ('echo "sbatch: error: invalid partition specified: gpu" >&2; exit 1', "invalid partition specified: gpu"),
        ("echo nonsense", "sbatch refused .*: nonsense"),
        ("exit 3", "exit status 3"),
    ],
)
def test_what_sbatch_says_is_shown(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str, message: str) -> None:
    sbatch(folder, monkeypatch, script)
    with pytest.raises(LaunchError, match=message):
        Slurm().launch(run_of(folder / "run"))


def test_a_machine_without_slurm_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(folder))
    with pytest.raises(LaunchError, match=r"sbatch is not on this machine's PATH.*--launcher\.dry_run=true"):
        Slurm().launch(run_of(folder / "run"))


def test_a_number_of_devices_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--recipe=quickstart", "--launcher=Slurm", "--fabric.devices=auto"]) == 2
    assert "fabric.devices is 'auto' with a launcher" in capsys.readouterr().err
