"""Checkpoints as data: what is written, what is read back, and what is refused without running anything."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlkit.base.errors import CheckpointError
from rlkit.base.files import MANIFEST
from rlkit.cli.main import main
from rlkit.models.checkpoint_schema import STATE
from rlkit.models.checkpoints import open_checkpoint
from rlkit.models.tensor_files import file_of

TENSORS = file_of(0)
SHORT = (
    "--recipe=quickstart", "--train.steps=1", "--train.prompts_per_step=2", "--rollout.group_size=2",
    "--validation.limit=1", "--validation.samples=0", "--fabric.accelerator=cpu", "--train.schedule=Constant",
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step, with its checkpoint."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    assert main(["fit", *SHORT, f"--out={folder}"]) == 0
    return folder


@pytest.fixture
def checkpoint(run: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint, to be damaged."""
    folder = tmp_path / "checkpoints" / "step-000001"
    shutil.copytree(run / "checkpoints" / "step-000001", folder)
    return folder


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.marker,)


def sign(checkpoint: Path) -> None:
    """Make the checksums fit again, as whoever changes a file can."""
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_bytes())
    except ValueError:
        return
    for file in manifest["files"]:
        if (checkpoint / file).is_file():
            manifest["files"][file] = hashlib.blake2b((checkpoint / file).read_bytes(), digest_size=16).hexdigest()
    (checkpoint / MANIFEST).write_text(json.dumps(manifest))


def change_state(checkpoint: Path, **changes: Any) -> None:
    state = json.loads((checkpoint / STATE).read_text()) | changes
    (checkpoint / STATE).write_text(json.dumps(state))


def change_header(checkpoint: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the header of the file of tensors; the tensors stay where they are."""
    data = (checkpoint / TENSORS).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    encoded = json.dumps(header).encode()
    (checkpoint / TENSORS).write_bytes(struct.pack("<Q", len(encoded)) + encoded + data[8 + length :])


def first(header: dict[str, Any]) -> dict[str, Any]:
    entry: dict[str, Any] = header["policy.policy.model.embed_tokens.weight"]
    return entry


def link(checkpoint: Path, file: str) -> None:
    elsewhere = checkpoint.parent / "elsewhere"
    (checkpoint / file).rename(elsewhere)
    (checkpoint / file).symlink_to(elsewhere)


def pipe(checkpoint: Path, file: str) -> None:
    (checkpoint / file).unlink()
    os.mkfifo(checkpoint / file)


def list_file(checkpoint: Path, file: str) -> None:
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    manifest["files"][file] = "0" * 32
    (checkpoint / MANIFEST).write_text(json.dumps(manifest))


def all_pickles(checkpoint: Path) -> None:
    payload = pickle.dumps(Payload(checkpoint.parent / "ran"))
    for file in (*os.listdir(checkpoint), ".metadata", "__0_0.distcp"):
        (checkpoint / file).write_bytes(payload)


def pickled(file: str) -> Callable[[Path], None]:
    def replace(checkpoint: Path) -> None:
        (checkpoint / file).write_bytes(pickle.dumps(Payload(checkpoint.parent / "ran")))
        (checkpoint / ".metadata").write_bytes(pickle.dumps(Payload(checkpoint.parent / "ran")))

    return replace


HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "pickles": (all_pickles, ".json: Invalid JSON"),
    "a pickled state": (pickled(STATE), "state.json: "),
    "pickled tensors": (pickled(TENSORS), "is not a file of tensors"),
    "a manifest of pickles": (lambda c: list_file(c, "__0_0.distcp"), "manifest.json: files"),
    "a file above": (lambda c: list_file(c, "../../secret"), "manifest.json: files"),
    "an absolute file": (lambda c: list_file(c, "/etc/passwd"), "manifest.json: files"),
    "linked tensors": (lambda c: link(c, TENSORS), "is not a regular file"),
    "a linked state": (lambda c: link(c, STATE), "is not a regular file"),
    "a pipe": (lambda c: pipe(c, TENSORS), "is not a regular file"),
    "deep JSON": (lambda c: (c / STATE).write_text('{"a":' * 100_000), "state.json: Invalid JSON"),
    "a long file": (lambda c: (c / STATE).write_text(" " * (17 << 20)), "state.json has more than"),
    "not a number": (lambda c: change_state(c, numbers={"version": 1, "kl_coef": float("nan")}), "numbers.kl_coef"),
    "an infinite metric": (lambda c: change_state(c, before={"accuracy": float("inf")}), "before.accuracy"),
    "a step of text": (lambda c: change_state(c, step="1"), "state.json: step"),
    "another step": (lambda c: change_state(c, step=2), "state.json is of step 2"),
    "YAML with aliases": (lambda c: change_state(c, recipe="a: &a [1]\nb: *a"), "state.json: recipe"),
    "more state": (lambda c: change_state(c, callbacks=["os.system"]), "state.json: callbacks"),
    "a huge header": (lambda c: (c / TENSORS).write_bytes(struct.pack("<Q", 1 << 62) + b"{}"), "not a file of tensors"),
    "no header": (lambda c: (c / TENSORS).write_bytes(b"123"), "not a file of tensors"),
    "a huge tensor": (lambda c: change_header(c, lambda h: first(h).update(shape=[1 << 40, 1 << 40])), "cannot hold"),
    "a negative size": (lambda c: change_header(c, lambda h: first(h).update(shape=[-1, 4])), "shape"),
    "bytes beyond": (lambda c: change_header(c, lambda h: first(h).update(data_offsets=[1 << 40, 1 << 41])), "cannot"),
    "an unknown type": (lambda c: change_header(c, lambda h: first(h).update(dtype="OBJECT")), "not a file of tensors"),
    "no places": (lambda c: change_header(c, lambda h: h.pop("__metadata__")), "not a file of tensors"),
    "another format": (lambda c: (c / MANIFEST).write_text('{"files": {}}'), "has format 1, expected 2"),
    "an empty manifest": (lambda c: (c / MANIFEST).write_text('{"format": 2, "files": {}}'), "lists no state.json"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_checkpoint_is_refused_and_runs_nothing(
    checkpoint: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its checksums fit: they lie in the same folder, so that who changes a file changes them too."""
    change, expected = HOSTILE[name]
    change(checkpoint)
    sign(checkpoint)
    out = checkpoint.parent.parent / "exported"
    with pytest.raises(CheckpointError, match="step-000001"):
        open_checkpoint(str(checkpoint))
    verbs = (
        ["export", f"--checkpoint={checkpoint}", f"--out={out}"],
        ["fit", *SHORT, f"--resume={checkpoint}", f"--out={out}"],
        ["fit", *SHORT, f"--model.path={checkpoint}", f"--out={out}"],
        ["validate", "--recipe=quickstart", "--validation.limit=1", f"--checkpoint={checkpoint}"],
        ["generate", "--recipe=quickstart", f"--checkpoint={checkpoint}"],
    )
    assert main(verbs[list(HOSTILE).index(name) % len(verbs)]) == 1
    message = capsys.readouterr().err
    assert "step-000001" in message
    assert expected in message
    assert "Traceback" not in message
    assert not (checkpoint.parent / "ran").exists()
    assert not out.exists()


def test_what_looks_whole_but_is_of_another_model_is_refused(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tensor that is missing, of another type, or of a shape that takes as many bytes."""

    def transposed(header: dict[str, Any]) -> None:
        first(header)["shape"].reverse()

    for change, expected in (
        (lambda h: first(h).update(dtype="I32"), "float32[264, 128] here, and there int32[264, 128]"),
        (transposed, "float32[264, 128] here, and there float32[128, 264]"),
        (lambda h: h.pop("policy.policy.model.embed_tokens.weight"), "and there none"),
    ):
        content = (checkpoint / TENSORS).read_bytes()
        change_header(checkpoint, change)
        sign(checkpoint)
        assert main(["export", f"--checkpoint={checkpoint}", f"--out={tmp_path / 'out'}"]) == 1
        assert main(["fit", *SHORT, f"--resume={checkpoint}", f"--out={tmp_path / 'resumed'}"]) == 1
        message = capsys.readouterr().err
        assert message.count("is of another model: policy.policy.model.embed_tokens.weight is") == 2
        assert message.count(expected) == 2
        (checkpoint / TENSORS).write_bytes(content)
        shutil.rmtree(tmp_path / "resumed")


def test_a_checkpoints_recipe_runs_no_code_of_a_model(checkpoint: Path, tmp_path: Path) -> None:
    """Its `trust_remote_code: true` does not count: a model with code of its own is refused."""
    model, ran = tmp_path / "model", tmp_path / "ran"
    model.mkdir()
    (model / "evil.py").write_text(f"import os\nos.mkdir({str(ran)!r})\n")
    config = {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}
    (model / "config.json").write_text(json.dumps(config))
    change_state(checkpoint, recipe={"model": {"path": str(model), "trust_remote_code": True}})
    sign(checkpoint)
    assert main(["export", f"--checkpoint={checkpoint}", f"--out={tmp_path / 'out'}"]) == 2
    assert not ran.exists()


def test_a_recipe_within_a_checkpoint_is_not_the_runs(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without `--recipe`, that of the run folder is taken; what lies among the tensors is none."""
    ran = tmp_path / "ran"
    (checkpoint / "evil.py").write_text(f"import os\nos.mkdir({str(ran)!r})\ndef evil(text):\n    return 1.0\n")
    reward = f"{{class_path: PythonReward, init_args: {{function: {checkpoint}/evil.py:evil, allow_code: true}}}}"
    (checkpoint / "recipe.yaml").write_text(f"model: tiny\ntask: Arithmetic\nreward: {reward}\n")
    assert main(["fit", f"--resume={checkpoint}", f"--out={tmp_path / 'out'}"]) == 2
    assert "recipe" in capsys.readouterr().err
    assert not ran.exists()


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (None, "has no valid model"),
        ({"path": 5}, "has no valid model: path"),
        ({"path": "tiny", "lora": {"rank": 10**9}}, "has no valid model: lora.rank"),
        ({"path": "tiny", "lora": {"rank": 4095}}, "no tensors of model.lora.rank 4095"),
    ],
)
def test_a_checkpoints_model_is_checked_before_it_is_loaded(
    checkpoint: Path, tmp_path: Path, model: Any, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change_state(checkpoint, recipe={} if model is None else {"model": model})
    sign(checkpoint)
    assert main(["export", f"--checkpoint={checkpoint}", f"--out={tmp_path / 'out'}"]) == 1
    assert expected in capsys.readouterr().err
