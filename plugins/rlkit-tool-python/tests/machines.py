"""Runs Python as on a machine of another kind: `python machines.py KIND... -- arguments`.

ordinary        as a user who is not root
no-mounts       where namespaces can be made, but nothing be mounted in them, as on Ubuntu 24.04
no-namespaces   where namespaces cannot be made, as in most containers
bare            where neither they nor Landlock nor system call filters are to be had
"""

from __future__ import annotations

import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from rlkit_code import sandbox

PACKAGES = [Path(find_spec(name).origin).resolve().parents[1] for name in ("rlkit", "rlkit_tool_python")]
USER = 50_000 + os.getpid() % 10_000
MOUNT, PRCTL, SECCOMP_CALL, LANDLOCK = (165, 40), (157, 167), (317, 277), (444, 444)
REFUSE = [(sandbox.RETURN, 0, 0, sandbox.REFUSE)]
ABSENT = [(sandbox.RETURN, 0, 0, sandbox.ABSENT)]
REFUSED = {
    "no-mounts": {MOUNT: REFUSE},
    "no-namespaces": {sandbox.REFUSED["unshare"]: REFUSE},
    "bare": {
        sandbox.REFUSED["unshare"]: REFUSE,
        LANDLOCK: ABSENT,
        SECCOMP_CALL: ABSENT,
        PRCTL: sandbox.branch(0, [(sandbox.EQUAL, sandbox.SECCOMP)], sandbox.REFUSE, sandbox.ALLOW),
    },
}


def closed(path: Path) -> Path | None:
    """Return the first folder on the way to a path that only its owner may enter."""
    way = [*reversed(path.parents), path]
    return next((folder for folder in way if not folder.stat().st_mode & 0o001), None)


def open_to_all(paths: list[Path]) -> None:
    """Let every user reach these folders, in a view of the files that only this process and its children have."""
    hidden = [path for path in paths if closed(path)]
    if not hidden:
        return
    sandbox.kernel("unshare", sandbox.NEWNS)
    sandbox.kernel("mount", None, b"/", None, sandbox.MS_REC | sandbox.MS_PRIVATE, None)
    aside = tempfile.mkdtemp()
    sandbox.kernel("mount", b"none", aside.encode(), b"tmpfs", 0, b"mode=755")
    for path in hidden:
        sandbox.bind(str(path), aside + str(path))
    for top in {closed(path) for path in hidden}:
        sandbox.bind(f"{aside}{top}", str(top))
    sandbox.kernel("umount2", aside.encode(), sandbox.MNT_DETACH)
    os.rmdir(aside)


def main() -> None:
    """Become as told, then run Python."""
    kinds, arguments = sys.argv[1 : sys.argv.index("--")], sys.argv[sys.argv.index("--") + 1 :]
    if os.geteuid() == 0:
        open_to_all([Path(p).resolve() for p in (sys.prefix, sys.base_prefix, Path(__file__).parent, *PACKAGES)])
    sandbox.kernel("prctl", sandbox.NO_NEW_PRIVS, 1, 0, 0, 0)
    for kind in kinds:
        if kind in REFUSED:
            sandbox.filter_calls(REFUSED[kind])
    if "ordinary" in kinds and os.geteuid() == 0:
        sandbox.become(USER)
    os.execv(sys.executable, (sys.executable, *arguments))


if __name__ == "__main__":
    main()
