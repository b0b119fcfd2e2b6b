"""`rlkit validate`: its files, and several checkpoints side by side."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
from rlkit_policy import validate
from rlkit_policy.folder import export
from rlkit_policy.validate import by_checkpoint

from rlkit.api import policy
from rlkit.base.errors import EngineError
from rlkit.cli.main import main
from rlkit.recipe import Recipe
from rlkit.run.method import Procedure, procedure_of
from tests.conftest import ROOT, read_jsonl

FEW = ("--validation.limit=12", "--validation.samples=2", "--fabric.accelerator=cpu", "--task.max_operand=30")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model twice, `worse` with an output layer that knows nothing, and a broken one."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("models")
    for name in ("same", "worse", "broken"):
        export(str(ROOT / "rlkit" / "models" / "tiny"), folder / name)
    weights = folder / "worse" / "model.safetensors"
    tensors = load_file(weights)
    tensors = {name: t * 0 if name == "model.embed_tokens.weight" else t for name, t in tensors.items()}
    save_file(tensors, weights, {"format": "pt"})
    (folder / "broken" / "model.safetensors").write_bytes(b"nothing")
    return folder


def shown(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_one_checkpoint_and_its_files(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import pandas

    given = [
        "validate",
        "quickstart",
        "--checkpoint",
        str(models / "same"),
        *FEW,
        "--json",
        f"--out={tmp_path / 'out'}",
    ]
    assert main(given) == 0
    metrics = shown(capsys)
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    [result] = results["results"]
    assert (result["metrics"], result["prompts"], result["answers"]) == (metrics, 12, "answers")
    assert (result["checkpoint"], result["model"]["path"]) == (str(models / "same"),) * 2
    assert (results["settings"]["greedy"]["temperature"], results["settings"]["seed"]) == (0, 0)
    assert results["recipe"]["task"]["class_path"] == "rlkit.tasks.Arithmetic"
    assert results["environment"]["python"]
    table = pandas.read_parquet(tmp_path / "out" / "answers.parquet")
    assert len(table) == len(read_jsonl(tmp_path / "out" / "answers.jsonl.gz")) == 12 * 3
    assert table[table["kind"] == "greedy"]["accuracy"].mean() == metrics["accuracy"]
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o700
    assert main(given) == 2
    assert "choose a new folder" in capsys.readouterr().err


@pytest.mark.slow
def test_several_checkpoints_in_one_table(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same weights are equal at every prompt, p = 1; where nothing is right any more, all that were differ."""
    places = [str(models / name) for name in ("same", "worse")]
    given = ["validate", "quickstart", *(f"--checkpoint={place}" for place in places), *FEW]
    assert main([*given, "--json", f"--out={tmp_path / 'out'}"]) == 0
    same, worse = (found := shown(capsys)).values()
    assert list(found) == places
    assert not any("_p_" in name for name in same)
    assert worse["accuracy"] == 0
    right = round(12 * same["accuracy"])
    assert worse["accuracy_p_first"] == pytest.approx(2 / 2**right)
    results = json.loads((tmp_path / "out" / "results.json").read_text())["results"]
    assert [result["metrics"] for result in results] == [same, worse]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "results.json", "answers-1.jsonl.gz", "answers-1.parquet", "answers-2.jsonl.gz", "answers-2.parquet",
    }  # fmt: skip
    assert main(["validate", "quickstart", f"--checkpoint={places[0]}", *given[2:3]]) == 2
    assert "is given twice" in capsys.readouterr().err


@pytest.mark.slow
def test_a_failing_checkpoint_is_named_and_others_are_shown(
    models: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy of each is freed before the next one's is loaded, that of one that failed late too."""
    policies: list[weakref.ref[object]] = []
    prepare = policy.prepare_rollouts

    def prepared(*arguments: Any) -> Any:
        assert not [ref for ref in policies if ref() is not None]
        made = prepare(*arguments)
        policies.append(weakref.ref(made.actor.policy))
        return made

    def validated(rollouts: Any, prompts: Any) -> Any:
        if len(policies) == 2:
            raise EngineError("the engine is lost")
        return procedure_of(rollouts.recipe).evaluate(rollouts, prompts)

    def procedure(recipe: Recipe) -> Procedure:
        return procedure_of(recipe)._replace(evaluate=validated)

    monkeypatch.setattr(policy, "procedure_of", procedure)
    monkeypatch.setattr(policy, "prepare_rollouts", prepared)
    (models / "late").symlink_to(models / "same")
    places = [str(models / name) for name in ("same", "broken", "late", "worse")]
    assert main(["validate", "quickstart", *(f"--checkpoint={place}" for place in places), *FEW]) == 2
    printed = capsys.readouterr()
    assert f"error: --checkpoint {places[1]}: " in printed.err
    assert f"--checkpoint {places[2]}: the engine is lost" in printed.err
    assert "p-value" in printed.out
    assert "sampled_accuracy" in printed.out
    assert len(policies) == 3
    assert main(["validate", "quickstart", f"--checkpoint={places[0]}", "--checkpoint=nowhere", *FEW]) == 2
    assert "--checkpoint is 'nowhere', expected a run folder" in capsys.readouterr().err


def test_metrics_are_shown_though_nothing_can_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers that are lost are a warning, lost results an error; neither leaves half a file."""
    full = tmp_path / "full"
    monkeypatch.setattr(validate, "new_folder", lambda path: full)  # it is gone meanwhile
    given = ["validate", "quickstart", "--validation.limit=2", "--validation.samples=0", "--json", "--out=full"]
    assert main(given) == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out.splitlines()[-1])["stopped"] == 1
    assert "warning: " in printed.err
    assert "results.json cannot be written: " in printed.err
    assert not full.exists()


def test_the_table_of_several_checkpoints() -> None:
    """Metrics that only some have are shown, and p-values beside those that are compared with the first."""
    first = {"accuracy": 0.5, "accuracy_low": 0.4, "accuracy_high": 0.6}
    table = by_checkpoint({"a": {**first, "failed": 0.0}, "b": {**first, "accuracy_p_first": 0.0123, "length": 3.0}})
    assert [str(column.header) for column in table.columns] == ["validation", "checkpoint", "", "p-value"]
    assert list(zip(*(map(str, column.cells) for column in table.columns), strict=True)) == [
        ("accuracy", "a", "0.500 (0.40-0.60)", ""), ("", "b", "0.500 (0.40-0.60)", "0.012"),
        ("length", "a", "-", ""), ("", "b", "3.000", ""),
    ]  # fmt: skip
