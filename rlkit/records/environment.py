"""The versions that a run depends on besides its recipe: `environment.json`."""

from __future__ import annotations

import platform
import subprocess
import sys
from functools import cache
from importlib import metadata

from rlkit.base.installed import DISTRIBUTION
from rlkit.base.text import redact_arguments
from rlkit.registry import Registry

PACKAGES = (DISTRIBUTION, "torch", "lightning", "transformers", "peft", "datasets", "jsonargparse", "pluggy")


def environment(registry: Registry) -> dict[str, object]:
    """Return the versions and the command that a run depends on besides its recipe."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": dict(_versions()),
        "plugins": [{"name": p.name, "distribution": p.distribution, "version": p.version} for p in registry.plugins],
        "command": redact_arguments(sys.argv),
        "git_sha": _git_sha(),
    }


@cache
def _versions() -> tuple[tuple[str, str], ...]:
    return tuple((name, metadata.version(name)) for name in PACKAGES)


def _git_sha() -> str | None:
    try:
        process = subprocess.run(("git", "rev-parse", "HEAD"), capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return process.stdout.strip() or None
