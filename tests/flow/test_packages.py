"""What is installed: the wheel with its recipes and model, and a plugin that works from `rlkit fit`."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.conftest import FAST, ROOT, read_jsonl, rlkit


def pip(*args: str) -> None:
    command = (sys.executable, "-m", "pip", *args, "--no-deps", "--no-build-isolation", "--quiet")
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with rlkit and the plugin installed from wheels."""
    folder = tmp_path_factory.mktemp("wheels")
    pip("wheel", str(ROOT), "--wheel-dir", str(folder))
    pip("wheel", str(ROOT / "plugins" / "rlkit-length-reward"), "--wheel-dir", str(folder))
    wheels = sorted(folder.glob("*.whl"))
    assert len(wheels) == 2
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder / "site")
    return folder / "site"


@pytest.mark.slow
def test_the_wheel_has_recipes_and_model_and_stays_small(site: Path, tmp_path: Path) -> None:
    done = rlkit("recipe", "check", "quickstart", cwd=tmp_path, PYTHONPATH=str(site))
    assert done.returncode == 0, done.stderr
    assert "\nok: " in done.stdout
    assert "quickstart " in rlkit("recipe", "list", cwd=tmp_path, PYTHONPATH=str(site)).stdout
    assert (site / "rlkit" / "recipes" / "quickstart.yaml").exists()
    assert (site / "rlkit" / "py.typed").exists()
    assert rlkit("plugins", "new", "my-tool", "--kind=tool", cwd=tmp_path, PYTHONPATH=str(site)).returncode == 0
    files = [path for path in (site / "rlkit").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert sum(path.stat().st_size for path in files) < 8_000_000  # of which the three models have 4.3 million


@pytest.mark.slow
def test_an_installed_plugin_works_from_fit(site: Path, tmp_path: Path) -> None:
    listed = rlkit("plugins", "list", cwd=tmp_path, PYTHONPATH=str(site))
    assert "length-reward" in listed.stdout
    reward = ("--reward=LengthReward", "--reward.reward=MathReward", "--reward.free_tokens=4", "--reward.penalty=0.01")
    done = rlkit("fit", "--recipe=quickstart", *FAST, *reward, "--out=out", cwd=tmp_path, PYTHONPATH=str(site))
    assert done.returncode == 0, done.stderr
    assert rlkit("report", "out", cwd=tmp_path, PYTHONPATH=str(site)).returncode == 0
    for step, row in enumerate(read_jsonl(tmp_path / "out" / "metrics.jsonl"), 1):
        rollouts = read_jsonl(tmp_path / "out" / "rollouts" / f"step-{step:05d}.jsonl.gz")
        for r in rollouts:
            expected = r["components"]["accuracy"] - 0.01 * max(0, sum(r["mask"]) - 4)
            assert r["reward"] == pytest.approx(expected)
        assert row["reward/length_penalty"] < 0
        assert row["accuracy"] == pytest.approx(sum(r["components"]["accuracy"] for r in rollouts) / len(rollouts))
