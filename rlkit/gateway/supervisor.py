"""Runs an agent's command and outlives it: `python supervisor.py SPEC`, with a pipe from the trainer as standard input.

SPEC is a JSON object: `command`, `memory_mb`, `processes`, `file_mb`, `output_bytes`. Once the command has ended, the
trainer closes the pipe or dies, or a limit is exceeded, all descendants are killed, and a JSON object is written:
`status`, the command's, and `output`, the end of what it wrote. It imports only the standard library.

Where the kernel allows it, the command has a PID namespace: whatever lives there dies with its first process.
"""

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import sys
import time

LIBC = ctypes.CDLL(None, use_errno=True)
PDEATHSIG, SUBREAPER = 1, 36
NEWUSER, NEWPID = 0x10000000, 0x20000000
WATCH_SECONDS = 0.05
PAGE = resource.getpagesize()


def separate() -> bool:
    """Start processes in a PID namespace from now on; return whether the kernel allows it."""
    user, group = os.geteuid(), os.getegid()
    if LIBC.unshare(NEWPID | (NEWUSER if user else 0)):
        return False
    if user:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(text)
    return True


def first(command: list[str], output: int, file_mb: int) -> None:
    """Be the first process of the namespace: start the command, reap whatever ends, exit as the command does."""
    LIBC.prctl(PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    child = os.fork()
    if child == 0:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.closerange(3, 256)
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_mb << 20, file_mb << 20))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        try:
            os.execvp(command[0], command)
        except OSError as error:
            os.write(2, f"{command[0]}: {error.strerror}\n".encode())
            os._exit(127)
    os.closerange(0, 256)
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


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


def excess(root: int, memory_mb: int, processes: int) -> str | None:
    """Return which limit the command exceeds, if any."""
    memory = descendants(root)
    if len(memory) > processes + 1:
        return f"it had {len(memory) - 1} processes, expected at most {processes}"
    used = sum(memory.values()) >> 20
    return f"it used {used} MiB, expected at most {memory_mb}" if used > memory_mb else None


def end_all() -> None:
    """Kill all descendants; those whose parent is gone have become this process's children."""
    while True:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            children = [int(pid) for pid in file.read().split()]
        try:
            for pid in children:
                os.kill(pid, signal.SIGKILL)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)


def main(spec: dict) -> None:  # type: ignore[type-arg]
    """Run the command, within its limits, until it ends or the trainer closes the pipe."""
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")  # a machine short of memory kills agents before the trainer
    LIBC.prctl(SUBREAPER, 1, 0, 0, 0)
    separate()
    output, output_end = os.pipe()
    root = os.fork()
    if root == 0:
        first(spec["command"], output_end, spec["file_mb"])
    os.close(output_end)
    ended = os.pidfd_open(root)
    ready = select.poll()
    for descriptor in (0, output, ended):
        ready.register(descriptor, select.POLLIN)
    tail, status, problem, watched = bytearray(), -int(signal.SIGKILL), None, 0.0
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
        if time.monotonic() - watched > WATCH_SECONDS:
            problem = excess(root, spec["memory_mb"], spec["processes"])
            watched = time.monotonic()
    end_all()
    os.set_blocking(output, False)
    with contextlib.suppress(BlockingIOError):
        while chunk := os.read(output, 2**16):
            tail = (tail + chunk)[-spec["output_bytes"] :]
    text = tail.decode(errors="replace") + (f"\n[rlkit] killed: {problem}\n" if problem else "")
    sys.stdout.write(json.dumps({"status": status, "output": text}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
