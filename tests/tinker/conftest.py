"""`rlkit serve tinker` in a process, and recipes of tinker-cookbook as its clients."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlkit.models import SHIPPED

BASE = "Qwen/Qwen3-8B"
"""The name under which recipes ask for the tiny base."""
GSM8K = "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train.jsonl\n---\n"
QUESTION = "\n\nHuman: How is it?\n\nAssistant:"
PREFERENCE = {"chosen": f"{QUESTION} It is good.", "rejected": f"{QUESTION} It is bad."}
CHOICE = {
    "question": "How is it?", "choices": {"label": ["A", "B"], "text": ["good", "bad"]}, "answerKey": "A",
    "domain": "Chemistry", "type": "mcq", "details": {"level": "L3"},
}  # fmt: skip
TURNS = [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": "It is so."}]
DATA = {
    "HuggingFaceH4/no_robots/train.jsonl": [{"messages": TURNS}] * 12,
    "openai/gsm8k/main/train.jsonl": [{"question": f"What is {i} + 1?", "answer": f"#### {i + 1}"} for i in range(8)],
    "Anthropic/hh-rlhf/train.jsonl": [PREFERENCE] * 44,
    "Anthropic/hh-rlhf/test.jsonl": [PREFERENCE] * 2,
    "zwhe99/DeepMath-103K/train.jsonl": [{"question": "How is it?"}] * 80,
    "hicai-zju/SciKnowEval/test.jsonl": [CHOICE] * 20,
}
"""Rows of the files that recipes look for by their names on the hub."""


class ServedTiny:
    """`rlkit serve tinker` in a process, at one port from one start to the next."""

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        self.folder = folder
        self.start()

    def start(self) -> None:
        """Start it, and wait until it serves."""
        words = ("--model", "tiny", "--alias", BASE, "--port", self.url.rpartition(":")[2], "--folder", "states")
        command = (sys.executable, "-m", "rlkit", "serve", "tinker", *words)
        self.process = subprocess.Popen(command, cwd=self.folder, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.url in self.process.stdout.readline()

    def kill(self) -> None:
        """End it as the system does when memory is short."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def start_client(self, *words: str) -> subprocess.Popen[str]:
        """Start Python in the folder as a client."""
        variables = {"TINKER_BASE_URL": self.url, "TINKER_API_KEY": "tml-cook", "TINKER_TELEMETRY": "0"}
        environment = {**os.environ, **variables, "HF_HUB_OFFLINE": "1", "HF_HOME": str(self.folder / "hub")}
        command = (sys.executable, *words)
        return subprocess.Popen(
            command, cwd=self.folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def run(self, *words: str) -> str:
        """Run Python in the folder as a client; return what it prints."""
        client = self.start_client(*words)
        printed = client.communicate()[0]
        assert client.returncode == 0, printed
        return printed

    def forget_later_checkpoints(self, run: str) -> None:
        """Leave the first checkpoint in the list of a run's, as if its client was killed after it."""
        file = self.folder / run / "checkpoints.jsonl"
        file.write_text(file.read_text().splitlines(keepends=True)[0])


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedTiny]:
    """A server, in a folder with the tokenizer and the data that recipes look for by their names on the hub."""
    folder = tmp_path_factory.mktemp("served")
    (folder / BASE).parent.mkdir()
    (folder / BASE).symlink_to(SHIPPED["tiny"])
    for file, rows in DATA.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "openai/gsm8k/README.md").write_text(GSM8K)
    server = ServedTiny(folder)
    yield server
    server.kill()


def rows_of(folder: Path) -> list[dict[str, float]]:
    """Return the metrics that a recipe has logged, one row a step."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
