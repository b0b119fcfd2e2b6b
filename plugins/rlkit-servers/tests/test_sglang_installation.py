"""What is said of an installation of SGLang, and what a pack of it holds; SGLang is not needed."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import zipfile
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest
import torch
from rlkit_servers.sglang.launch import (
    Launch,
    command,
    describe_installation,
    environment,
    install_command,
    is_packed,
    require_sglang,
)  # fmt: skip

from rlkit.base.errors import EngineError
from rlkit.interfaces.launcher import ServerSite
from tests.conftest import ROOT

OFFLINE = "; without a network: rlkit docs bare-images"


def machine(monkeypatch: pytest.MonkeyPatch, version: str, cuda: str, gpu: bool = True) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)


def packages(monkeypatch: pytest.MonkeyPatch, requires: list[str], **versions: str) -> None:
    """Let these distributions be the installed ones, and SGLang require others."""

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(metadata, "requires", lambda name: requires)


def kernels(folder: Path, monkeypatch: pytest.MonkeyPatch, *files: str) -> None:
    """Make a package of SGLang's kernels that has these files."""
    (folder / "sgl_kernel").mkdir()
    for name in ("__init__.py", *files):
        (folder / "sgl_kernel" / name).touch()
    monkeypatch.syspath_prepend(folder)


@pytest.mark.parametrize(
    ("version", "cuda", "gpu", "said"),
    [
        ("2.11.0+cu130", "13.0", True, "pip install sglang==0.5.17"),
        ("2.13.0", "13.2", True, "pip install sglang==0.5.21"),
        ("2.13.0+cpu", "", False, "pip install -e '.[sglang]' in a checkout of rlkit"),
        (
            "2.12.1+cu130",
            "13.0",
            True,
            "in a new environment, since no release is for torch 2.12.1+cu130 (all need CUDA",
        ),
        (
            "2.11.0+cu128",
            "12.8",
            True,
            "in a new environment, since no release is for torch 2.11.0+cu128 (all need CUDA",
        ),
    ],
)
def test_the_release_for_this_torch_is_named(
    version: str, cuda: str, gpu: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, version, cuda, gpu)
    packages(monkeypatch, [])
    assert said in install_command()
    assert describe_installation("") == f"not installed ({install_command()}{OFFLINE if gpu else ''})"
    with pytest.raises(EngineError, match="not installed in this environment") as raised:
        require_sglang()
    assert install_command() in str(raised.value)


def test_requirements_that_are_not_met_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A local version fits its release; what belongs to other systems or to extras does not count."""
    machine(monkeypatch, "2.11.0+cu130", "13.0")
    needs = [
        "torch==2.11.0",
        "kernels[cu13]==0.4",
        "uvloop",
        "absent; extra == 'test'",
        "other; sys_platform == 'none'",
    ]
    packages(monkeypatch, needs, torch="2.11.0+cu130", kernels="0.4", uvloop="1")
    assert describe_installation("0.5.17") == "0.5.17"
    packages(monkeypatch, [*needs, "transformers==5.12.1"], torch="2.13.0", transformers="5.17.0")
    assert describe_installation("0.5.17") == (
        "0.5.17, without torch==2.11.0 (but 2.13.0), kernels==0.4, uvloop, transformers==5.12.1 (but 5.17.0) "
        f"(pip install sglang==0.5.17{OFFLINE})"
    )
    packages(monkeypatch, [f"p{i}" for i in range(6)])
    assert "0.5.17, without p0, p1, p2, p3 and 2 more (pip" in describe_installation("0.5.17")
    assert "SGLang is 0.6.0, but rlkit works with 0.5.17 to 0.5.23" in describe_installation("0.6.0")


def test_a_pack_is_started_without_the_kernels_that_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_IS_FLASHINFER_AVAILABLE", raising=False)
    site = ServerSite(tmp_path, "127.0.0.1", 1, first_gpu=0)
    assert not is_packed()
    assert "--attention-backend" not in command(site, Launch(), "bfloat16")
    kernels(tmp_path, monkeypatch)
    assert is_packed()
    words = command(site, Launch(), "bfloat16")
    assert words[words.index("--attention-backend") + 1] == "triton"
    assert command(site, Launch(), "float32").count("--attention-backend") == 1
    assert environment(0, 60.0)["SGLANG_IS_FLASHINFER_AVAILABLE"] == "false"
    assert "SGLANG_IS_FLASHINFER_AVAILABLE" not in environment(None, 60.0)
    machine(monkeypatch, "2.11.0+cu130", "13.0")
    packages(monkeypatch, ["xgrammar==0.2.1", "transformers==5.12.1"], transformers="5.12.1")
    assert describe_installation("0.5.17") == "0.5.17, packed for dense text models"


def test_an_installation_with_all_kernels_is_no_pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels(tmp_path, monkeypatch, "flash_ops.abi3.so")
    assert not is_packed()


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The script, as a module."""
    spec = importlib.util.spec_from_file_location("pack", ROOT / "plugins" / "rlkit-servers" / "pack" / "pack.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def wheel(folder: Path, name: str, version: str, *requires: str) -> None:
    with zipfile.ZipFile(folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl", "w") as archive:
        lines = "".join(f"Requires-Dist: {line}\n" for line in requires)
        archive.writestr(f"{name}-{version}.dist-info/METADATA", f"Name: {name}\nVersion: {version}\n{lines}")


INDEX = {
    "rlkit-fabric": ("torch>=2.11", "rich>=13", "jsonargparse[signatures]>=4.53", "wandb; extra == 'wandb'"),
    "rich": ("pygments>=2", "old; python_version < '3.12'"),
    "jsonargparse": ("pyyaml", "typeshed-client; extra == 'signatures'"),
    "sglang-kernel": (),
    "transformers": ("tokenizers<=0.23.0",),
    "flashinfer-python": ("nvidia-cutlass-dsl", "cuda-tile", "nvidia-ml-py", "tabulate"),
}


def test_what_is_packed_is_needed_and_not_there(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other machine has torch, and of some packages versions that are not allowed; CUDA is its own."""
    asked: dict[str, str] = {}

    def pip(verb: str, *words: str) -> str:
        if verb == "wheel":
            tmp_path.joinpath("wheels").mkdir()
            wheel(tmp_path / "wheels", "rlkit-fabric", "0.1.0", *INDEX["rlkit-fabric"])
        for need in map(script.Requirement, (word for word in words if verb == "download" and word[0] not in "-/")):
            asked[need.name] = str(need.specifier)
            requires = INDEX.get(need.name, ())
            if need.name == "sglang":
                plain = (name for name in script.SERVER if name not in ("torch", "transformers", "flashinfer-python"))
                requires = ("torch==2.11.0", "transformers==5.12.1", "flashinfer_python[cu13]==0.6", "xgrammar", *plain)
            wheel(tmp_path / "wheels", need.name, "1.0", *requires)
        return ""

    monkeypatch.setattr(script, "pip", pip)
    freeze = tmp_path / "freeze.txt"
    freeze.write_text(
        "# image\ntorch==2.11.0+cu130\ntransformers==5.17.0\ntokenizers==0.23.2\nPyYAML==6.0\nnumpy @ file:///numpy\n"
        "-e git+x\npygments==2.1\n"
    )
    wheels = script.Wheels(tmp_path / "wheels", "3.12", script.versions(freeze))
    wheels.collect(wheels.first("0.5.17"))
    tested = script.versions(script.TESTED)
    assert asked["sglang"] == "==0.5.17"
    assert asked["transformers"] == "==5.12.1"
    assert asked["tokenizers"] == f"=={tested['tokenizers']}"
    assert asked["torchvision"] == "==0.26.*"
    assert asked["rich"] == f"=={tested['rich']}"
    assert asked["flashinfer-python"] == "==0.6"
    assert {"typeshed-client", "tabulate", "nvidia-ml-py", "sglang-kernel"} <= asked.keys()
    wheels.there["torch"] = "2.12.0"
    shutil.rmtree(wheels.folder)
    with pytest.raises(SystemExit, match="choose the release for it"):
        wheels.first("0.5.17")
    left_out = {"torch", "xgrammar", "nvidia-cutlass-dsl", "cuda-tile", "numpy", "pyyaml", "pygments", "old", "wandb"}
    assert not left_out & asked.keys()


def test_a_release_for_another_torch_is_not_packed(script: ModuleType, tmp_path: Path) -> None:
    built_for = script.Version("2.11.0")
    for version in ("", "2.11.0", "2.11.1+cu130", "2.11.0a0+nv26.4"):
        script.Wheels(tmp_path, "3.12", {"torch": version}).require_torch("0.5.17", built_for)
    for version in ("2.9.1", "2.12.0+cu130", "2.11.0+cu128"):
        wheels = script.Wheels(tmp_path, "3.12", {"torch": version})
        with pytest.raises(
            SystemExit, match=f"built for torch 2.11.0 and CUDA 13, but the freeze lists torch {version[:4]}"
        ):
            wheels.require_torch("0.5.17", built_for)


def test_what_a_wheel_requires_is_judged_for_the_other_machine(script: ModuleType, tmp_path: Path) -> None:
    """Python 3.99 on Linux, whatever this one is."""
    markers = ("python_full_version < '3.99'", "platform_system != 'Linux'", "python_full_version >= '3.99'")
    wheel(tmp_path, "a", "1", *(f"b{i}; {marker}" for i, marker in enumerate(markers)))
    [file] = tmp_path.iterdir()
    assert [need.name for need in script.Wheels(tmp_path, "3.99", {}).required(file)] == ["b2"]


def test_an_archive_in_no_folder_is_refused_before_anything_is_downloaded(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "pip", None)
    with pytest.raises(SystemExit):
        script.main([str(tmp_path / "none" / "pack.tgz")])
    assert "pack.tgz does not exist, expected one to write to" in capsys.readouterr().err


def test_kernels_that_are_left_out_are_not_called(script: ModuleType, tmp_path: Path) -> None:
    names = (
        "sgl_kernel/flash_ops.abi3.so",
        "sgl_kernel/sm90/common_ops.abi3.so",
        "flashinfer/data/a.cu",
        "sglang/a.py",
    )
    for name in (*names, *script.USES_FLASHINFER):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("try:\n    _has_flashinfer = True\n")
    script.prune(tmp_path)
    left = [(tmp_path / name).exists() for name in names]
    assert left == [False, True, False, True]
    assert "_has_flashinfer = False" in (tmp_path / script.USES_FLASHINFER[0]).read_text()
    with pytest.raises(SystemExit, match="of this release does not have one line '_has_flashinfer = True'"):
        script.prune(tmp_path)


def test_what_stands_in_for_xgrammar_has_fields_of_pydantic(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stand_in.py").write_text(script.XGRAMMAR)
    monkeypatch.syspath_prepend(tmp_path)
    import stand_in
    from pydantic import create_model

    monkeypatch.delitem(sys.modules, "stand_in")
    model = create_model("Model", tag=(stand_in.StructuralTag | None, None))
    assert model().tag is None
