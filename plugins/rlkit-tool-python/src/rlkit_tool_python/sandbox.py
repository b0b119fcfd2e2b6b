"""Runs a piece of Python where it can do no harm: a script, started afresh for each piece.

It reads a JSON object (`code`, `folder`, `view`, `user`, the limits, `layers`) and writes one: `layers`, those that
took; `failed`, why the others did not; `output`, what the code wrote; `ended`, how.

    supervisor     makes the namespaces, keeps the time, reads the output, kills what is left
      first        process 1 of the new namespace: whatever else lives there dies with it
        worker     gives up its rights for good, then runs the code

Two layers can hide the machine's files and processes: `namespaces`, and where those are refused `landlock`. `user`
(where rlkit runs as root) and `seccomp` are added to either. If `layers` is not null and others took, nothing is run.
"""

from __future__ import annotations

import ast
import ctypes
import json
import linecache
import os
import platform
import resource
import select
import signal
import struct
import sys
import time
import traceback
import types
from collections.abc import Callable, Sequence
from typing import Any

CELL = "<cell>"
FRAMES = 4
"""Number of innermost calls that a traceback shows."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
OPEN_FILES = 256
"""How many files the code may have open, and more than this script ever has."""

LIBC = ctypes.CDLL(None, use_errno=True)
NEWNS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = 2, 4, 4096, 16384, 1 << 18, 2
MOUNT_RDONLY, MOUNT_NOSUID, MOUNT_NODEV, AT_FDCWD, AT_RECURSIVE = 1, 2, 4, -100, 0x8000
PDEATHSIG, SECCOMP, SUBREAPER, NO_NEW_PRIVS = 1, 22, 36, 38
MOUNT_SETATTR, LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 442, 444, 445, 446

MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""The audit name of an architecture, and which of two system call numbers is its own."""

REFUSED = {
    "socket": (41, 198), "io_uring_setup": (425, 425),  # io_uring opens sockets too
    "unshare": (272, 97), "setns": (308, 268),  # a new user namespace gives its owner all capabilities
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "pidfd_getfd": (438, 438),
    "memfd_create": (319, 279), "memfd_secret": (447, 447),  # memory that no limit counts, and that others may share:
    "mq_open": (240, 180),
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "semget": (64, 190), "semop": (65, 193),
    "semtimedop": (220, 192), "semctl": (66, 191), "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "open_by_handle_at": (304, 265),
}  # fmt: skip
OWN_PID_ONLY = {
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "prlimit64": (302, 261), "sched_setaffinity": (203, 122),
    "sched_setparam": (142, 118), "sched_setscheduler": (144, 119), "sched_setattr": (314, 274),
    "migrate_pages": (256, 238), "move_pages": (279, 239),
}  # fmt: skip
"""Calls on a process, where the user's others are in reach: their first argument may be 0 or the own number."""
REFUSED_TO_OWNERS = {
    "pidfd_send_signal": (424, 424), "process_madvise": (440, 440), "setpriority": (141, 140), "ioprio_set": (251, 30),
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None),
    "futimesat": (261, None), "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "setxattrat": (463, 463), "removexattrat": (466, 466), "file_setattr": (469, 469),
}  # fmt: skip
"""Calls, where the user's processes and files are in reach, that a number cannot make safe or Landlock does not see."""
FCNTL, IOCTL, CLONE, CLONE3, PIVOT_ROOT = (72, 25), (16, 29), (56, 220), (435, 435), (155, 41)

LOAD, EQUAL, ANY_BIT, AT_LEAST, RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
ALLOW, REFUSE, ABSENT, KILL = 0x7FFF0000, 0x50001, 0x50026, 0x80000000


def kernel(name: str, *arguments: Any) -> int:
    """Call a function of the C library; raise OSError where it fails."""
    converted = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result: int = getattr(LIBC, name)(*converted)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
    return result


def readable() -> list[str]:
    """Return what the code may read: this Python with its packages, and the system's programs and libraries."""
    python = {p for prefix in (sys.prefix, sys.base_prefix) for p in (prefix, os.path.realpath(prefix))}
    system = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache")
    return [path for path in (*system, *sorted(python)) if os.path.exists(path)]


def bind(source: str, target: str) -> None:
    """Show a file or folder at another place as well."""
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        open(target, "a", encoding="utf-8").close()
    kernel("mount", source.encode(), target.encode(), None, MS_BIND | MS_REC, None)


def restrict_mount(path: str, attributes: int) -> None:
    """Take rights from a mount and all below it."""
    wanted = struct.pack("QQQQ", attributes, 0, 0, 0)
    kernel("syscall", MOUNT_SETATTR, AT_FDCWD, path.encode(), AT_RECURSIVE, wanted, len(wanted))


def separate(folder: str, view: str) -> None:
    """Enter new namespaces, in which there are no other processes, no network and only the files of the view.

    `view` is an empty folder to build it in. There is no /proc in it, /proc being about the machine.
    """
    user, group = os.geteuid(), os.getegid()
    kernel("unshare", NEWNS | NEWPID | NEWNET | NEWIPC | (NEWUSER if user else 0))
    if user:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(text)
    kernel("mount", None, b"/", None, MS_REC | MS_PRIVATE, None)  # or the machine would see what follows
    kernel("mount", b"none", view.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, b"size=1m,mode=755")
    for path in (*readable(), *DEVICES):
        bind(path, view + path)
    os.makedirs(view + folder, exist_ok=True)
    restrict_mount(view, MOUNT_RDONLY | MOUNT_NOSUID)
    bind(folder, view + folder)
    restrict_mount(view + folder, MOUNT_NOSUID | MOUNT_NODEV)
    os.chdir(view)
    kernel("syscall", PIVOT_ROOT[MACHINES[platform.machine()][1]], b".", b".")
    kernel("umount2", b".", MNT_DETACH)
    os.chdir("/")


def limit(spec: dict[str, Any]) -> None:
    """Set the limits of every process of the code."""
    limits = {
        resource.RLIMIT_AS: spec["memory_mb"] * 2**20,
        resource.RLIMIT_CPU: int(spec["seconds"]) + 1,
        resource.RLIMIT_NPROC: spec["processes"] + (0 if spec["user"] else 2),  # with the two above the worker
        resource.RLIMIT_FSIZE: spec["file_mb"] * 2**20,
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_MEMLOCK: 0,
    }
    for name, value in limits.items():
        _, highest = resource.getrlimit(name)
        lower = value if highest == resource.RLIM_INFINITY else min(value, highest)
        resource.setrlimit(name, (lower, lower))


def become(user: int) -> None:
    """Be a user who owns nothing on this machine but the folder."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def landlock(folder: str, *, owner: bool) -> None:
    """Drop access to all files but the folder, what is readable and the devices."""
    version = kernel("syscall", LANDLOCK_CREATE, None, 0, 1)
    if version < 3 and owner:
        raise OSError(f"Landlock {version} lets an owner's files be truncated, expected 3 or later (Linux 6.2)")
    every = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    execute, write_file, read_file, read_folder = 1, 2, 4, 8
    ruleset = kernel("syscall", LANDLOCK_CREATE, struct.pack("Q", every), 8, 0)
    rights = {path: execute | read_file | (read_folder if os.path.isdir(path) else 0) for path in readable()}
    rights |= dict.fromkeys(DEVICES, read_file | write_file) | {folder: every}
    for path, allowed in rights.items():
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        kernel("syscall", LANDLOCK_ADD, ruleset, 1, struct.pack("=Qi", allowed, descriptor), 0)
        os.close(descriptor)
    kernel("syscall", LANDLOCK_RESTRICT, ruleset, 0)
    os.close(ruleset)


Instruction = tuple[int, int, int, int]
"""Of a system call filter: what to do, how far to jump if it holds and if not, and its number."""
Rules = dict[tuple[int, int | None], list[Instruction]]
"""What becomes of a system call, by its numbers."""


def branch(argument: int, tests: Sequence[tuple[int, int]], hit: int, miss: int) -> list[Instruction]:
    """Return `hit` if any test holds of the lower half of an argument, otherwise `miss`."""
    jumps = [(test, len(tests) - i, 0, value) for i, (test, value) in enumerate(tests)]
    return [(LOAD, 0, 0, 16 + 8 * argument), *jumps, (RETURN, 0, 0, miss), (RETURN, 0, 0, hit)]


def rules(*, owner: bool) -> Rules:
    """Return the rules of the code's system calls; `owner`: of a user whose files and processes are in reach."""
    refuse: list[Instruction] = [(RETURN, 0, 0, REFUSE)]
    set_owner, set_signal, set_owner_ex, fiosetown, siocspgrp, tiocsti = 8, 10, 15, 0x8901, 0x8902, 0x5412
    found: Rules = dict.fromkeys(REFUSED.values(), refuse)
    found |= {
        CLONE: branch(0, [(ANY_BIT, NEWUSER)], REFUSE, ALLOW),
        CLONE3: [(RETURN, 0, 0, ABSENT)],  # its flags are out of a filter's sight; C libraries go on to clone
        FCNTL: branch(1, [(EQUAL, c) for c in (set_owner, set_signal, set_owner_ex)], REFUSE, ALLOW),
        IOCTL: branch(1, [(EQUAL, c) for c in (fiosetown, siocspgrp, tiocsti)], REFUSE, ALLOW),
    }
    if owner:
        own = branch(0, [(EQUAL, 0), (EQUAL, os.getpid())], ALLOW, REFUSE)
        found |= dict.fromkeys(OWN_PID_ONLY.values(), own) | dict.fromkeys(REFUSED_TO_OWNERS.values(), refuse)
    return found


def filter_calls(rules: Rules) -> None:
    """Apply rules to this process and all its descendants; what they do not name is allowed."""
    audit, own = MACHINES[platform.machine()]
    program: list[Instruction] = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, audit), (RETURN, 0, 0, KILL)]
    program += [(LOAD, 0, 0, 0), (AT_LEAST, 0, 1, 0x40000000), (RETURN, 0, 0, ABSENT)]  # the x32 calls
    for numbers, body in rules.items():
        if numbers[own] is not None:
            program += [(EQUAL, 0, len(body), numbers[own] or 0), *body]
    program.append((RETURN, 0, 0, ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *instruction) for instruction in program))
    kernel("prctl", SECCOMP, 2, struct.pack("HP", len(program), ctypes.addressof(code)), 0, 0)


def give_up(spec: dict[str, Any], took: Callable[..., bool], *, separated: bool) -> None:
    """Drop permanently every right that the code must not have."""
    limit(spec)
    owner = not (spec["user"] and took("user", become, spec["user"])) and not separated
    kernel("prctl", NO_NEW_PRIVS, 1, 0, 0, 0)
    if not separated:
        took("landlock", landlock, spec["folder"], owner=owner)
    kernel("capset", struct.pack("Ii", 0x20080522, 0), bytes(24))
    kernel("prctl", PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    took("seccomp", filter_calls, rules(owner=owner))


def run(code: str) -> int:
    """Run code as a notebook runs a cell; return an exit status."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    sys.argv = [""]
    sys.path.insert(0, "")
    linecache.cache[CELL] = (len(code), None, code.splitlines(keepends=True), CELL)
    try:
        tree = ast.parse(code, CELL)
        last = [tree.body.pop()] if tree.body and isinstance(tree.body[-1], ast.Expr) else []
        steps = compile(tree, CELL, "exec"), compile(ast.Interactive(last), CELL, "single")  # which prints the value
        for step in steps:
            exec(step, vars(main))
    except SystemExit:
        raise
    except BaseException as error:
        trace = error.__traceback__
        while trace and trace.tb_frame.f_code.co_filename != CELL:
            trace = trace.tb_next
        sys.stderr.write("".join(traceback.format_exception(type(error), error, trace, limit=-FRAMES)))
        return 1
    return 0


def work(spec: dict[str, Any], report: dict[str, Any], took: Callable[..., bool], output: int, status: int) -> int:
    """Be the worker: give up all rights, say which layers took, run the code; return an exit status."""
    os.setsid()
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    status = os.dup2(status, 3)
    os.closerange(4, OPEN_FILES)
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
    os.chdir(spec["folder"])
    give_up(spec, took, separated="namespaces" in report["layers"])
    os.write(status, json.dumps(report).encode())
    os.close(status)
    return run(spec["code"]) if spec["layers"] in (None, report["layers"]) else 1


def wait_for(worker: int) -> int:
    """Reap whatever ends until the worker has; return its exit status, 128 and more for a signal."""
    while True:
        pid, status = os.wait()
        if pid == worker:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def end_all(first: int, *, separated: bool) -> None:
    """Kill all descendants; those whose parent is gone have become this process's children."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        children = [first]
        if not separated:
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


class Output:
    """The code's output, without its middle if it is long."""

    def __init__(self, descriptor: int, chars: int) -> None:
        self.descriptor = descriptor
        self.chars = chars
        self.kept = bytearray()

    def read(self) -> bool:
        """Read some of it; return whether there may be more."""
        chunk = os.read(self.descriptor, 2**16)
        self.kept += chunk
        enough = 4 * self.chars  # bytes, of which a character has at most four
        if len(self.kept) > 2 * enough:
            del self.kept[enough:-enough]
        return bool(chunk)

    def text(self) -> str:
        """Return at most so many characters, and a note where some are missing."""
        text = self.kept.decode(errors="replace")
        half = self.chars // 2
        return text if len(text) <= self.chars else f"{text[:half]}\n[... output cut ...]\n{text[len(text) - half :]}"


def supervise(first: int, output: Output, deadline: float, *, separated: bool) -> int | None:
    """Read what the code writes until it ends or the deadline passes; kill what is left; return its exit status."""
    ready = select.poll()
    ended = os.pidfd_open(first)
    ready.register(ended, select.POLLIN)
    ready.register(output.descriptor, select.POLLIN)
    status = None
    try:
        while (left := deadline - time.monotonic()) > 0:
            events = dict(ready.poll(1000 * left))
            if output.descriptor in events and not output.read():
                ready.unregister(output.descriptor)
            if ended in events:
                status = os.waitid(os.P_PIDFD, ended, os.WEXITED | os.WNOWAIT).si_status
                break
    finally:
        end_all(first, separated=separated)
    while output.read():
        pass
    return status


def main() -> int:
    """Run what standard input says."""
    started = time.monotonic()
    spec: dict[str, Any] = json.load(sys.stdin)
    report: dict[str, Any] = {"layers": [], "failed": {}}

    def took(layer: str, action: Callable[..., None], *args: Any, **kwargs: Any) -> bool:
        try:
            action(*args, **kwargs)
        except OSError as error:
            report["failed"][layer] = str(error)
            return False
        report["layers"].append(layer)
        return True

    with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")  # a machine short of memory kills this before the trainer
    kernel("prctl", PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    kernel("prctl", SUBREAPER, 1, 0, 0, 0)
    separated = took("namespaces", separate, spec["folder"], spec["view"])
    output, output_end = os.pipe()
    status, status_end = os.pipe()
    first = os.fork()
    if first == 0:
        kernel("prctl", PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        worker = os.fork()
        if worker == 0:
            return work(spec, report, took, output_end, status_end)
        os.closerange(0, OPEN_FILES)
        os._exit(wait_for(worker))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    os.close(output_end)
    os.close(status_end)
    written = Output(output, spec["output_chars"])
    ended = supervise(first, written, started + spec["seconds"], separated=separated)
    told = os.read(status, 2**16)
    print(json.dumps({**(json.loads(told) if told else report), "output": written.text(), "ended": ended}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
