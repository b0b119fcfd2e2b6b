"""What a recipe may name is a closed list: nothing else is imported, called or built, not even to be refused.

Every form carries a payload that leaves a file behind if it is run, or names a module that leaves one if imported.
"""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rlkit import commands, hookimpl
from rlkit.base.errors import RecipeError
from rlkit.cli.main import main
from rlkit.interfaces.reward import RewardFunction
from rlkit.registry import load_plugins
from rlkit.rewards import MathReward
from rlkit.types import Trajectory

MODULE = "stranger_of_the_recipe"
PAYLOADS = {
    "<COMMAND>": "{class_path: subprocess.run, init_args: {args: [touch, <RAN>]}}",
    "<LAUNCH>": "{class_path: torch.distributed.run.main, "
    "init_args: {args: [--no-python, --nproc-per-node=1, touch, <RAN>]}}",
    "<UNPICKLE>": "{class_path: lightning.fabric.utilities.cloud_io._load, "
    "init_args: {path_or_url: <PICKLE>, map_location: cpu, weights_only: false}}",
    "<CLASS>": "{class_path: <MODULE>.Reward, init_args: {path: <RAN>}}",
    "<FUNCTION>": "{class_path: <MODULE>.touch, init_args: {path: <RAN>}}",
    "<MODULE>": MODULE,
}
FILES = (
    "fabric: {callbacks: <LAUNCH>}",
    "fabric: {callbacks: [<LAUNCH>, <FUNCTION>]}",
    "fabric: {callbacks: <UNPICKLE>}",
    "fabric: {loggers: <LAUNCH>}",
    "fabric: {loggers: {class_path: lightning.pytorch.loggers.CSVLogger, init_args: {save_dir: <RAN>}}}",
    "fabric: {plugins: <LAUNCH>}",
    "fabric: {plugins: [<FUNCTION>]}",
    "fabric: {plugins: [<MODULE>.Reward]}",
    "fabric: {strategy: <LAUNCH>}",
    "fabric: {strategy: {class_path: lightning.fabric.strategies.DDPStrategy, init_args: {accelerator: <UNPICKLE>}}}",
    "fabric: {strategy: {class_path: FSDP2, init_args: {offload: <FUNCTION>}}}",
    "fabric: {strategy: <MODULE>.FSDP2}",
    "fabric: {precision: <FUNCTION>}",
    "fabric: {accelerator: <LAUNCH>}",
    "fabric: {devices: [<FUNCTION>]}",
    "fabric: <LAUNCH>",
    "task: <CLASS>",
    "task: {class_path: rlkit.cli.main.main, init_args: {argv: [doctor]}}",
    "reward: <COMMAND>",
    "reward: <CLASS>",
    "reward: <FUNCTION>",
    "reward: <MODULE>",
    "reward: <MODULE>.Reward",
    "reward: {class_path: rlkit_servers.process.subprocess.run, init_args: {args: [touch, <RAN>]}}",
    "reward: {class_path: rlkit.rewards.python.importlib.import_module, init_args: {name: <MODULE>}}",
    "reward: {class_path: rlkit.rewards.python._load, init_args: {function: '<MODULE>:touch'}}",
    "reward: {class_path: jsonargparse.lazy_instance, init_args: {class_type: <MODULE>.Reward}}",
    "reward: tests.unit.cli.test_closed_names.Unregistered",
    "reward: Unregistered",
    "reward: rlkit.interfaces.reward.RewardFunction",
    "reward: {class_path: Composite, init_args: {rewards: {a: MathReward, b: <CLASS>}}}",
    "reward: {class_path: Composite, init_args: {rewards: {a: {class_path: Router, "
    "init_args: {rewards: {b: <CLASS>}}}}}}",
    "reward: {class_path: Composite, init_args: {rewards: {a: MathReward}, weights: <FUNCTION>}}",
    "reward: {class_path: MathReward, init_args: {format_weight: <FUNCTION>}}",
    "reward: {class_path: MathReward, init_args: <FUNCTION>}",
    "reward: {class_path: MathReward, dict_kwargs: {x: <FUNCTION>}}",
    "reward: {class_path: MathReward, init_args: {dict_kwargs: {x: <FUNCTION>}}}",
    "reward: {class_path: <CLASS>}",
    "kl_loss: &a <FUNCTION>\nreward: *a",
    "kl_loss: &a <FUNCTION>\nreward: {<<: *a}",
    "reward: !!python/object/apply:os.system ['touch <RAN>']",
    "reward: !!python/object/new:<MODULE>.Reward ['<RAN>']",
    "reward: !!python/name:<MODULE>.touch",
    "advantage: <CLASS>",
    "loss: <FUNCTION>",
    "rollout: {engine: <CLASS>}",
    "rollout: {engine: {class_path: SGLangServer, init_args: {launch: <FUNCTION>}}}",
    "rollout: {filter: <CLASS>}",
    "rollout: {sampling: {stop_ids: [<FUNCTION>]}}",
    "tools: {calculator: Calculator, other: <CLASS>}",
    "tools: <FUNCTION>",
    "parser: <FUNCTION>",
    "interaction: <CLASS>",
    "environment: <FUNCTION>",
    "train: <FUNCTION>",
    "train: {lr: <FUNCTION>}",
    "model: {path: tiny, lora: <FUNCTION>}",
    "model: {path: tiny, lora: {targets: [<FUNCTION>]}}",
    "save: {keep_best: <FUNCTION>}",
    "log: {loggers: [<CLASS>]}",
    "callbacks: [<CLASS>]",
    "train: {optimizer: <CLASS>}",
    "train: {schedule: <FUNCTION>}",
)
OPTIONS = (
    "--reward=<MODULE>.Reward",
    "--reward.class_path=<MODULE>.Reward",
    "--reward=<CLASS>",
    '--reward={"class_path": "<MODULE>.touch", "init_args": {"path": "<RAN>"}}',
    "--reward=!!python/object/apply:os.system ['touch <RAN>']",
    "--advantage.init_args.eps=<CLASS>",
    "--advantage.init_args=<CLASS>",
    "--advantage=<CONFIG>",
    "--reward=<CONFIG>",
    "--train=<CONFIG>",
    "--config=<CONFIG>",
    "--recipe=<CONFIG>",
    "--fabric.plugins+=<MODULE>.Reward",
    "--fabric.callbacks=<FUNCTION>",
    "--fabric.strategy=<MODULE>.FSDP2",
    "--tools.x=<MODULE>.Reward",
    "--reward.help=<MODULE>.Reward",
    "--loss.help=<MODULE>.touch",
    "--print_recipe=comments",
)
CODE = """
from pathlib import Path
Path({imported!r}).touch()
def touch(path): Path(path).touch()
class Reward:
    def __init__(self, path="x"): Path(path).touch()
FSDP2 = Reward
"""


class Unregistered(MathReward):
    """A reward that no hook offers."""


class Curious(RewardFunction):
    """A registered reward whose options could be anything."""

    def __init__(
        self,
        *,
        anything: Any = None,
        untyped=None,
        function: Callable[[str], int] | None = None,
        kind: type | None = None,
        module: ModuleType | None = None,
        thing: object = None,
        table: dict[str, Any] | None = None,
        stranger: SimpleNamespace | None = None,
    ) -> None:
        self.given = [anything, untyped, function, kind, module, thing, table, stranger]

    def grade(self, trajectory: Trajectory) -> float:
        return 0.0


class Plugin:
    """A plugin that offers it."""

    __name__ = "curious"

    @staticmethod
    @hookimpl
    def rlkit_register(register: Callable[[type], None]) -> None:
        register(Curious)


class Payload:
    """Leaves a file behind where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """A module that can be imported, a pickle, and a part's configuration: all of them would leave `ran` behind."""
    places = {name: tmp_path / name for name in ("ran", "imported", "pickle", "config")}
    (tmp_path / f"{MODULE}.py").write_text(CODE.format(imported=str(places["imported"])))
    places["pickle"].write_bytes(pickle.dumps(Payload(places["ran"])))
    spec = {"class_path": f"{MODULE}.Reward", "init_args": {"path": str(places["ran"])}}
    places["config"].write_text(json.dumps(spec))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return places


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    """Let the verbs import all that they ever import."""
    assert main(["recipe", "show", "quickstart"]) == 0
    with pytest.raises(SystemExit):
        main(["fit", "--reward.help=MathReward"])


def fill(form: str, trap: dict[str, Path]) -> str:
    """Write payloads and places into a form."""
    places = {f"<{name.upper()}>": str(path) for name, path in trap.items()}
    for name, text in {**PAYLOADS, **places}.items():
        form = form.replace(name, text)
    return form


VERBS = (["recipe", "show"], ["recipe", "check"], ["fit"])


def refused(
    argv: list[str], trap: dict[str, Path], capsys: pytest.CaptureFixture[str], verbs: Sequence[list[str]] = VERBS
) -> str:
    """Check that verbs refuse with one message, and that nothing has been run or imported; return the message."""
    before = set(sys.modules)
    for verb in verbs:
        assert main([*verb, *argv]) == 2
        printed = capsys.readouterr()
        assert printed.err.startswith("error: ")
        assert printed.err.count("\n") <= 2, printed.err  # a line for each slip
        assert "Traceback" not in printed.err
        assert not printed.out
    assert not trap["ran"].exists()
    assert not trap["imported"].exists()
    assert MODULE not in sys.modules
    assert not {name for name in set(sys.modules) - before if not name.startswith("rlkit.")}
    return printed.err


@pytest.mark.parametrize("form", FILES)
def test_a_file_names_registered_parts_alone(
    form: str, trap: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "evil.yaml").write_text(fill(form, trap))
    refused(["--recipe=quickstart", "--recipe=evil.yaml"], trap, capsys, VERBS[FILES.index(form) % 3 :][:1])


@pytest.mark.parametrize("form", OPTIONS)
def test_an_option_names_registered_parts_alone(
    form: str, trap: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    refused(["quickstart", fill(form, trap)], trap, capsys, VERBS[OPTIONS.index(form) % 3 :][:1])


@pytest.mark.parametrize("option", ["anything", "untyped", "function", "kind", "module", "thing", "table", "stranger"])
def test_options_of_any_type_take_data_alone(
    option: str, trap: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "load_plugins", lambda: load_plugins([("curious", Plugin)], entry_points=False))
    value = fill("<FUNCTION>", trap)
    nested = f"{{x: [{value}]}}"
    for given in (value, nested):
        said = refused(["quickstart", "--reward=Curious", f"--reward.{option}={given}"], trap, capsys, VERBS[:1])
        assert MODULE in said or "takes an object, which no recipe can hold" in said
    if option in ("function", "kind", "module", "stranger", "thing"):
        refused(["quickstart", "--reward=Curious", f"--reward.{option}={MODULE}.touch"], trap, capsys, VERBS[:1])
    else:  # text is data
        text = {"x": f"{MODULE}.touch"} if option == "table" else f"{MODULE}.touch"
        given = json.dumps(text) if option == "table" else text
        parsed = commands.parse("fit", ["quickstart", "--reward=Curious", f"--reward.{option}={given}"])
        assert text in vars(parsed.recipe.reward)["given"]
        assert MODULE not in sys.modules


def test_environment_variables_say_nothing(trap: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JSONARGPARSE_DEFAULT_ENV", "true")
    for name in ("RLKIT_FIT_REWARD", "RLKIT FIT_REWARD", "RLKIT_REWARD", "REWARD"):
        monkeypatch.setenv(name, fill("<CLASS>", trap))
    assert isinstance(commands.parse("fit", ["quickstart"]).recipe.reward, MathReward)
    assert not trap["imported"].exists()


def test_code_that_a_recipe_points_at_is_not_run_to_look_at_it(
    trap: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    function = f"{tmp_path / MODULE}.py:touch"
    spec = {"class_path": "PythonReward", "init_args": {"function": function, "allow_code": True}}
    (tmp_path / "mine.yaml").write_text(json.dumps({"reward": spec}))
    assert main(["recipe", "show", "quickstart", "--recipe=mine.yaml"]) == 0
    assert main(["recipe", "check", "quickstart", "--recipe=mine.yaml"]) == 0
    assert f"not tried, since it runs {function}" in capsys.readouterr().out
    nested = ["--reward=Composite", "--reward.rewards.a=PythonReward", "--reward.rewards.a.allow_code=true"]
    assert main(["recipe", "check", "quickstart", *nested, f"--reward.rewards.a.function={MODULE}:touch"]) == 0
    assert f"not tried, since it runs {MODULE}:touch" in capsys.readouterr().out
    assert main(["recipe", "check", "quickstart", "--model.trust_remote_code=true"]) == 2
    assert "model.trust_remote_code" in capsys.readouterr().err
    assert not trap["imported"].exists()


def test_a_part_is_known_by_its_name_and_by_its_paths() -> None:
    for name in ("GRPO", "rlkit.advantages.GRPO", "rlkit.advantages.grpo.GRPO"):
        assert type(commands.parse("fit", ["quickstart", f"--advantage={name}"]).recipe.advantage).__name__ == "GRPO"
    for name in (
        "rlkit.GRPO",
        "rlkit.rewards.GRPO",
        "advantages.GRPO",
        "GRPO.__init__",
        "rlkit.advantages.grpo.GRPO.x",
    ):
        with pytest.raises(RecipeError, match="GRPO"):
            commands.parse("fit", ["quickstart", f"--advantage={name}"])
