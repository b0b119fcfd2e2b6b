"""Commands in forks have the environment, the folder and the plugins of a process of their own."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests import forks
from tests.conftest import FAST, rlkit_in_process

SCRIPT = """
import json, os, sys
imported = "peft" in sys.modules
import plugin
print(json.dumps([imported, plugin.NAME, os.getcwd(), os.environ["PYTHONPATH"], os.environ["LRU_CACHE_CAPACITY"]]))
"""


def test_a_run_in_this_process_leaves_the_environment_alone(tmp_path: Path) -> None:
    before = forks._environment()
    done = rlkit_in_process("fit", "--recipe=quickstart", *FAST, "--train.steps=1", "--out=out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert forks._environment() == before


def test_other_variables_need_a_new_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    before = forks._environment()
    monkeypatch.setattr(forks, "_start", lambda: (None, before))
    for name in forks.CHANGED:
        monkeypatch.setenv(name, "7")
    assert forks.can_run()
    monkeypatch.setenv("TORCH_LOGS", "all")
    assert not forks.can_run()


@pytest.mark.slow
def test_a_fork_has_its_own_variables_and_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forks.can_run()  # the process that forks begins without what is set here
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "plugin.py").write_text(f"NAME = {name!r}\n")
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}/inherited")
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "7")
    site = os.pathsep.join((f"{tmp_path}/first", f"{tmp_path}/second"))
    for folders, plugin in ((site, "first"), (f"{tmp_path}/second", "second")):
        done = forks.run((f"{tmp_path}/script.py",), tmp_path, site=folders)
        assert done.returncode == 0, done.stderr
        path = os.pathsep.join((folders, f"{tmp_path}/inherited"))
        assert json.loads(done.stdout) == [True, plugin, str(tmp_path), path, "7"]
