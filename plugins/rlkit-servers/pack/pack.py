"""Pack rlkit and SGLang, on a machine with a network, for one that has torch but no network:

    python plugins/rlkit-servers/pack/pack.py pack.tgz --sglang 0.5.17 --freeze freeze.txt [PACKAGE...]

The other machine unpacks it and puts the folder first on PYTHONPATH (`rlkit docs bare-images`). What its `pip freeze`
names is left out, and so are torch, Triton and CUDA. Of SGLang's packages it holds those that a dense text model
imports. Needs nothing but pip.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from email.parser import Parser
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name
from pip._vendor.packaging.version import Version

ROOT = Path(__file__).parents[3]
TESTED = ROOT / ".ci" / "constraints-sglang.txt"
"""Versions that were tested together."""

FOLDER = "rlkit-pack"
"""The folder that the archive holds."""

SERVER = (
    "aiohttp", "apache-tvm-ffi", "compressed-tensors", "distro", "easydict", "einops", "fastapi", "flashinfer-python",
    "gguf", "interegular", "ipython", "llguidance", "msgspec", "ninja", "numpy", "nvidia-ml-py", "openai",
    "openai-harmony", "orjson", "partial-json-parser", "pillow", "prometheus-client", "psutil", "pybase64",
    "pydantic", "python-multipart", "pyzmq", "requests", "sentencepiece", "setproctitle", "sglang-kernel",
    "soundfile", "tiktoken", "torch", "torch-memory-saver", "torchvision", "tqdm", "transformers", "uvicorn",
    "uvloop", "watchfiles", "xxhash", "zstandard",
)  # fmt: skip
"""What SGLang's server imports for a dense text model, of what SGLang requires."""

OF_THE_IMAGE = re.compile(r"torch|triton|(nvidia|cuda)-(?!ml-py$).*|nccl4py")
"""Distributions that are never packed: they belong to the torch of the other machine, or to kernels that are not."""

UNUSED = (
    "bin", "flashinfer/data", "sgl_kernel/flash_ops*.so", "sgl_kernel/flashmla_ops*.so", "sgl_kernel/infllm_ops*.so",
    "sglang/multimodal_gen", "sglang/srt/grpc/_core*.so",
)  # fmt: skip
"""What is removed: FlashAttention's kernels alone have 1.1 GB, and FlashInfer would compile its own from `data`."""

USES_FLASHINFER = ("sgl_kernel/elementwise.py", "sgl_kernel/sampling.py")
"""Modules that call FlashInfer if it can be imported, which SGLang's layers do not know to prevent."""

XGRAMMAR = '''"""A stand-in that has any class: SGLang names those of xgrammar everywhere, and calls none."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {"__get_pydantic_core_schema__": classmethod(_any)})


def _any(cls, *_):
    from pydantic_core import core_schema

    return core_schema.any_schema()
'''


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=Path, help="the file to write")
    parser.add_argument("packages", nargs="*", type=Requirement, help="further packages, such as pytest")
    parser.add_argument("--sglang", metavar="RELEASE", help="the release that pins the other torch; else none")
    parser.add_argument("--freeze", type=Path, help="the other machine's `pip freeze`")
    parser.add_argument("--python", default="3.12", help="the other machine's Python (default: 3.12)")
    options = parser.parse_intermixed_args(argv)
    if not options.archive.parent.is_dir():
        parser.error(f"the folder of {options.archive} does not exist, expected one to write to")
    with tempfile.TemporaryDirectory() as temporary:
        site = Path(temporary, FOLDER)
        wheels = Wheels(Path(temporary, "wheels"), options.python, versions(options.freeze))
        wheels.collect([*wheels.first(options.sglang), *options.packages])
        wheels.install(site)
        if options.sglang:
            prune(site)
        with tarfile.open(options.archive, "w:gz", compresslevel=6) as archive:
            archive.add(site, FOLDER)
    print(f"{options.archive}: {options.archive.stat().st_size >> 20} MiB; unpack it, and set PYTHONPATH to its folder")
    return 0


def versions(freeze: Path | None) -> dict[str, str]:
    """Return the versions that a `pip freeze` lists, by name; those of packages from a file or URL are empty."""
    lines = [] if freeze is None else freeze.read_text(encoding="utf-8").splitlines()
    entries = (re.match(r"([\w.-]+)(?:==(\S+))?", line) for line in lines if not line.startswith(("-", "#")))
    return {canonicalize_name(entry[1]): entry[2] or "" for entry in entries if entry}


class Wheels:
    """Wheels for another machine.

    pip would not resolve what is left out, and takes its time: here the tested version of each package is taken, or
    the newest that the first package that needs it allows.

    Args:
        folder: A folder for them, made here.
        python: The other machine's Python, such as `3.12`.
        there: The versions of its distributions, by name.
    """

    def __init__(self, folder: Path, python: str, there: dict[str, str]) -> None:
        self.folder, self.there = folder, there
        self.tested = versions(TESTED)
        platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(34, 16, -1)]
        self.target = ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}"]
        self.target += [f"--platform={name}" for name in (*platforms, "manylinux2014_x86_64", "any")]
        self.environment = {
            "python_version": python, "python_full_version": f"{python}.0", "implementation_name": "cpython",
            "platform_python_implementation": "CPython", "os_name": "posix", "platform_system": "Linux",
            "sys_platform": "linux", "platform_machine": "x86_64",
        }  # fmt: skip

    def first(self, sglang: str | None) -> list[Requirement]:
        """Make rlkit's wheel and download SGLang's; return what both need.

        Raises:
            SystemExit: SGLang's release is built for another torch than that of the other machine.
        """
        pip("wheel", "--no-deps", f"--wheel-dir={self.folder}", str(ROOT))
        [rlkit] = self.folder.glob("*.whl")
        needs = self.required(rlkit)
        if sglang:
            pip("download", "--no-deps", f"--dest={self.folder}", *self.target, f"sglang=={sglang}")
            [wheel] = self.folder.glob("sglang-*.whl")
            pinned = {canonicalize_name(need.name): need for need in self.required(wheel)}
            [torch] = pinned["torch"].specifier
            self.require_torch(sglang, Version(torch.version))
            pinned["torchvision"] = Requirement(f"torchvision==0.{Version(torch.version).minor + 15}.*")  # torch 2.N
            needs = [*(pinned[name] for name in SERVER), *needs]
        return needs

    def require_torch(self, sglang: str, built_for: Version) -> None:
        """Refuse a release for another torch, or for another CUDA: its kernels would not load.

        Raises:
            SystemExit: It is such a release.
        """
        listed = self.there.get("torch")
        if listed:
            torch = Version(listed)
            if torch.release[:2] != built_for.release[:2] or (torch.local or "").startswith("cu12"):
                raise SystemExit(
                    f"SGLang {sglang} is built for torch {built_for} and CUDA 13, but the freeze lists torch {listed}: "
                    "choose the release for it (rlkit docs bare-images)"
                )

    def collect(self, needs: Iterable[Requirement]) -> None:
        """Download everything that is needed and not there, and what that needs."""
        packed: set[str] = set()
        while lacking := {name: need for need in needs if self.lacks(name := canonicalize_name(need.name), need)}:
            words = [self.chosen(name, need) for name, need in lacking.items() if name not in packed]
            before = set(self.folder.glob("*.whl"))
            if words:
                pip("download", "--no-deps", f"--dest={self.folder}", *self.target, *words)
            packed |= set(lacking)
            fresh = sorted(set(self.folder.glob("*.whl")) - before)
            extras = {name: need.extras for name, need in lacking.items()}
            needs = [
                need for wheel in fresh
                for need in self.required(wheel, extras.get(canonicalize_name(wheel.name.split("-")[0]), ()))
            ]  # fmt: skip

    def lacks(self, name: str, need: Requirement) -> bool:
        """Whether the other machine has no such distribution, or in a version that is not allowed."""
        if OF_THE_IMAGE.fullmatch(name):
            return False
        version = self.there.get(name)
        return version is None or (version != "" and not need.specifier.contains(version, prereleases=True))

    def chosen(self, name: str, need: Requirement) -> str:
        """Return what pip is to download: the tested version, if it is allowed."""
        tested = self.tested.get(name)
        allowed = tested is not None and need.specifier.contains(tested, prereleases=True)
        return f"{name}=={tested}" if allowed else f"{name}{need.specifier}"

    def required(self, wheel: Path, extras: Iterable[str] = ()) -> list[Requirement]:
        """Return what a wheel requires on the other machine."""
        with zipfile.ZipFile(wheel) as archive:
            [name] = [name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)]
            lines = Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist", [])
        needs = [Requirement(line) for line in lines]
        machines = [{**self.environment, "extra": extra} for extra in ("", *extras)]
        return [need for need in needs if need.marker is None or any(map(need.marker.evaluate, machines))]

    def install(self, site: Path) -> None:
        """Unpack the wheels."""
        files = map(str, self.folder.glob("*.whl"))
        pip("install", "--no-deps", "--no-index", "--no-compile", f"--target={site}", *self.target, *files)


def pip(*words: str) -> str:
    """Run pip; return what it prints, or end with its exit status."""
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    command = (sys.executable, "-m", "pip", words[0], "--quiet", *words[1:])
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"pip {words[0]} ended with exit status {done.returncode}; its error stands above")
    return done.stdout


def prune(site: Path) -> None:
    """Remove what a dense text model never calls, and let SGLang's kernels not call FlashInfer.

    Raises:
        SystemExit: The release has other code than the tested ones.
    """
    for path in [path for pattern in UNUSED for path in site.glob(pattern)]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for name in USES_FLASHINFER:
        file, old = site / name, "_has_flashinfer = True"
        text = file.read_text(encoding="utf-8")
        if text.count(old) != 1:
            raise SystemExit(f"{name} of this release does not have one line {old!r}: choose a release that is tested")
        file.write_text(text.replace(old, "_has_flashinfer = False"), encoding="utf-8")
    (site / "xgrammar").mkdir()
    for name in ("__init__", "structural_tag"):
        (site / "xgrammar" / f"{name}.py").write_text(XGRAMMAR, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
