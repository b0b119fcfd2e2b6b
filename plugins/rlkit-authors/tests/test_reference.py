"""What plugins are written against is documented, field by field, and shown."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields, is_dataclass
from typing import get_type_hints

import pytest
import torch
from rlkit_authors import plugins, reference
from torch import Tensor

from rlkit import types
from rlkit.base.errors import RecipeError
from rlkit.base.installed import Plugin
from rlkit.cli.main import main
from rlkit.interfaces.fields import Field
from rlkit.registry import Part, Registry
from rlkit.rewards import MathReward
from tests.conftest import ROOT

NAMED = {
    "Batch",
    "RolloutBatch",
    "TrainBatch",
    "Trajectory",
    "Prompt",
    "PolicyOutput",
    "LossOutput",
    "Runtime",
    "Score",
    "Completion",
    "Request",
}


def documented(cls: type) -> dict[str, str]:
    """Return the meaning of each field that the docstring, or that of a class it extends, lists."""
    docs = [inspect.cleandoc(base.__doc__ or "") for base in reversed(cls.__mro__) if base.__module__ == cls.__module__]
    return dict(re.findall(r"^    (\w+): (.+)", "\n".join(docs), re.M))


def test_every_field_is_documented_and_tensors_say_their_shape() -> None:
    known = reference.public_classes()
    assert set(known) >= NAMED | {"RewardFunction", "AdvantageEstimator", "PolicyLoss", "Tool", "WeightStream"}
    for name, cls in known.items():
        names = [f.name for f in fields(cls)] if is_dataclass(cls) else list(getattr(cls, "_fields", ()))
        told = documented(cls) if names else {}
        assert [field for field in names if field not in told] == [], name
        assert [field for field in told if field not in {*names, "ValueError"}] == [], name
    names_of_types = {**vars(types.batch), "Media": types.Media, "torch": torch, "Tensor": Tensor, "Field": Field}
    for cls in (types.TrainBatch, types.PolicyOutput, types.LossOutput):
        for field, hint in get_type_hints(cls, names_of_types).items():
            if hint in (Tensor, Tensor | None):
                shape = r"\[(B(,[TK])?(,K(\+1)?)?)?\] (f32|i32|i64|bool)\b"
                assert re.match(shape, documented(cls)[field]), f"{cls.__name__}.{field}"


def test_every_member_of_the_runtime_is_documented() -> None:
    runtime = reference.public_classes()["Runtime"]
    public = {name: value for name, value in vars(runtime).items() if not name.startswith("_")}
    members = {name for name, value in public.items() if callable(value) or isinstance(value, property)}
    shown = reference.describe(runtime)
    assert members >= {"tokenizer", "device", "reduce", "score"}
    assert all(re.search(rf"^    (async def |def )?{name}\b.*\n        \S", shown, re.M) for name in members)


@pytest.mark.parametrize("name", sorted(NAMED | {"RewardFunction"}))
def test_they_are_shown(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "show", name]) == 0
    assert capsys.readouterr().out.startswith(f"{name}  (from rlkit.")


def test_what_is_shown_says_what_authors_asked(capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in (
        ("LossOutput", "the mean over all micro-batches, optimizer steps and ranks"),
        ("RewardManager", "trajectories of a call belong to one prompt"),
        ("Message", "A chat message: `role`, `content` and other keys that the chat template reads."),
        ("TrainBatch", "mask: [B,T] bool, True where the policy chose the token"),
    ):
        assert main(["plugins", "show", name]) == 0
        assert text in " ".join(capsys.readouterr().out.split())
    assert main(["plugins", "show", "Bach"]) == 2
    assert "did you mean 'Batch'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("AdvantageEstimator", ["needs: ClassVar[Needs] = Needs.NOTHING", "formula: ClassVar[str]",
                                "fills: Sequence[Field] = ()\n        The fields that the part fills, for all",
                                "reads_fields: Sequence[str] = ()\n        The names of the fields"]),
        ("Needs", ["NOTHING\n", "GROUPS\n        At least two samples of each prompt.", "ROLES\n        The roles"]),
        ("Inputs", ["ADVANTAGES\n        `batch.advantages`, for which the recipe needs an estimator."]),
        ("PolicyLoss", ["inputs: ClassVar[Inputs] = Inputs.ADVANTAGES | Inputs.REWARDS | Inputs.OLD_LOGPS\n"]),
    ],
)  # fmt: skip
def test_attributes_and_flags_are_shown_with_their_documentation(
    name: str, texts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plugins", "show", name]) == 0
    shown = capsys.readouterr().out
    assert [text for text in texts if f"\n    {text}" not in shown] == []
    assert "_runtime" not in shown
    assert "    token_rewards: Tensor" not in reference.describe(types.Batch)  # a field, which the docstring lists


def test_the_options_of_a_part_are_shown_as_help_does_with_its_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "show", "ClipLoss"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("ClipLoss  (losses, from rlkit-fabric 0.1.0)\n")
    assert f"\nsource: {ROOT / 'rlkit' / 'losses' / 'clip.py'}\n" in shown
    assert "Args:" not in shown
    with pytest.raises(SystemExit):
        main(["fit", "--loss.help", "ClipLoss"])
    options = capsys.readouterr().out.partition("\noptions:\n")[2]
    assert "a number above 1, or null; default: null" in " ".join(options.split())
    assert shown.endswith(f"\noptions:\n{options}")
    assert main(["plugins", "show", "PassK"]) == 0
    assert "plugins/rlkit-papers/src/" in capsys.readouterr().out


def test_a_plugin_is_shown_by_the_name_of_its_distribution(capsys: pytest.CaptureFixture[str]) -> None:
    plugin = Plugin("mine", "rlkit-mine", "1.0")
    registry = Registry(plugins=[plugin])
    registry.parts["rewards"]["MathReward"] = Part("rewards", MathReward, plugin)
    shown = [plugins.describe(name, registry) for name in ("mine", "rlkit-mine", "rlkit_mine")]
    assert shown[0].startswith("MathReward  (rewards, from rlkit-mine 1.0)")
    assert shown == shown[:1] * 3
    with pytest.raises(RecipeError, match="did you mean 'rlkit-mine'"):
        plugins.describe("rlkit-mne", registry)
    assert main(["plugins"]) == 2
    usage = capsys.readouterr().out
    assert "SEAM" not in usage
    assert max(map(len, usage.splitlines())) <= 120


def test_type_checkers_may_read_the_types() -> None:
    assert (ROOT / "rlkit" / "py.typed").exists()
