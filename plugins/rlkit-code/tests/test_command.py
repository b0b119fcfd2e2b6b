"""Commands in their sandbox: real processes, files, links and connections."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from rlkit_code.command import Command, CommandLimits, environment_of_run

from rlkit.base.errors import RecipeError
from rlkit.base.folders import check_files, write_files

LIMITS = CommandLimits(memory_mb=256, processes=16, file_mb=8, disk_mb=16)


@pytest.fixture(scope="module", autouse=True)
def _needs_a_sandbox() -> None:
    """Skip where the machine confines nothing; fail if it has to."""
    try:
        Command("Part", "true", LIMITS, confined=True).check()
    except RecipeError as error:
        refuse = pytest.fail if os.environ.get("RLKIT_REQUIRE_SANDBOX") else pytest.skip
        refuse(str(error))


def python(code: str, folder: Path, *, port: int = 0, confined: bool = True) -> tuple[int, str]:
    """Run a piece of Python as a command in a folder; return its exit status and its output."""

    async def run() -> tuple[int, str]:
        write_files(folder, {"code.py": code})
        command = Command("Part", f"{sys.executable} code.py", LIMITS, confined=confined)
        result = await command.run(folder, environment_of_run(), port=port)
        return result.status, result.output.strip()

    return asyncio.run(asyncio.wait_for(run(), 120))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "own"
    path.mkdir()
    return path


def test_it_sees_its_folder_the_system_and_nothing_else(folder: Path) -> None:
    (folder.parent / "secret").write_text("secret")
    paths = (folder.parent / "secret", "/etc/passwd", "/etc/shadow", f"/proc/{os.getpid()}/environ", Path(__file__))
    code = f"""
import os
for path in {[str(path) for path in paths]!r}:
    try:
        print("READ", open(path).read()[:9])
    except OSError:
        pass
for path in ("/new", "/usr/new", os.path.dirname(os.getcwd()) + "/new", os.__file__):
    try:
        open(path, "a")
        print("WROTE", path)
    except OSError:
        pass
open("own", "w").write("x")
open("/tmp/scratch", "w").write("x")
print(sorted(os.listdir(".")), [pid for pid in os.listdir("/proc") if pid.isdecimal() and int(pid) > 20])
"""
    assert python(code, folder) == (0, "['code.py', 'own'] []")
    assert sorted(os.listdir(folder.parent)) == ["own", "secret"]


@asynccontextmanager
async def upper_case() -> AsyncIterator[int]:
    """Serve what a connection sends in upper case; yield the port."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write((await reader.read()).upper())
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


def test_it_reaches_one_port_of_the_machine(folder: Path) -> None:
    code = """
import socket, sys
for port in map(int, sys.argv[1:]):
    try:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(b"x" * 10**6)
            connection.shutdown(socket.SHUT_WR)
            size = 0
            while data := connection.recv(2**16):
                size += data.count(b"X")
            print(size)
    except OSError as error:
        print(type(error).__name__)
"""

    async def run() -> str:
        write_files(folder, {"code.py": code})
        async with upper_case() as port, upper_case() as other:
            command = Command("Part", f"{sys.executable} code.py {port} {other}", LIMITS, confined=True)
            return (await command.run(folder, environment_of_run(), port=port)).output

    assert asyncio.run(run()).split() == ["1000000", "ConnectionRefusedError"]


@pytest.mark.parametrize("confined", [True, False])
def test_what_remains_in_the_folder_is_safe_to_read(folder: Path, confined: bool) -> None:
    code = """
import os, socket
os.symlink("/etc/passwd", "out"); os.symlink("code.py", "within"); os.symlink("../secret", "up")
os.mkfifo("pipe"); socket.socket(socket.AF_UNIX).bind("socket")
os.mkdir("shut"); open("shut/file", "w").write("x"); os.chmod("shut/file", 0); os.chmod("shut", 0); os.chmod(".", 0)
"""
    assert python(code, folder, confined=confined) == (0, "")
    assert sorted(os.listdir(folder)) == ["code.py", "shut", "within"]
    assert (folder / "shut" / "file").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("data = bytearray(2**29)\nimport time\ntime.sleep(60)", "of memory, expected at most 256"),
        ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", "processes, expected at most 16"),
        ("for i in range(10**6):\n    open(f'f{i}', 'wb').write(bytes(2**22))", "its folder had"),
    ],
    ids=["memory", "processes", "folder"],
)
def test_a_limit_ends_it_and_is_named(folder: Path, code: str, problem: str) -> None:
    status, output = python(code, folder)
    assert status == -9
    assert problem in output


def test_files_of_the_recipe_are_those_that_the_folder_has_not(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text("print('the recipe')")

    def output(files: dict[str, str], name: str) -> str:
        folder = tmp_path / name
        folder.mkdir()
        write_files(folder, files)
        command = Command("Part", f"{sys.executable} agent.py", LIMITS, confined=True)
        return asyncio.run(command.run(folder, environment_of_run())).output.strip()

    assert output({}, "first") == "the recipe"
    assert output({"agent.py": "print('the row')"}, "second") == "the row"


def test_files_are_written_through_no_link(folder: Path) -> None:
    outside = folder.parent / "outside"
    outside.mkdir()
    (outside / "file").write_text("kept")
    (folder / "tests").symlink_to(outside)
    (folder / "file").symlink_to(outside / "file")
    (folder / "folder").mkdir()
    write_files(folder, {"tests/new": "1", "file": "2", "folder": "3"})
    assert os.listdir(outside) == ["file"]
    assert (outside / "file").read_text() == "kept"
    assert [(folder / name).read_text() for name in ("tests/new", "file", "folder")] == ["1", "2", "3"]


@pytest.mark.parametrize("files", [{"../x": ""}, {"/x": ""}, {"a/../../x": ""}, {"": ""}, {"x": 1}, ["x"], {"a\0": ""}])
def test_files_that_lead_out_of_the_folder_are_refused(files: object) -> None:
    with pytest.raises(ValueError, match="the row's files"):
        check_files(files, "files")


@pytest.mark.parametrize(
    ("line", "readable", "problem"),
    [("", (), "empty command"), ("'", (), "no shell can split"), ("true", ("/no/such",), "does not exist")],
)
def test_a_command_that_cannot_be_is_refused(line: str, readable: tuple[str, ...], problem: str) -> None:
    with pytest.raises(RecipeError, match=problem):
        Command("Part", line, LIMITS, confined=True, readable=readable)


def test_a_program_that_it_cannot_read_is_refused(tmp_path: Path) -> None:
    program = tmp_path / "bin" / "agent"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
        with pytest.raises(RecipeError, match="add its folder to `readable`"):
            Command("Part", "agent", LIMITS, confined=True)
        Command("Part", "agent", LIMITS, confined=True, readable=[str(program.parent)])
        Command("Part", "agent", LIMITS, confined=False)
