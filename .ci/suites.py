"""Suites that run only where what they test has changed: `python .ci/suites.py [check | run [--smoke] [SUITE...]]`.

A stamp, in stamps.json, is a hash of the files that a suite reads, and the commit at which the whole suite was green.
`check` says which stamps are valid. `run` makes a suite's environment, runs it, and stamps it if the whole suite is
green; `--smoke` runs the few tests that the gate runs, and stamps nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
STAMPS = ROOT / ".ci" / "stamps.json"

SERVERS = (
    "plugins/rlkit-servers/src/**/*.py", "plugins/rlkit-agents/src/rlkit_agents/**/*.py", "rlkit/interfaces/engine.py",
    "rlkit/interfaces/outputs.py", "rlkit/models/weights.py", "rlkit/models/lora.py", "rlkit/models/routes.py",
    "rlkit/ops/routes.py", "rlkit/ops/quantization.py", "rlkit/types/*.py",
    "tests/served.py", "tests/ends.py", "tests/agreement.py", "tests/candidates.py",
)  # fmt: skip


@dataclass(frozen=True)
class Suite:
    """Tests, the files on which their result depends, and how they are run.

    Args:
        reads: Patterns of files, from the root of the repository.
        tests: The words for pytest, in the environment `environment`.
        smoke: Those of the tests that the gate runs where files have changed.
        environment: The name for .ci/environment, which makes it; none for the one that runs this.
        debian: Packages that it needs, by a command of each.
    """

    reads: tuple[str, ...]
    tests: tuple[str, ...]
    smoke: tuple[str, ...]
    environment: str = ""
    debian: tuple[tuple[str, str], ...] = ()


def _own(name: str, *more: str) -> tuple[str, ...]:
    return (*SERVERS, f"tests/{name}/**/*.py", ".ci/environment", f".ci/constraints-{name}.txt", *more)


SUITES = {
    "hubs": Suite(
        (
            "plugins/rlkit-trackers/src/**/*.py", "plugins/rlkit-optimizers/src/**/*.py", "rlkit/ops/quantization.py",
            "rlkit/models/load.py", "rlkit/models/optimizer_state.py", "rlkit/distributed/fsdp2.py", "rlkit/agents.py",
            "plugins/rlkit-agents/src/rlkit_agents/**/*.py", "rlkit/rollout/recorded.py", "rlkit/rollout/rendering.py",
            "rlkit/rollout/template.py", "rlkit/losses/dpo.py", "rlkit/losses/reward_models.py",
            "rlkit/losses/distillation.py", "plugins/rlkit-papers/src/rlkit_papers/losses/kto.py",
            "plugins/rlkit-papers/src/rlkit_papers/losses/orpo.py", "tests/vendors.py",
            "plugins/rlkit-papers/src/rlkit_papers/losses/simpo.py",
            "plugins/rlkit-convert/src/rlkit_convert/trl_*.py",
            "plugins/rlkit-env-verifiers/src/**/*.py", "plugins/rlkit-env-openenv/src/**/*.py", "tests/hubs/**/*.py",
            ".ci/environment", ".ci/constraints-hubs.txt", ".ci/constraints-openenv.txt",
        ),
        ("tests/hubs",),
        (
            "tests/hubs/test_quantization.py", "tests/hubs/test_trackers.py", "tests/hubs/test_trl.py",
            "tests/hubs/test_converted.py::test_reward_models",
            "tests/hubs/test_adamw_8bit.py::test_large_weights_are_those_of_bitsandbytes",
            "tests/hubs/test_adamw_8bit.py::test_a_resumed_run_ends_with_the_same_bits",
            "tests/hubs/test_verifiers.py::test_several_turns_are_one_sample",
            "tests/hubs/test_openenv.py::test_equal_seeds_play_equal_episodes",
        ),
        "hubs",
    ),
    "tinker": Suite(
        (
            "plugins/rlkit-tinker/src/**/*.py", "plugins/rlkit-tinker/pyproject.toml", "rlkit/docs/tinker.md",
            "tests/tinker/**/*.py", ".ci/environment", ".ci/constraints-tinker.txt",
        ),
        ("tests/tinker",),
        ("tests/tinker/test_sdk.py::test_sl_loop_learns_and_resumes",),
        "tinker",
    ),
    "vllm": Suite(
        _own("vllm", "plugins/rlkit-engine-vllm/src/**/*.py"),
        ("tests/vllm",),
        (
            "tests/vllm/test_agreement.py::test_log_probs_equal_the_trainers_after_every_sync",
            "tests/vllm/test_agreement.py::test_adapters_travel_alone_after_the_base",
            "tests/vllm/test_changes.py",
            "tests/vllm/test_fit.py::test_rollouts_run_ahead_on_a_running_server",
        ),
        "vllm",
    ),
    "sglang": Suite(
        _own("sglang"),
        ("tests/sglang",),
        (
            "tests/sglang/test_generate.py::test_greedy_output_equals_generate_token_for_token",
            "tests/sglang/test_generate.py::test_logps_equal_the_trainers",
            "tests/sglang/test_generate.py::test_stop_ids_budgets_and_the_context_end_a_completion",
            "tests/sglang/test_sync.py::test_greedy_output_equals_generate_before_and_after",
            "tests/sglang/test_sync.py::test_changes_are_applied_and_refused_ones_are_healed",
            "tests/sglang/test_lora.py::test_adapters_arrive_merged",
            "tests/sglang/test_fit.py::test_structured_answers_train_on_a_running_server",
            "tests/sglang/test_fit.py::test_rollouts_run_ahead",
            "tests/sglang/test_routes.py",
        ),
        "sglang",
    ),
    "ray": Suite(
        (
            "plugins/rlkit-ray/**/*.py", "plugins/rlkit-placement/src/**/*.py", "rlkit/launchers.py",
            "rlkit/run/launch.py", "tests/placed.py", "tests/ray_cluster.py",
        ),
        ("-m", "slow", "plugins/rlkit-ray"),
        (
            "plugins/rlkit-ray/tests/test_ray.py::test_two_nodes_have_the_losses_of_one_machine",
            "plugins/rlkit-ray/tests/test_ray.py::test_a_cluster_that_is_too_small_is_refused",
            "plugins/rlkit-ray/tests/test_ray_pools.py::test_each_role_in_a_pool_of_its_own",
        ),
    ),
    "browser": Suite(
        (
            "plugins/rlkit-report/src/rlkit_report/**/*", "rlkit/records/*.py", "tests/flow/test_report_page.py",
            "tests/flow/browser.py",
        ),
        ("-m", "slow", "tests/flow/test_report_page.py"),
        ("tests/flow/test_report_page.py",),
        debian=(("chromium", "chromium"),),
    ),
}  # fmt: skip


def fingerprint(suite: Suite) -> str:
    """Return the hash of the names and contents of the files that a suite reads."""
    found = hashlib.sha256(repr(suite.tests).encode())
    names = {path for pattern in suite.reads for path in ROOT.glob(pattern) if path.is_file()}
    for path in sorted(path for path in names if "__pycache__" not in path.parts):
        found.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return found.hexdigest()


def stamps() -> dict[str, dict[str, str]]:
    """Return the stamps by suite."""
    stored: dict[str, dict[str, str]] = json.loads(STAMPS.read_text()) if STAMPS.exists() else {}
    return stored


def changed() -> list[str]:
    """Return the suites whose stamps are not valid."""
    stored = stamps()
    return [name for name, suite in SUITES.items() if stored.get(name, {}).get("files") != fingerprint(suite)]


def command(name: str, folder: Path, smoke: bool) -> tuple[list[str], dict[str, str]]:
    """Make a suite's environment in a folder; return the command that runs it, and its variables."""
    suite = SUITES[name]
    for program, package in suite.debian:
        if shutil.which(program) is None:
            sudo = () if os.getuid() == 0 else ("sudo",)
            subprocess.run((*sudo, "apt-get", "-qq", "update"), check=True)
            install = ("apt-get", "-qq", "install", "-y", "--no-install-recommends", package)
            subprocess.run((*sudo, *install), check=True, stdout=subprocess.DEVNULL)
    python = sys.executable
    if suite.environment:
        made = folder / name
        if not made.exists():
            subprocess.run((ROOT / ".ci" / "environment", suite.environment, made), check=True)
        python = str(made / "bin" / "python")
    tests = suite.smoke if smoke else suite.tests
    words = [python, "-m", "pytest", "-o", "addopts=-q --strict-markers", *tests]
    variables = {"OMP_NUM_THREADS": "1", "RLKIT_REQUIRE_BROWSER": "1"}
    if name == "sglang":
        shim = str(ROOT / "tests" / "sglang" / "shim")
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, (shim, os.environ.get("PYTHONPATH"))))
    return words, variables


def stamp(name: str) -> None:
    """Note that the whole suite was green with the files as they are."""
    commit = subprocess.run(("git", "rev-parse", "HEAD"), cwd=ROOT, check=True, capture_output=True, text=True).stdout
    files = {"files": fingerprint(SUITES[name]), "commit": commit.strip()}
    STAMPS.write_text(json.dumps({**stamps(), name: files}, indent=2, sort_keys=True) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["check", "run"], nargs="?", default="check")
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"of {', '.join(SUITES)}; those that have changed")
    parser.add_argument("--smoke", action="store_true", help="only the tests that the gate runs")
    parser.add_argument("--environments", type=Path, help="a folder that keeps the environments; one that is removed")
    options = parser.parse_intermixed_args(argv)
    if options.verb == "check":
        invalid = changed()
        for name in SUITES:
            print(f"{name:8} {'changed' if name in invalid else 'as stamped'}")
        return 0
    failed = []
    with tempfile.TemporaryDirectory() as temporary:
        for name in options.suites or changed():
            words, variables = command(name, options.environments or Path(temporary), options.smoke)
            print(f"== {name}: {' '.join(words)}", flush=True)
            status = subprocess.run(words, cwd=ROOT, env={**os.environ, **variables}, check=False).returncode
            if status:
                failed.append(name)
            elif not options.smoke:
                stamp(name)
    print(f"failed: {', '.join(failed)}" if failed else "all green")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
