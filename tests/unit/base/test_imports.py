"""Which heavy packages are not loaded, and when: what decides how long a command takes to start."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlkit.base.imports import LazyPackage, import_lazily


def loaded_by(code: str) -> set[str]:
    """Return the modules that a process has loaded after it has run some code."""
    lazy = "type(module).__name__ != 'LazyPackage'"
    code += f"\nprint(json.dumps([name for name, module in sys.modules.items() if {lazy}]))"
    done = subprocess.run(
        (sys.executable, "-c", f"import json, sys\n{code}"), capture_output=True, text=True, check=True
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


HELP = "from rlkit.cli.main import main\ntry:\n    main({})\nexcept SystemExit:\n    pass"


def test_the_help_of_the_command_loads_no_torch() -> None:
    assert not {"torch", "jsonargparse", "lightning", "transformers"} & loaded_by(HELP.format(["--help"]))


def test_the_help_of_fit_loads_neither_models_nor_a_trainer() -> None:
    loaded = loaded_by(HELP.format(["fit", "--help"]))
    assert "jsonargparse" in loaded
    heavy = {"lightning.fabric", "torchmetrics", "transformers", "torch._dynamo", "torch.distributed.tensor", "sympy"}
    assert not (heavy | {"datasets", "peft", "accelerate", "rlkit.run.launch", "rlkit.train.rl"}) & loaded


def test_a_recipe_is_shown_without_models_or_a_trainer() -> None:
    loaded = loaded_by(HELP.format(["recipe", "show", "quickstart"]))
    assert "rlkit_inspect.recipe" in loaded
    assert not {"lightning.fabric", "transformers", "torch._dynamo", "sympy", "rlkit.train.rl", "pyarrow"} & loaded


def test_a_recipe_is_explained_without_models_or_a_trainer() -> None:
    loaded = loaded_by(HELP.format(["explain", "quickstart"]))
    assert "rlkit_inspect.explain" in loaded
    assert not {"lightning.fabric", "transformers", "rlkit.train.rl"} & loaded


RUN = """
from rlkit.base.imports import import_lazily
import_lazily()
import rlkit.run.launch
from pathlib import Path
from types import SimpleNamespace
from rlkit.run.answers import write_answers
from rlkit.testing import example_trajectory
write_answers(Path({!r}), SimpleNamespace(answers={{"": [example_trajectory("7")]}}, components=[]))
"""


def test_a_run_loads_no_other_trainer_and_no_metrics(tmp_path: Path) -> None:
    """Its tables of answers are written without pandas, which takes as long to import as a step."""
    loaded = loaded_by(RUN.format(str(tmp_path / "before")))
    assert {"lightning.fabric", "rlkit.train.rl"} <= loaded
    trainers = {"lightning", "lightning.pytorch", "torchmetrics", "datasets", "peft", "rich", "pandas"}
    assert not (trainers | {"scipy", "scipy.optimize", "scipy.special"}) & loaded
    assert (tmp_path / "before.parquet").exists()


def test_a_function_of_scipy_works_when_it_is_called() -> None:
    """transformers has it for losses of detectors; the first call, or any other name, runs its module's code."""
    start = "from rlkit.base.imports import import_lazily\nimport_lazily()\n"
    import_function = "from scipy.optimize import linear_sum_assignment as assign\n"
    assert not {"scipy", "scipy.optimize", "numpy"} & loaded_by(start + import_function)
    call = "assert [*map(list, assign([[1.0, 0.0], [0.0, 1.0]]))] == [[0, 1], [1, 0]]\n"
    assert "scipy.optimize" in loaded_by(start + import_function + call)
    other = "import scipy\nassert scipy.optimize.minimize_scalar(lambda x: x * x).success\n"
    real = "assert scipy.optimize.linear_sum_assignment.__module__ != 'rlkit.base.imports'\n"
    assert "scipy.optimize" in loaded_by(start + import_function + other + real + call)


def test_a_worker_that_imports_a_reward_loads_no_torch() -> None:
    assert not {"torch", "transformers", "sympy"} & loaded_by("import rlkit_math.reward")


def test_a_lazy_package_is_what_it_always_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its submodules are imported without its own code, which runs once, when a name of it is asked for."""
    home = tmp_path / "lazily_imported"
    home.mkdir()
    (home / "__init__.py").write_text("from lazily_imported.one import ONE\nruns = globals().get('runs', 0) + 1\n")
    (home / "one.py").write_text("import lazily_imported.two as two\nONE = two.TWO - 1\n")
    (home / "two.py").write_text("TWO = 2\n")
    (tmp_path / "lazily_imported-3.dist-info").mkdir()
    (tmp_path / "lazily_imported-3.dist-info" / "METADATA").write_text("Name: lazily_imported\nVersion: 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    import_lazily(["lazily_imported", "not_installed_anywhere"])
    import lazily_imported.one  # type: ignore[import-not-found]

    assert lazily_imported.__version__ == "3"
    assert "runs" not in vars(lazily_imported)
    assert isinstance(lazily_imported, LazyPackage)
    assert (lazily_imported.ONE, lazily_imported.runs) == (1, 1)
    with pytest.raises(AttributeError, match="nothing"):
        lazily_imported.nothing  # noqa: B018
    assert lazily_imported.runs == 1
    import_lazily(["lazily_imported"])  # nothing happens to what is loaded
    assert sys.modules["lazily_imported"] is lazily_imported
    for name in [name for name in sys.modules if name.partition(".")[0] == "lazily_imported"]:
        del sys.modules[name]


def test_a_submodule_of_a_kind_loads_no_package_of_the_shelf() -> None:
    loaded = loaded_by("from rlkit.rewards import python_batch")
    assert "rlkit.rewards.python_batch" in loaded
    assert not [name for name in loaded if name.startswith("rlkit_")]


FULL_COLLECTIONS = """
import gc, sys
from rlkit.cli.main import main
def note(phase, info):
    if phase == "start" and info["generation"] == 2:
        print(len(gc.get_objects()), file=sys.stderr)
gc.callbacks.append(note)
sys.argv = ["rlkit", "fit", "--help"]
sys.exit(main())
"""


def test_no_collection_looks_through_imported_modules() -> None:
    done = subprocess.run((sys.executable, "-c", FULL_COLLECTIONS), capture_output=True, text=True, check=True)
    sizes = [int(line) for line in done.stderr.splitlines()]
    assert sizes  # the interpreter collects when it ends
    assert max(sizes) < 50_000, "torch alone has ten times as many objects"
