"""Each package that rlkit needs has a lower bound, which `.ci/versions lowest` installs."""

from __future__ import annotations

import subprocess
import sys

from packaging.requirements import Requirement

from tests.conftest import ROOT


def test_each_dependency_has_a_lower_bound() -> None:
    script = (sys.executable, str(ROOT / ".ci" / "bounds.py"))
    lowest = subprocess.run((*script, "lowest"), capture_output=True, text=True, check=True).stdout.split()
    newest = subprocess.run((*script, "newest"), capture_output=True, text=True, check=True).stdout.split()
    for exact, requirement in zip(map(Requirement, lowest), map(Requirement, newest), strict=True):
        assert exact.name == requirement.name
        versions = [specifier.version for specifier in exact.specifier if specifier.operator in ("==", ">=")]
        assert all(requirement.specifier.contains(version) for version in versions), requirement
