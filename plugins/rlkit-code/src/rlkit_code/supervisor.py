"""Runs a command and outlives it: a process of its own, with a pipe from the trainer as standard input.

The first line of the pipe is a JSON object: `command`, `folder`, `memory_mb`, `processes`, `file_mb`, `disk_mb`,
`output_bytes`, `readable`, and `sandbox`, null or `view`, `user`, `port` and `mounts`. Once the command has ended, the
trainer closes the pipe or dies, or a limit is exceeded, all descendants are killed, and a JSON object is written:
`status`, the command's, `output`, the end of what it wrote, and `problem`, why it could not be confined. It imports
only the standard library.

    supervisor     keeps the limits, relays connections, kills what is left
      gate         makes the namespaces
        first      process 1 of the new namespace: whatever else lives there dies with it
          command  a program without rights
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import select
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from rlkit_code import sandbox

Spec = dict[str, Any]
"""What a command may do, as JSON holds it."""

HOST = "127.0.0.1"
LOOPBACK_UP = b"lo".ljust(16, b"\0") + (1).to_bytes(2, sys.byteorder) + bytes(22)
SIOCSIFFLAGS = 0x8914
OPEN_CONNECTIONS = 64
"""Of a command at once; more wait."""
TASKS_PER_PROCESS = 8
"""Threads that the kernel allows for each process of the limit, which is a fork bomb's first wall."""
SCRATCH_SHARE = 8
"""/tmp and /dev/shm have this part of the memory each."""
WATCH_SECONDS = 0.05
DISK_SHARE = 0.1
"""Of the time in which the folder's size is measured."""
BLOCK = 4096
PAGE = resource.getpagesize()


def listen(port: int) -> socket.socket:
    """Return a socket at the gateway's port in this network namespace."""
    with socket.socket() as control:
        fcntl.ioctl(control, SIOCSIFFLAGS, LOOPBACK_UP)
    return socket.create_server((HOST, port))


def gate(spec: Spec, output: int, parent: socket.socket) -> int:
    """Make the namespaces; start the first process in them; return the command's exit status."""
    sandbox.kernel("prctl", sandbox.PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    confined = spec["sandbox"]
    if confined is None:
        with contextlib.suppress(OSError):
            sandbox.unshare(sandbox.NEWPID)
    else:
        if confined["user"] is not None:
            for folder in folders(spec):
                give_files(folder, confined["user"])
        scratch_mb = max(1, spec["memory_mb"] // SCRATCH_SHARE)
        sandbox.separate(spec["folder"], confined["view"], spec["readable"], scratch_mb, confined["mounts"])
        if confined["port"] is not None:
            with listen(confined["port"]) as listener:
                socket.send_fds(parent, [b"listener"], [listener.fileno()])
    first = os.fork()
    if first == 0:
        guarded(begin, spec, output, parent)
    parent.close()
    return sandbox.wait_for(first)


def begin(spec: Spec, output: int, parent: socket.socket) -> int:
    """Be the first process of the namespace: start the command, reap whatever ends, return its exit status."""
    sandbox.kernel("prctl", sandbox.PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if spec["sandbox"] is not None:
        with contextlib.suppress(OSError):  # in a container whose /proc is masked there is none
            sandbox.kernel("mount", b"proc", b"/proc", b"proc", sandbox.MS_NOSUID | sandbox.MS_NODEV, None)
    command = os.fork()
    if command == 0:
        guarded(start, spec, output, parent)
    os.closerange(0, sandbox.OPEN_FILES)
    return sandbox.wait_for(command)


def start(spec: Spec, output: int, parent: socket.socket) -> int:
    """Drop all rights, then become the command."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.closerange(3, parent.fileno())
    os.closerange(parent.fileno() + 1, sandbox.OPEN_FILES)
    os.chdir(working_folder(spec))
    file_bytes = spec["file_mb"] << 20
    limits = {resource.RLIMIT_FSIZE: file_bytes, resource.RLIMIT_CORE: 0}
    if spec["sandbox"] is not None:
        limits[resource.RLIMIT_NPROC] = spec["processes"] * TASKS_PER_PROCESS
        limits[resource.RLIMIT_MSGQUEUE] = 0
    sandbox.restrict_limits(limits)
    if spec["sandbox"] is not None:
        if spec["sandbox"]["user"] is not None:
            sandbox.become(spec["sandbox"]["user"])
        sandbox.drop_rights()
        sandbox.filter_calls(sandbox.rules(owner=False, sockets=True))
    words = spec["command"]
    try:
        os.execvp(words[0], words)
    except OSError as error:
        os.write(2, f"{words[0]}: {error.strerror}\n".encode())
    return 127


def guarded(function: Callable[..., int], spec: Spec, output: int, parent: socket.socket) -> None:
    """Exit with what a function returns; an error of the system goes to the supervisor."""
    status = 1
    try:
        status = function(spec, output, parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            parent.send(f"problem {error.strerror or error}".encode())
    finally:
        os._exit(status)


def folders(spec: Spec) -> list[str]:
    """Return the folders that the command may write to, outside its sandbox."""
    return list(dict.fromkeys((spec["folder"], *mounts(spec).values())))


def working_folder(spec: Spec) -> str:
    """Return the path at which the command begins: that of a mount of its folder, if there is one."""
    folder: str = spec["folder"]
    return next((path for path, source in mounts(spec).items() if source == folder), folder)


def mounts(spec: Spec) -> dict[str, str]:
    """Return more folders that the command may write to, by the path at which it finds them."""
    return {} if spec["sandbox"] is None else dict(spec["sandbox"]["mounts"])


def give_files(folder: str, user: int) -> None:
    """Let a user own a folder with all that is in it."""
    os.chown(folder, user, user)
    for path, folders, files in os.walk(folder):
        for name in (*folders, *files):
            os.chown(f"{path}/{name}", user, user, follow_symlinks=False)


def hear(child: socket.socket) -> tuple[socket.socket | None, str | None]:
    """Return the socket at which the command is to reach the gateway, and why it cannot be confined."""
    listener = problem = None
    while True:
        message, descriptors, _, _ = socket.recv_fds(child, 2**12, 1)
        if descriptors:
            listener = socket.socket(fileno=descriptors[0])
        elif message:
            problem = message.decode().removeprefix("problem ")
        else:
            return listener, problem


def relay(listener: socket.socket, port: int) -> None:
    """Carry the command's connections to the gateway's port in this network namespace."""
    slots = threading.BoundedSemaphore(OPEN_CONNECTIONS)

    def carry(inside: socket.socket) -> None:
        with contextlib.suppress(OSError), inside, socket.create_connection((HOST, port)) as gateway:
            answering = threading.Thread(target=pump, args=(gateway, inside), daemon=True)
            answering.start()
            pump(inside, gateway)
            answering.join()
        slots.release()

    while True:
        slots.acquire()
        inside, _ = listener.accept()
        threading.Thread(target=carry, args=(inside,), daemon=True).start()


def pump(source: socket.socket, target: socket.socket) -> None:
    """Send on what comes from a connection until it ends."""
    with contextlib.suppress(OSError):
        data = source.recv(2**16)
        while data:
            target.sendall(data)
            data = source.recv(2**16)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def descendants(root: int) -> dict[int, int]:
    """Return the memory in bytes of a process and all its descendants, by their numbers."""
    parents, memory = {}, {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
            parents[int(name)], memory[int(name)] = int(fields[1]), int(fields[21]) * PAGE
    family = {root}
    generation = family
    while generation:
        generation = {pid for pid, parent in parents.items() if parent in generation} - family
        family |= generation
    return {pid: memory.get(pid, 0) for pid in family}


def entries(folder: str, mode: int | None = None) -> Iterator[os.DirEntry[str]]:
    """Yield all files and folders in a folder, without those that cannot be read; folders get a mode before."""
    paths = [folder]
    while paths:
        with contextlib.suppress(OSError), os.scandir(paths.pop()) as scan:
            for entry in list(scan):
                if entry.is_dir(follow_symlinks=False):
                    if mode is not None:
                        os.chmod(entry.path, mode)
                    paths.append(entry.path)
                yield entry


def disk_use(folder: str) -> int:
    """Return the bytes of a folder on the disk; each file has at least one block."""
    total = 0
    for entry in entries(folder):
        with contextlib.suppress(OSError):
            total += max(BLOCK, entry.stat(follow_symlinks=False).st_blocks * 512)
    return total


def sweep(folder: str, readable: list[str]) -> None:
    """Leave in a folder what is safe to read: files, folders, and links within it or to what the command might read."""
    targets = tuple(os.path.realpath(path) + os.sep for path in (folder, *readable))
    with contextlib.suppress(OSError):
        os.chmod(folder, 0o700)
    for entry in entries(folder, 0o700):
        with contextlib.suppress(OSError):
            kind = entry.stat(follow_symlinks=False).st_mode
            if stat.S_ISREG(kind):
                os.chmod(entry.path, 0o600 | kind & 0o100)
            elif stat.S_ISLNK(kind):
                if not (os.path.realpath(entry.path) + os.sep).startswith(targets):
                    os.unlink(entry.path)
            elif not stat.S_ISDIR(kind):
                os.unlink(entry.path)


class Watch:
    """Watches the limits of a command.

    Args:
        spec: The limits and the folder.
        root: The process that has it as a descendant, two generations below.
    """

    def __init__(self, spec: Spec, root: int) -> None:
        self.spec = spec
        self.root = root
        self._next = self._next_disk = 0.0

    def excess(self) -> str | None:
        """Return the limit that the command exceeds, if any; checks at most once in a while."""
        now = time.monotonic()
        if now < self._next:
            return None
        self._next = now + WATCH_SECONDS
        memory = descendants(self.root)
        if len(memory) > self.spec["processes"] + 2:
            return f"it had {len(memory) - 2} processes, expected at most {self.spec['processes']}"
        used = sum(memory.values()) >> 20
        if used > self.spec["memory_mb"]:
            return f"it used {used} MiB of memory, expected at most {self.spec['memory_mb']}"
        if now < self._next_disk:
            return None
        used = sum(map(disk_use, folders(self.spec))) >> 20
        elapsed = time.monotonic() - now
        self._next_disk = now + max(WATCH_SECONDS, elapsed / DISK_SHARE)
        if used > self.spec["disk_mb"]:
            return f"its folder had {used} MiB, expected at most {self.spec['disk_mb']}"
        return None


def supervise(spec: Spec, root: int, output: int) -> Spec:
    """Read what the command writes until it ends or has to; kill what is left; return the report."""
    ended = os.pidfd_open(root)
    ready = select.poll()
    for descriptor in (0, output, ended):
        ready.register(descriptor, select.POLLIN)
    watch = Watch(spec, root)
    tail, status, problem = bytearray(), -int(signal.SIGKILL), None
    while problem is None:
        events = dict(ready.poll(1000 * WATCH_SECONDS))
        if output in events:
            chunk = os.read(output, 2**16)
            tail = (tail + chunk)[-spec["output_bytes"] :]
            if not chunk:
                ready.unregister(output)
        if ended in events:
            result = os.waitid(os.P_PIDFD, ended, os.WEXITED | os.WNOWAIT)
            status = status if result is None else result.si_status
            break
        if 0 in events and not os.read(0, 1):
            break
        problem = watch.excess()
    sandbox.end_all()
    os.set_blocking(output, False)
    with contextlib.suppress(BlockingIOError):
        while chunk := os.read(output, 2**16):
            tail = (tail + chunk)[-spec["output_bytes"] :]
    text = tail.decode(errors="replace") + (f"\n[rlkit] killed: {problem}\n" if problem else "")
    return {"status": status, "output": text, "problem": None}


def main() -> None:
    """Run the command, within its limits, until it ends or the trainer closes the pipe."""
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")  # a machine short of memory kills commands before the trainer
    sandbox.kernel("prctl", sandbox.SUBREAPER, 1, 0, 0, 0)
    spec = json.loads(sys.stdin.buffer.readline())
    if spec["sandbox"] is not None:
        os.mkdir(spec["sandbox"]["view"])
    output, output_end = os.pipe()
    child, parent = socket.socketpair()
    root = os.fork()
    if root == 0:
        child.close()
        guarded(gate, spec, output_end, parent)
    os.close(output_end)
    parent.close()
    listener, problem = hear(child)
    if problem is None:
        if listener is not None:
            threading.Thread(target=relay, args=(listener, spec["sandbox"]["port"]), daemon=True).start()
        report = supervise(spec, root, output)
    else:
        sandbox.end_all()
        report = {"status": 1, "output": "", "problem": problem}
    for folder in folders(spec):
        sweep(folder, spec["readable"])
    if spec["sandbox"] is not None:
        os.rmdir(spec["sandbox"]["view"])
    os.write(1, json.dumps(report).encode())
    os._exit(0)
