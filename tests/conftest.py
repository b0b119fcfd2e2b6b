"""Shared by all tests: everything is offline, and processes are started the same way."""

from __future__ import annotations

import contextlib
import gc
import gzip
import io
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from rlkit.base.garbage import THRESHOLD
from rlkit.base.imports import import_lazily
from tests import forks

if TYPE_CHECKING:
    from rlkit.rollout.workers import Workers

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two threads that fight are slower than one
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
import_lazily()  # as the command line does
gc.set_threshold(THRESHOLD)  # the collector of cycles looks through a million objects of libraries and tests

# examples are the same in every run, and fewer, but where .ci/stress gives a seed
RANDOM = "RLKIT_TEST_SEED" in os.environ
settings.register_profile("rlkit", deadline=None, derandomize=not RANDOM, max_examples=100 if RANDOM else 40)
settings.load_profile("rlkit")

ROOT = Path(__file__).parents[1]


def rlkit(*args: str, cwd: Path, site: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own: a new one if it has variables of its own, else a fork.

    Args:
        site: Folders of plugins, as PYTHONPATH has them.
    """
    if not env and forks.can_run():
        return forks.run(("-m", "rlkit", *args), cwd, site=site)
    return subprocess.run(
        (sys.executable, "-m", "rlkit", *args),
        cwd=cwd,
        env={**forks.with_site(site), **env},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


def rlkit_in_process(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the command line of one rank in this process, without the seconds that a process of its own imports for."""
    from rlkit.cli.main import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(cwd), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(list(args))
    return subprocess.CompletedProcess(args, status, out.getvalue(), err.getvalue())


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def write_plugin(site: Path, name: str, source: str) -> Path:
    """Write a distribution as pip leaves it, with one plugin whose hooks are in `source`; return its folder."""
    info = site / f"rlkit_{name}-2.1.dist-info"
    info.mkdir(parents=True)
    (site / f"rlkit_{name}_parts.py").write_text(source)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: rlkit-{name}\nVersion: 2.1\n")
    (info / "entry_points.txt").write_text(f"[rlkit]\n{name} = rlkit_{name}_parts\n")
    return site


@dataclass(frozen=True)
class FakeDistribution:
    """What is read of an installed distribution."""

    name: str
    version: str
    requires: tuple[str, ...] = ()


def write_metadata(package: Path, site: Path) -> None:
    """Write the metadata that pip leaves for a package, from its pyproject.toml."""
    project = tomllib.loads((package / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    requirements = "".join(f"Requires-Dist: {requirement}\n" for requirement in project["dependencies"])
    (info / "METADATA").write_text(f"Name: {project['name']}\nVersion: {project['version']}\n{requirements}")
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """Restore what a test, or a library that it imports first, has changed in the environment."""
    before = dict(os.environ)
    yield
    if dict(os.environ) != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    """A process in which rewards are graded."""
    from rlkit.rollout.workers import Workers

    with closing(Workers(1)) as pool:
        yield pool


FAST = (
    "--train.steps=2", "--train.prompts_per_step=4", "--rollout.group_size=4", "--validation.limit=8",
    "--validation.samples=1",
)  # fmt: skip
"""Overrides that make a run of the quickstart take seconds."""


@pytest.fixture(scope="session")
def gsm8k_like(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in GSM8K's form with a dozen problems of our own making."""
    folder = tmp_path_factory.mktemp("gsm8k")
    for name, count in (("train", 12), ("test", 4)):
        rows = [
            {
                "question": f"Mira packs {n} boxes with {n + 2} pears each and eats {n} pears. How many are left?",
                "answer": f"She packs {n} * {n + 2} = <<{n}*{n + 2}={n * (n + 2)}>>{n * (n + 2)} pears.\n"
                f"{n * (n + 2) - n} are left.\n#### {n * (n + 2) - n}",
            }
            for n in range(2, 2 + count)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder
