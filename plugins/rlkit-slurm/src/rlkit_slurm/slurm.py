"""A run as a job of SLURM."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from annotated_types import Len

from rlkit.base.errors import INTERRUPTED, LaunchError, RecipeError, explain, show
from rlkit.base.names import USER_ONLY, NameRule
from rlkit.base.ranges import Count, NonNegativeInt, PositiveInt
from rlkit.interfaces.launcher import LAUNCHED, LaunchedRun, Launcher

SBATCH_SECONDS = 60.0
"""Time limit of a call of sbatch."""

SlurmValue = Annotated[str, Len(1, 200), NameRule(r"[A-Za-z0-9_.,:/@-]+", "letters, digits and _ . , : / @ -")]
"""The value of an option of sbatch."""


class Slurm(Launcher):
    """Submits the run as a job of SLURM, which starts its ranks with srun; the job outlives the command.

    The script `<run folder>.job.sh` and the output `<run folder>.slurm-<job>.log` are beside the run folder. Nodes need
    the file systems of the current folder, of the run folder and of this Python environment; the job inherits the
    environment variables. Before its time limit the run saves a checkpoint, and the job is queued again, up to
    `restarts` times.

    Args:
        partition: Where to run; null for the default.
        account: What is charged; null for the default.
        time: The time limit, such as `24:00:00`; null for the partition's.
        cpus_per_rank: CPUs of each rank.
        memory: Memory of each node, such as `200G`; null for the default.
        save_seconds: Seconds before the time limit at which the run is told to save; more than a step takes.
        restarts: How often the job is queued again after its time limit.
        dry_run: Print the script, and submit nothing.
        args: Other options of sbatch, such as `--constraint=h100`.
    """

    def __init__(
        self,
        *,
        partition: SlurmValue | None = None,
        account: SlurmValue | None = None,
        time: SlurmValue | None = None,
        cpus_per_rank: Count = 8,
        memory: SlurmValue | None = None,
        save_seconds: PositiveInt = 600,
        restarts: NonNegativeInt = 10,
        dry_run: bool = False,
        args: Annotated[Sequence[str], USER_ONLY] = (),
    ) -> None:
        self.partition = partition
        self.account = account
        self.time = time
        self.cpus_per_rank = cpus_per_rank
        self.memory = memory
        self.save_seconds = save_seconds
        self.restarts = restarts
        self.dry_run = dry_run
        self.args = args

    def launch(self, run: LaunchedRun) -> int:
        script = self.script(run)
        if self.dry_run:
            print(script, end="")
            return 0
        path = Path(f"{run.out}.job.sh")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(0o600)  # options may hold credentials
            path.write_text(script, encoding="utf-8")
        except OSError as error:
            raise LaunchError(f"{path} cannot be written: {explain(error)}") from error
        job = _submit(path)
        print(f"submitted job {job} with {path}")
        print(f"output: tail -F {run.out}.slurm-{job}.log    state: squeue -j {job}    to end it: scancel {job}")
        return 0

    def script(self, run: LaunchedRun) -> str:
        """Return the script of the job.

        Raises:
            RecipeError: The run folder or an argument has characters that end a line of options or split a word.
        """
        for name, text in (("--out", str(run.out)), *(("launcher.args", word) for word in self.args)):
            if not re.fullmatch(r"[^\s\"'\\%`$]+", text):
                raise RecipeError(
                    f"{name} is {show(text)}, expected no spaces, quotes, $ or %: it becomes a line #SBATCH of a script"
                )
        options = {
            "job-name": f"rlkit-{run.out.name}",  # Fabric takes a job named bash for an interactive one
            "nodes": run.nodes,
            "ntasks-per-node": run.ranks_per_node,
            "gpus-per-node": run.ranks_per_node if run.on_gpus else None,
            "cpus-per-task": self.cpus_per_rank,
            "mem": self.memory,
            "partition": self.partition,
            "account": self.account,
            "time": self.time,
            "output": f"{run.out}.slurm-%j.log",
            "open-mode": "append",
            "signal": f"TERM@{self.save_seconds}",
        }
        lines = [f"#SBATCH --{name}={value}" for name, value in options.items() if value is not None]
        lines += [f"#SBATCH {word}" for word in ("--requeue", *self.args)]
        return "\n".join(
            [
                "#!/bin/bash",
                *lines,
                f"cd {shlex.quote(os.getcwd())} || exit 1",
                f'export {LAUNCHED}=1 SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"',
                f"srun --kill-on-bad-exit=1 {shlex.join(run.command())}",
                "status=$?",
                f'if [ "$status" = {INTERRUPTED} ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {self.restarts} ]; then',
                '    scontrol requeue "$SLURM_JOB_ID" && exit 0  # the time limit was near: go on from the checkpoint',
                "fi",
                'exit "$status"',
                "",
            ]
        )


def _submit(script: Path) -> str:
    """Submit a job, and return its id.

    Raises:
        LaunchError: sbatch is missing, refuses the job, or does not answer.
    """
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", str(script)], capture_output=True, text=True, timeout=SBATCH_SECONDS, check=False
        )
    except FileNotFoundError as error:
        raise LaunchError(
            "sbatch is not on this machine's PATH; run the command where jobs are submitted, or print the script with "
            "--launcher.dry_run=true"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise LaunchError(f"sbatch did not answer within {SBATCH_SECONDS:g} s; see sinfo") from error
    job = done.stdout.strip().partition(";")[0]
    if done.returncode != 0 or not re.fullmatch(r"\d+", job):
        reason = (done.stderr or done.stdout).strip() or f"exit status {done.returncode}"
        raise LaunchError(f"sbatch refused {script}: {reason}")
    return job
