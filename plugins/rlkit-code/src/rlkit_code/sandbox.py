"""What the kernel offers to confine a process: namespaces, another user, Landlock, filters of system calls.

It runs in a process of its own that is about to become foreign code, and imports only the standard library.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import signal
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
OPEN_FILES = 256
"""More files than a process has open that prepares a sandbox."""

LIBC = ctypes.CDLL(None, use_errno=True)
NEWNS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = 2, 4, 4096, 16384, 1 << 18, 2
MOUNT_RDONLY, MOUNT_NOSUID, MOUNT_NODEV, AT_FDCWD, AT_RECURSIVE = 1, 2, 4, -100, 0x8000
PDEATHSIG, SECCOMP, SUBREAPER, NO_NEW_PRIVS = 1, 22, 36, 38
MOUNT_SETATTR, LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 442, 444, 445, 446

MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""The audit name of an architecture, and which of two system call numbers is its own."""

REFUSED = {
    "io_uring_setup": (425, 425),  # which opens sockets too
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
SOCKET, FCNTL, IOCTL, CLONE, CLONE3, PIVOT_ROOT = (41, 198), (72, 25), (16, 29), (56, 220), (435, 435), (155, 41)
FAMILIES = (1, 2, 10, 16)
"""Of sockets that a network namespace confines: Unix, IPv4, IPv6, netlink."""

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
    """Return the paths that the code may read: this Python with its packages, the system's programs and libraries."""
    python = {p for prefix in (sys.prefix, sys.base_prefix) for p in (prefix, os.path.realpath(prefix))}
    system = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache")
    return [path for path in (*system, *sorted(python)) if os.path.exists(path)]


def bind(source: str, target: str) -> None:
    """Show a file or folder at another place as well."""
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    elif not os.path.exists(target):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        open(target, "a", encoding="utf-8").close()
    kernel("mount", source.encode(), target.encode(), None, MS_BIND | MS_REC, None)


def restrict_mount(path: str, attributes: int, *, below: bool = True) -> None:
    """Take rights from a mount, and from those below it."""
    request = struct.pack("QQQQ", attributes, 0, 0, 0)
    kernel("syscall", MOUNT_SETATTR, AT_FDCWD, path.encode(), AT_RECURSIVE if below else 0, request, len(request))


def restrict_limits(limits: dict[int, int]) -> None:
    """Set limits of this process and its children, where they are not lower already."""
    for name, value in limits.items():
        _, highest = resource.getrlimit(name)
        lower = value if highest == resource.RLIM_INFINITY else min(value, highest)
        resource.setrlimit(name, (lower, lower))


def unshare(namespaces: int) -> None:
    """Enter new namespaces; an ordinary user enters a user namespace with them, and keeps the own number in it."""
    user, group = os.geteuid(), os.getegid()
    kernel("unshare", namespaces | (NEWUSER if user else 0))
    if user:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(text)


def separate(
    folder: str, view: str, readable: Sequence[str], scratch_mb: int = 0, mounts: Mapping[str, str] | None = None
) -> None:
    """Enter new namespaces, in which there are no other processes, no network and only the files of the view.

    Args:
        folder: May be written to.
        view: An empty folder to build the view in.
        readable: Files and folders that may be read.
        scratch_mb: Size of /tmp and of /dev/shm; at 0 there are none, and no folder for /proc.
        mounts: More folders that may be written to, by the path at which they are.
    """
    unshare(NEWNS | NEWPID | NEWNET | NEWIPC)
    kernel("mount", None, b"/", None, MS_REC | MS_PRIVATE, None)  # or the machine would see what follows
    kernel("mount", b"none", view.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, b"size=1m,mode=755")
    for path in ("/tmp", "/dev/shm") if scratch_mb else ():
        os.makedirs(view + path)
        options = f"size={scratch_mb}m,mode=1777".encode()
        kernel("mount", b"none", (view + path).encode(), b"tmpfs", MS_NOSUID | MS_NODEV, options)
    for path in (*readable, *DEVICES):
        bind(path, view + path)
        restrict_mount(view + path, MOUNT_RDONLY | MOUNT_NOSUID)
    for path, source in ({folder: folder} | dict(mounts or {})).items():
        bind(source, view + path)
        restrict_mount(view + path, MOUNT_NOSUID | MOUNT_NODEV)
    if scratch_mb:
        os.makedirs(f"{view}/proc")
        for name, target in {"fd": "", "stdin": "/0", "stdout": "/1", "stderr": "/2"}.items():
            os.symlink(f"/proc/self/fd{target}", f"{view}/dev/{name}")
    restrict_mount(view, MOUNT_RDONLY | MOUNT_NOSUID, below=False)
    os.chdir(view)
    kernel("syscall", PIVOT_ROOT[MACHINES[platform.machine()][1]], b".", b".")
    kernel("umount2", b".", MNT_DETACH)
    os.chdir("/")


def become(user: int) -> None:
    """Be a user who owns nothing on this machine but the folder."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def drop_rights() -> None:
    """Drop all capabilities, and those that a program could gain; die with the parent."""
    kernel("prctl", NO_NEW_PRIVS, 1, 0, 0, 0)
    kernel("capset", struct.pack("Ii", 0x20080522, 0), bytes(24))
    kernel("prctl", PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def landlock(folder: str, readable: Sequence[str], *, owner: bool) -> None:
    """Drop access to all files but the folder, what is readable and the devices."""
    version = kernel("syscall", LANDLOCK_CREATE, None, 0, 1)
    if version < 3 and owner:
        raise OSError(f"Landlock {version} lets an owner's files be truncated, expected 3 or later (Linux 6.2)")
    all_rights = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    execute, write_file, read_file, read_folder = 1, 2, 4, 8
    ruleset = kernel("syscall", LANDLOCK_CREATE, struct.pack("Q", all_rights), 8, 0)
    rights = {path: execute | read_file | (read_folder if os.path.isdir(path) else 0) for path in readable}
    rights |= dict.fromkeys(DEVICES, read_file | write_file) | {folder: all_rights}
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


def rules(*, owner: bool, sockets: bool = False) -> Rules:
    """Return the rules of system calls.

    Args:
        owner: The user's files and processes are in reach.
        sockets: Allow those of `FAMILIES`.
    """
    refuse: list[Instruction] = [(RETURN, 0, 0, REFUSE)]
    set_owner, set_signal, set_owner_ex, fiosetown, siocspgrp, tiocsti = 8, 10, 15, 0x8901, 0x8902, 0x5412
    chosen: Rules = dict.fromkeys(REFUSED.values(), refuse)
    family = branch(0, [(EQUAL, family) for family in FAMILIES], ALLOW, REFUSE)
    chosen |= {
        SOCKET: family if sockets else refuse,
        CLONE: branch(0, [(ANY_BIT, NEWUSER)], REFUSE, ALLOW),
        CLONE3: [(RETURN, 0, 0, ABSENT)],  # its flags are out of a filter's sight; C libraries go on to clone
        FCNTL: branch(1, [(EQUAL, c) for c in (set_owner, set_signal, set_owner_ex)], REFUSE, ALLOW),
        IOCTL: branch(1, [(EQUAL, c) for c in (fiosetown, siocspgrp, tiocsti)], REFUSE, ALLOW),
    }
    if owner:
        own = branch(0, [(EQUAL, 0), (EQUAL, os.getpid())], ALLOW, REFUSE)
        chosen |= dict.fromkeys(OWN_PID_ONLY.values(), own) | dict.fromkeys(REFUSED_TO_OWNERS.values(), refuse)
    return chosen


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


def wait_for(worker: int) -> int:
    """Reap whatever ends until the worker has, or is stopped; return its exit status, 128 and more for a signal.

    A stopped worker would hold its place until its deadline: foreign code that it has started can stop it.
    """
    while True:
        pid, status = os.waitpid(-1, os.WUNTRACED)
        if pid == worker:
            code = -os.WSTOPSIG(status) if os.WIFSTOPPED(status) else os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def end_all(first: int | None = None) -> None:
    """Kill all descendants, or where /proc is out of reach the first; orphans have become this process's children."""
    while True:
        children = [first]
        if first is None:
            with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
                children = [int(pid) for pid in file.read().split()]
        try:
            for pid in filter(None, children):
                os.kill(pid, signal.SIGKILL)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)
