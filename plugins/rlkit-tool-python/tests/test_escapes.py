"""What the policy's code must not be able to do: real processes, and a parent that has to survive.

Where the machine cannot enforce a protection, `bind` has to refuse, naming it; nothing is attempted then.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import rlkit_tool_python
from python_calls import bound, left_of, run
from rlkit_tool_python import PythonTool

from rlkit.base.errors import RecipeError

SECRET = "the-parents-secret"
PROTECTIONS = ("files", "network", "other processes", "memory", "process count")


@pytest.fixture(scope="module")
def missing() -> set[str]:
    """What this machine does not enforce, as the tool says itself in refusing it."""
    tool = PythonTool()
    try:
        tool.bind(None)
    except RecipeError as error:
        lenient = PythonTool(strict=False)
        with pytest.warns(UserWarning, match="PythonTool cannot protect"):
            lenient.bind(None)
        lenient.close()
        return {name for name in PROTECTIONS if name in str(error).partition(" from ")[0]} or {*PROTECTIONS}
    finally:
        tool.close()
    return set()


@pytest.fixture
def enforced(request: pytest.FixtureRequest, missing: set[str]) -> None:
    """Skip the test where the machine does not enforce the protections it is marked with; fail if it has to."""
    if lacking := sorted(missing & set(request.param)):
        refuse = pytest.fail if os.environ.get("RLKIT_REQUIRE_SANDBOX") else pytest.skip
        refuse(f"this machine does not enforce: {', '.join(lacking)}")


def needs(*protections: str):
    """Mark a test as one of protections."""
    return pytest.mark.parametrize("enforced", [protections], indirect=True, ids=["-".join(protections)])


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    """Another process of this user, with a secret in its environment."""
    with subprocess.Popen(("sleep", "600"), env={**os.environ, "SECRET": SECRET}) as process:
        yield process
        assert process.poll() is None, "the victim was killed"
        process.kill()


def try_each(*lines: str) -> str:
    """Return code that prints `ESCAPED` and the line for each line that raises nothing."""
    return f"""
import ctypes, fcntl, os, resource, signal, socket, subprocess, sys
libc = ctypes.CDLL(None, use_errno=True)
def must(result):
    if result < 0: raise OSError(ctypes.get_errno(), "refused")
for line in {lines!r}:
    try:
        exec(line)
    except (OSError, ValueError, AssertionError, subprocess.CalledProcessError):
        continue
    print("ESCAPED", line)
print("done")
"""


@needs("files")
def test_it_reads_no_files_of_the_machine(enforced: None) -> None:
    with tempfile.NamedTemporaryFile(mode="w") as file:
        file.write(SECRET)
        file.flush()
        os.chmod(file.name, 0o644)
        files = ("/etc/passwd", "/etc/hostname", "/proc/self/environ", "/proc/1/environ", "/sys/class/net", file.name)
        reads = (f"open({name!r}).read()" for name in files)
        lists = (f"assert os.listdir({name!r})" for name in ("/proc", "/home", "/var", "/sys"))
        assert run(try_each(*reads, *lists, "subprocess.run(['cat', '/etc/passwd'], check=True, stderr=-3)")) == "done"


@needs("files")
def test_it_writes_nowhere_but_in_its_folder(enforced: None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        file = Path(folder, "kept")
        file.write_text("kept")
        file.chmod(0o666)
        own = Path(folder, "own")
        own.touch(0o644)
        new = [f"open({path!r}, 'w')" for path in (f"{folder}/new", "/tmp/new", "/new", "/usr/new", "/dev/shm/new")]
        old = [
            f"open({str(file)!r}, 'w')", f"os.truncate({str(file)!r}, 0)", f"os.chmod({str(file)!r}, 0)",
            f"os.unlink({str(file)!r})", f"os.rename({str(file)!r}, 'x')", f"os.link({str(file)!r}, 'x')",
            f"os.utime({str(own)!r}, (0, 0))", "os.open(os.__file__, os.O_RDONLY | os.O_TRUNC)",
            "os.open(os.__file__, os.O_WRONLY)", "os.chmod(os.__file__, 0)", "os.chmod(sys.executable, 0o755)",
            f"os.symlink({folder!r}, 'way'); open('way/new', 'w')", "must(libc.chroot(b'.'))",
        ]  # fmt: skip
        assert run(try_each(*new, *old)) == "done"
        assert (sorted(os.listdir(folder)), file.read_text()) == (["kept", "own"], "kept")


def test_it_sees_a_read_only_machine_in_namespaces() -> None:
    code = "import os, sys\n[os.statvfs(p).f_flag & os.ST_RDONLY for p in ('/', '/usr', sys.prefix, os.getcwd())]"
    tool = bound()
    assert "namespaces" not in tool.layers or run(code, tool) == "[1, 1, 1, 0]"
    tool.close()


@needs("files")
def test_it_does_not_reach_another_conversation(enforced: None) -> None:
    tool = bound()
    state: dict = {}
    asyncio.run(tool.create(state))
    folder = state["folder"]
    Path(folder, "answer").write_text("42")
    assert run(try_each(f"open('{folder}/answer').read()", f"os.listdir({folder!r})"), tool) == "done"
    tool.close()


def test_it_inherits_no_secret_of_the_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", SECRET)
    assert SECRET not in run("import os\nprint(dict(os.environ))")


@needs("files", "other processes")
def test_it_finds_no_secret_of_the_parent(enforced: None, victim) -> None:
    pids = (os.getpid(), victim.pid, "1", "self", "thread-self")
    reads = (f"open('/proc/{pid}/{name}', 'rb').read()" for pid in pids for name in ("environ", "cmdline", "maps"))
    assert run(try_each(*reads, "open(f'/proc/{os.getppid()}/environ').read()")) == "done"


@needs("network")
def test_it_connects_to_nothing(enforced: None) -> None:
    name = f"\0rlkit-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(name)
        unix.listen()
        port = tcp.getsockname()[1]
        lines = (
            f"socket.create_connection(('127.0.0.1', {port}), 1)",
            f"socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port}))",
            f"s = socket.socket(socket.AF_UNIX); s.connect({name!r})",
            "socket.getaddrinfo('localhost', 80); socket.create_server(('127.0.0.1', 0))",
            "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)",
        )
        assert run(try_each(*lines)) == "done"
        tcp.setblocking(False)
        with pytest.raises(BlockingIOError):
            tcp.accept()


@needs("other processes")
def test_it_harms_no_process(enforced: None, victim) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE), resource.prlimit(victim.pid, resource.RLIMIT_NOFILE)
    # a number below 10 may be of the sandbox's own processes, which it may harm
    pids = [pid for pid in (os.getpid(), victim.pid) if pid > 10]
    lines = [
        line.format(pid)
        for pid in pids
        for line in (
            "os.kill({}, 9)", "os.kill({}, 0)", "os.killpg({}, 9)", "signal.pidfd_send_signal(os.pidfd_open({}), 9)",
            "must(libc.ptrace(16, {}, 0, 0))", "resource.prlimit({}, resource.RLIMIT_NOFILE, (0, 0))",
            "os.sched_setaffinity({}, [0])", "os.setpriority(os.PRIO_PROCESS, {}, 19)",
            "must(libc.tgkill({0}, {0}, 9))",
            "a, b = socket.socketpair(); fcntl.fcntl(a, fcntl.F_SETOWN, {}); fcntl.fcntl(a, 10, 9)",
        )
    ]  # fmt: skip
    assert run(try_each(*lines)) == "done"
    run("import os\nos.kill(os.getppid(), 9)\nos.kill(-1, 9)")
    run("import os\nos.kill(0, 9)")
    assert victim.poll() is None
    after = resource.getrlimit(resource.RLIMIT_NOFILE), resource.prlimit(victim.pid, resource.RLIMIT_NOFILE)
    assert after == limits


@needs("network")
def test_it_makes_no_way_around_the_sandbox(enforced: None) -> None:
    lines = (
        "must(libc.unshare(0x10000000))", "must(libc.unshare(0x20000))", "must(libc.setns(0, 0))",
        "must(libc.mount(b'none', b'.', b'tmpfs', 0, None))", "must(libc.shmget(0, 4096, 0o600))",
        "must(libc.ptrace(0, 0, 0, 0))", "os.memfd_create('x')", "must(libc.syscall(447, 0))", "os.setuid(0)",
        "os.mknod('x', 0o60600, os.makedev(254, 0))", "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
        "must(libc.syscall(425, 8, ctypes.create_string_buffer(256)))",  # io_uring_setup
    )  # fmt: skip
    assert run(try_each(*lines)) == "done"


@needs("process count")
def test_a_fork_bomb_ends(enforced: None) -> None:
    code = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"
    assert run(code, timeout=0.5) == "[stopped after 0.5 seconds]"


@needs("process count")
def test_threads_count_as_processes(enforced: None) -> None:
    code = (
        "import threading, time\nthreading.stack_size(2**16)\n"
        "for _ in range(20): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    )
    assert "can't start new thread" in run(code)


@needs("memory")
def test_ten_gigabytes_are_not_had(enforced: None) -> None:
    assert run("x = bytearray(10 * 2**30)").endswith("MemoryError")


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import time\ntime.sleep(60)",
        "import signal, time\nfor s in (2, 10, 15, 24): signal.signal(s, signal.SIG_IGN)\ntime.sleep(60)",
        "import os\nos.close(1); os.close(2)\nwhile True: pass",
        "while True: print('again')",
    ],
)
def test_nothing_lasts_beyond_the_deadline(code: str) -> None:
    assert run(code, timeout=0.7).endswith("[stopped after 0.7 seconds]")


DAEMON = """
import os, signal, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for s in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT): signal.signal(s, signal.SIG_IGN)
        {close}
        open("up", "w").close()
        time.sleep(20)
        print("outlived")
    os._exit(0)
while not os.path.exists("up"): time.sleep(0.01)
print("started")
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("close", ["os.closerange(0, 99)", "pass"])
def test_a_daemon_does_not_outlive_the_call(close: str) -> None:
    """Nor does the call last until its deadline."""
    assert run(DAEMON.format(close=close), timeout=1200) == "started"  # and `run` has looked for what is left


def test_a_cancelled_call_leaves_nothing() -> None:
    tool = bound()

    async def cancel() -> str:
        state: dict = {}
        await tool.create(state)
        call = asyncio.create_task(tool.call({"code": DAEMON.format(close="pass") + "time.sleep(60)"}, state))
        while not Path(state["folder"], "up").exists():
            await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        return state["folder"]

    folder = asyncio.run(cancel())
    assert not left_of(folder)
    tool.close()
    assert not Path(folder).exists()


def test_a_gigabyte_of_output_costs_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    limited = ("/bin/sh", "-c", 'ulimit -v 524288 && exec "$0" "$@"')  # KiB
    monkeypatch.setattr(rlkit_tool_python, "SANDBOX", (*limited, *rlkit_tool_python.SANDBOX))
    code = "import os\nfor _ in range(2**10): os.write(1, b'x' * 2**20)\nprint('end')"
    answer = run(code, output_chars=1000)
    assert answer == "x" * 500 + "\n[... output cut ...]\n" + "x" * 496 + "end"


def test_a_file_has_a_largest_size() -> None:
    assert "File too large" in run("with open('big', 'wb') as f:\n    for _ in range(5): f.write(bytes(2**20))")


def test_nothing_in_its_folder_outlives_the_conversation() -> None:
    code = (
        "import os\nos.symlink('/usr', 'usr')\nos.mkdir('shut')\nopen('shut/file', 'w').close()\n"
        "for _ in range(300):\n    os.mkdir('deep')\n    os.chdir('deep')\n"
    )
    tool = bound()
    assert run(code, tool) == "[no output]"
    assert sorted(os.listdir(tool.folder))[-1] == "view"
    tool.close()
    assert not tool.folder.exists()
    assert Path("/usr/bin").exists()
