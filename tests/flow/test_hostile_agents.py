"""Agents that attack the machine, the run and one another: each costs its own rollout, and leaves nothing."""

from __future__ import annotations

import json
import os
import socket
import tempfile
from pathlib import Path

import pytest

from tests.flow.test_agents import ASK, agent_file, command_agent, read_command
from tests.flow.test_conversations import fit

pytestmark = pytest.mark.slow

MARK = str(10**9 + os.getpid())
"""An argument of all processes that attacks leave, and of no others."""
HEAD = f"""
import ctypes, os, shutil, signal, socket, subprocess, sys, time, urllib.error, urllib.request
from pathlib import Path

def stolen(what):
    Path("stolen").write_text(str(what))

def post(body, key=os.environ["OPENAI_API_KEY"], path="/chat/completions"):
    head = {{"Authorization": "Bearer " + key, "Content-Type": "application/json"}}
    try:
        return urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, body, head)).status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0

def listener():
    return socket.create_connection(("127.0.0.1", int(os.environ["OPENAI_BASE_URL"].split(":")[2].split("/")[0])), 1)
{ASK}
"""
ATTACKS = {
    "a fork bomb": "while True:\n    os.fork()",
    "a flood of output": "while True:\n    os.write(1, b'x' * 65536)",
    "memory": "data = bytearray(2**30)\ntime.sleep(60)",
    "shared memory": "with open('/dev/shm/file', 'wb') as file:\n    while True:\n        file.write(bytes(2**20))",
    "a large file": "with open('file', 'wb') as file:\n    while True:\n        file.write(bytes(2**20))",
    "many files": "n = 0\nwhile True:\n    Path(str(n)).write_bytes(bytes(4096))\n    n += 1",
    "a deep folder": "for _ in range(1500):\n    os.mkdir('d')\n    os.chdir('d')",
    "a process that stays": f"subprocess.Popen(['setsid', 'sleep', '{MARK}'])",
    "a daemon": f"os.fork() or os.setsid() and os.fork() or os.execlp('sleep', 'sleep', '{MARK}')",
    "a hang": "signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(60)",
    "a stopped process": "os.kill(os.getpid(), signal.SIGSTOP)",
    "the end of its parent": "os.kill(os.getppid(), signal.SIGKILL)",
    "the end of all processes": "os.kill(-1, signal.SIGKILL)",
    "the end of its group": "os.killpg(0, signal.SIGKILL)",
    "the end of the trainer": "os.kill(TRAINER, signal.SIGKILL)",
    "environments": (
        "for file in Path('/proc').glob('[0-9]*/environ'):\n    text = file.read_bytes()\n"
        "    if b'SECRET' in text or os.environ['OPENAI_API_KEY'].encode() not in text and b'API_KEY' in text:\n"
        "        stolen(text)"
    ),
    "the command lines": "[stolen(f) for f in Path('/proc').glob('[0-9]*/cmdline') if b'TRAINED' in f.read_bytes()]",
    "its own environment": "[stolen(name) for name in os.environ if 'SECRET' in name]",
    "the reward": "stolen(Path(FOLDER, 'reward.py').read_text())",
    "the run": "stolen(os.listdir(FOLDER + '/run'))",
    "a file of the run": "Path(FOLDER, 'run', 'planted').write_text('')\nstolen('written')",
    "other agents": "[stolen(p) for p in Path('..').resolve().iterdir() if p != Path.cwd()]",
    "the network": "socket.create_connection(('127.0.0.1', PORT), 1)\nstolen('connected')",
    "the network outside": "socket.create_connection(('192.0.2.1', 80), 1)\nstolen('connected')",
    "mounts": "subprocess.run(['mount', '-t', 'tmpfs', 'x', '/mnt'], check=True)\nstolen('mounted')",
    "namespaces": "ctypes.CDLL(None).unshare(0x10000000) or stolen('a user namespace')",
    "ptrace": "ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) or stolen('attached')",
    "kernel memory": "stolen(open('/dev/mem', 'rb').read(1))",
    "a link": "os.symlink('/etc/passwd', 'link')\nos.symlink('..', 'up')",
    "a pipe": "os.mkfifo('pipe')",
    "a socket": "socket.socket(socket.AF_UNIX).bind('socket')",
    "a device": "os.mknod('device', 0o20666, os.makedev(1, 3))",
    "a strange name": "open(b'\\xff\\n\\x1b[2J', 'w').close()",
    "no rights": "os.chmod('.', 0)",
    "no folder": "shutil.rmtree('.', ignore_errors=True)",
    "another folder": "os.rename(os.getcwd(), os.getcwd() + '-moved')",
    "bytes that are no text": "os.write(1, b'\\xff\\xfe\\x00' * 100)",
    "no output": "os.closerange(0, 100)\ntime.sleep(0.1)",
    "broken JSON": "assert post(b'{') == post(b'\\xff') == post(b'[' * 100000) == post(b'') == 400",
    "a large body": "assert post(b' ' * 100_000_000) in (0, 413)",
    "guessed keys": "[stolen(n) for n in range(50) if post(b'{}', str(n)) == 200 or post(b'{}', 'a' * n) == 200]",
    "paths": "[stolen(p) for p in ('/../../etc/passwd', '/%2e%2e/run', '//') if post(b'{}', path=p) == 200]",
    "half requests": "held = [listener() for _ in range(64)]\n[s.send(b'POST / HTTP') for s in held]\ntime.sleep(60)",
    "many connections": "held = []\nwhile True:\n    held.append(listener())",
    "a dropped stream": "s = listener()\ns.send(b'GET /v1/models HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n')\ns.close()",
}


def test_hostile_agents_cost_their_rollouts_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLKIT_SECRET", "x")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))  # other tests have folders in the usual one
    with socket.create_server(("127.0.0.1", 0)) as other:
        values = f"TRAINER, FOLDER, PORT = {os.getpid()}, {str(tmp_path)!r}, {other.getsockname()[1]}\n"
        rows = [{"prompt": name, "files": {f"{MARK}.py": HEAD + values + code}} for name, code in ATTACKS.items()]
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        task = f"--task={{class_path: Jsonl, init_args: {{path: {tmp_path / 'rows.jsonl'}, answer_field: null}}}}"
        reward = agent_file(
            tmp_path,
            """
            import os
            def grade(agent):
                names = [os.path.join(agent["folder"], name) for name in os.listdir(agent["folder"])]
                plain = all(os.path.isfile(name) or os.path.isdir(name) for name in names if not os.path.islink(name))
                plain = plain and not any(map(os.path.islink, names))
                return float(plain and "stolen" not in map(os.path.basename, names))
            """,
            "reward.py",
        )
        limits = {"timeout": 20, "memory_mb": 256, "processes": 24, "file_mb": 4, "disk_mb": 16}
        options = (
            command_agent(f"python {MARK}.py", **limits),
            task,
            f"--reward={{class_path: PythonReward, init_args: {{function: '{reward}:grade', allow_code: true}}}}",
            f"--train.prompts_per_step={len(ATTACKS)}",
            "--rollout.group_size=2",
            "--rollout.max_conversations=16",
            "--train.steps=1",
            "--validation=null",
        )
        metrics, _ = fit("--recipe=quickstart", *options, cwd=tmp_path)
    assert metrics[0]["rollout/samples"] == 2 * len(ATTACKS)
    assert metrics[0]["rollout/failed"] == metrics[0]["reward/failed"] == 0  # the policy has answered each
    assert metrics[0]["reward/mean"] == 1
    assert not [name for name in os.listdir(scratch) if name.startswith("rlkit-")]
    assert not (tmp_path / "run" / "planted").exists()
    alive = [read_command(pid) for pid in filter(str.isdecimal, os.listdir("/proc"))]
    assert not [command for command in alive if MARK in command]
