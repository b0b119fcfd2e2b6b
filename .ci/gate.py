"""The stages of the gate: `python .ci/gate.py [--only STAGE...]`, in an environment that has rlkit's extra `dev`.

Every stage runs whatever became of the others; failures are listed at the end, each with the command that repeats it. A
test that has failed runs once more, alone, when all stages have ended: if it passes then, it is FLAKY and goes into
flaky.txt. More than three of them, or one that is there already, are a failure.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import suites

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / ".ci" / "constraints.txt"
FLAKY = ROOT / ".ci" / "flaky.txt"
MOST_FLAKY = 3
MOST_RETRIED = 10
"""With more failures than these nothing is tried again: it is no chance."""

AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
SSE41 = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}
NUMBERS = ("tests/unit/ops", "tests/unit/models", "tests/unit/engines", "tests/contract")
TESTING = {
    **AVX2,  # the same instructions on every machine
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "PIP_CONSTRAINT": str(CONSTRAINTS),
    "RLKIT_REQUIRE_SANDBOX": "1",  # a protection that is missing is a failure, not a skip
    "RLKIT_REQUIRE_COMPILERS": "1",
}


@dataclass
class Failure:
    """Something that is wrong.

    Args:
        name: A test's id, or what else failed.
        message: The first line of its error.
        command: The words that repeat it.
        variables: Those of its environment.
        test: Whether it is a test, which is tried again.
    """

    name: str
    message: str
    command: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict)
    test: bool = False

    def __str__(self) -> str:
        variables = "".join(f"{name}={shlex.quote(value)} " for name, value in self.variables.items())
        return f"{self.name}\n    {self.message}\n    {variables}{shlex.join(map(str, self.command))}"


def run(words: Sequence[str], log: Path, variables: Mapping[str, str], cwd: Path | None = None) -> tuple[int, str]:
    """Run a command; return its exit status and its output, which the log has too."""
    with log.open("a+", encoding="utf-8", errors="replace") as file:
        file.write(f"$ {shlex.join(map(str, words))}\n")
        file.flush()
        start = file.tell()
        outputs: Any = {"stdout": file, "stderr": subprocess.STDOUT}
        done = subprocess.run(words, cwd=cwd or ROOT, env={**os.environ, **variables}, **outputs, check=False)
        file.seek(start)
        return done.returncode, file.read()


def tests(words: Sequence[str], log: Path, variables: Mapping[str, str]) -> list[Failure]:
    """Run a command that runs pytest; return the tests that failed."""
    with tempfile.TemporaryDirectory() as folder:
        distribution = "--dist loadfile" if words[0] in ("bash", sys.executable) else ""  # suites may have no xdist
        options = f"-rfE {distribution} -o cache_dir={folder}"
        status, output = run(words, log, {**variables, "PYTEST_ADDOPTS": options})
        stored = Path(folder, "v", "cache", "lastfailed")
        names = list(json.loads(stored.read_text())) if stored.exists() else []
    summary = [line for line in output.splitlines() if line.strip()][-1:]
    print("   ", *summary, flush=True)
    if status and not names:
        return [Failure(f"pytest ended with exit status {status}", " ".join(summary), words, variables)]
    python = words[0] if "python" in Path(words[0]).name else sys.executable
    failures = []
    for name in names:
        message = next(
            (line for line in output.splitlines() if line.startswith((f"FAILED {name}", f"ERROR {name}"))), ""
        )
        alone = (python, "-m", "pytest", "-n", "0", "-o", "addopts=-q --strict-markers", name)
        failures.append(Failure(name, message, alone, variables, test=True))
    return failures


def block(number: int) -> str:
    """Return a ```bash block of README.md, counted from 1."""
    return re.findall(r"^```bash\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)[
        number - 1
    ]


def lint(log: Path) -> list[Failure]:
    """Style, format and types."""
    types = (sys.executable, "-m", "mypy")
    commands = (
        (sys.executable, "-m", "ruff", "check", "."),
        (sys.executable, "-m", "ruff", "format", "--check", "."),
        types,
        (*types, "tests/gpu", "--follow-imports=silent", "--allow-untyped-calls"),  # no machine of CI runs them
    )
    failures = []
    for words in commands:
        status, output = run(words, log, {})
        if status:
            failures.append(Failure(" ".join(words[2:]), output.strip()[-2000:], words))
    return failures


def fast(log: Path) -> list[Failure]:
    """README's test command, as it stands."""
    return tests(("bash", "-c", block(2)), log, TESTING)


def slow(log: Path) -> list[Failure]:
    """The slow tests of gate.txt: one for each mechanism."""
    lines = (ROOT / ".ci" / "gate.txt").read_text(encoding="utf-8").splitlines()
    listed = [line for line in lines if line and not line.startswith("#")]
    addopts = "addopts=-q --strict-markers -m slow"
    words = (sys.executable, "-m", "pytest", "-n", "2", "--dist", "worksteal", "-o", addopts, *listed)
    return tests(words, log, TESTING)


def instructions(log: Path) -> list[Failure]:
    """Tests of numbers with other instructions of the processor than those of the other stages."""
    import torch

    other = {} if torch.backends.cpu.get_cpu_capability() == "AVX512" else SSE41
    variables = {name: value for name, value in TESTING.items() if name not in AVX2} | other
    return tests((sys.executable, "-m", "pytest", "-n", "2", *NUMBERS), log, variables)


def engines(log: Path) -> list[Failure]:
    """Suites whose files have changed since the whole suite was green: some of their tests."""
    failures = []
    for name in suites.changed():
        print(f"    {name} has changed", flush=True)
        try:
            words, variables = suites.command(name, log.parent / "environments", smoke=True)
        except subprocess.CalledProcessError as error:
            failures.append(Failure(f"the environment of {name}", str(error), error.cmd))
        else:
            failures += tests(words, log, variables)
    return failures


def quickstart(log: Path) -> list[Failure]:
    """README's first command as it stands, with the newest packages; where they alone break it, this is said."""
    problem, newest = _quickstart(log, {})
    if not problem:
        return []
    pinned, _ = _quickstart(log, {"PIP_CONSTRAINT": str(CONSTRAINTS)})
    if pinned:
        return [Failure("README's first command", pinned, ("bash", "-c", block(1)))]
    tested = set(CONSTRAINTS.read_text(encoding="utf-8").split())
    newer = [line for line in newest.split() if line not in tested and "rlkit" not in line]
    print(f"    NEWER PACKAGES break README's first command: {problem}\n    of: {', '.join(newer)}", flush=True)
    return []


def _quickstart(log: Path, variables: Mapping[str, str]) -> tuple[str, str]:
    """Run README's first command in a clone of its own; return what is wrong, and the packages."""
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder, "rlkit")
        subprocess.run(("git", "clone", "-q", ROOT, clone), check=True)
        status, shown = run(("bash", "-c", block(1)), log, variables, clone)
        _, packages = run((".venv/bin/python", "-m", "pip", "freeze"), log, {}, clone)
        if status:
            return f"exit status {status}: {' '.join(shown.split()[-60:])}", packages
        [result_file] = clone.glob("runs/quickstart-*/result.json")
        result = json.loads(result_file.read_text())
        metrics = [json.loads(line) for line in result_file.with_name("metrics.jsonl").read_text().splitlines()]
    before, after = result["validation"]["before"], result["validation"]["after"]
    shown_metrics = [f"{name} {before[name]} -> {after[name]}" for name in ("sampled_accuracy", "accuracy")]
    print(f"    quickstart: {result['seconds']} s, {', '.join(shown_metrics)}", flush=True)
    checks = {
        "accuracy before": 0.25 <= before["sampled_accuracy"] <= 0.45,
        "accuracy after": after["sampled_accuracy"] >= 0.8 and after["accuracy"] >= 0.9,
        "result": (result["status"], result["steps"], result["error"]) == ("ok", 100, None),
        "mismatch": all(row["mismatch/max"] < 1e-4 for row in metrics),
        "output": "accuracy" in shown and "step 100/100  reward" in shown and "warning" not in shown,
    }
    return ", ".join(name for name, good in checks.items() if not good), packages


STAGES: dict[str, Callable[[Path], list[Failure]]] = {
    "lint": lint,
    "fast": fast,
    "slow": slow,
    "instructions": instructions,
    "engines": engines,
    "quickstart": quickstart,
}


AT_ONCE = ("lint", "quickstart")
"""Stages that use one processor each: they run side by side, before the others."""


def stage(name: str, logs: Path) -> tuple[str, list[Failure], float]:
    """Run a stage; return its name, what is wrong, and the minutes that it took."""
    print(f"== {name}: {STAGES[name].__doc__}\n", end="", flush=True)  # at once, as others may print
    start, log = time.monotonic(), logs / f"{name}.log"
    try:
        failed = STAGES[name](log)
    except Exception as error:
        failed = [Failure(f"stage {name}", f"{type(error).__name__}: {error}", (sys.executable, *sys.argv))]
    if failed and log.exists():
        print(log.read_text(encoding="utf-8", errors="replace")[-20_000:], flush=True)
    return name, failed, (time.monotonic() - start) / 60


def retry(failures: Sequence[Failure], log: Path) -> tuple[list[Failure], list[str]]:
    """Run tests that failed once more, alone; return what is still wrong, and a line for each flaky test."""
    remaining = [failure for failure in failures if not failure.test]
    failed = [failure for failure in failures if failure.test]
    if len(failed) > MOST_RETRIED:
        return list(failures), []
    flaky = []
    for failure in failed:
        if tests(failure.command, log, failure.variables):
            remaining.append(failure)
        else:
            flaky.append(f"{failure.name}  {failure.message[:300]}")
    return remaining, flaky


def judge_flaky(flaky: Sequence[str]) -> list[Failure]:
    """Note flaky tests; return what is wrong with them."""
    listed = FLAKY.read_text(encoding="utf-8") if FLAKY.exists() else ""
    if flaky:
        FLAKY.write_text(listed + "".join(f"{line}\n" for line in flaky), encoding="utf-8")
    again = [line for line in flaky if f"{line.partition('  ')[0]}  " in listed]
    failures = [
        Failure(line, "it was flaky before: mend it, or mark it `stress`", ("cat", str(FLAKY))) for line in again
    ]
    if len(flaky) > MOST_FLAKY:
        failures.append(Failure(f"{len(flaky)} flaky tests", f"expected at most {MOST_FLAKY}", ("cat", str(FLAKY))))
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=STAGES, default=list(STAGES), metavar="STAGE")
    parser.add_argument("--logs", type=Path, help="a folder for complete outputs and environments")
    options = parser.parse_args()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup tests would inherit that it is ignored
    begun = time.monotonic()
    failures: list[Failure] = []
    minutes: dict[str, float] = {}
    with contextlib.ExitStack() as stack:
        logs = options.logs or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (logs / "environments").mkdir(parents=True, exist_ok=True)
        together = [name for name in options.only if name in AT_ONCE]
        with ThreadPoolExecutor(len(together) or 1) as pool:
            results = list(pool.map(stage, together, [logs] * len(together)))
        results += [stage(name, logs) for name in options.only if name not in AT_ONCE]
        for name, failed, spent in results:
            failures += failed
            minutes[name] = spent
        start = time.monotonic()
        failures, flaky = retry(failures, logs / "retry.log")
        failures += judge_flaky(flaky)
        minutes["retry"] = (time.monotonic() - start) / 60
    print("\n" + "\n".join(f"{name:14}{spent:5.1f} min" for name, spent in minutes.items()))
    print(f"{'in all':14}{(time.monotonic() - begun) / 60:5.1f} min")
    for line in flaky:
        print(f"FLAKY {line}")
    for failure in failures:
        print(f"FAILED {failure}")
    print("the gate is open" if not failures else f"the gate is closed: {len(failures)} failures")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
