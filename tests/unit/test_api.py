"""The Python API: objects where a recipe has names, the same checks, and runs that leave the same behind."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import subprocess
import sys
from calendar import Calendar, TextCalendar
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from jsonargparse import ArgumentParser
from rlkit_tasks.rows import Rows
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlkit import Recipe, fit, recipe
from rlkit.advantages import GAE, GRPO
from rlkit.api.result import Result
from rlkit.base.errors import RecipeError
from rlkit.cli.display import Display
from rlkit.cli.main import main
from rlkit.filters import ZeroSignal
from rlkit.models.source import SHIPPED
from rlkit.recipe import Fabric, KLLoss, Model, Rollout, Train, Validation
from rlkit.recipe.parsing.compose import Composer
from rlkit.recipe.schema import as_data
from rlkit.registry import load_plugins
from rlkit.rewards import Composite, ExactReward
from rlkit.run.build import build
from rlkit.types import Sampling
from tests.conftest import ROOT, read_jsonl
from tests.unit.user_rewards import BONUS, Own, awaited, right, trl_style

ROWS = [{"prompt": f"{a} + {b} = ?", "answer": str(a + b)} for a in range(10, 20) for b in range(10, 20)]
CPU = Fabric(accelerator="cpu", devices=1)
SMALL = {"rollout": Rollout(group_size=2, sampling=Sampling(max_tokens=12)), "fabric": CPU}


def small(reward: Any = right, task: Any = ROWS, steps: int = 1, **sections: Any) -> Recipe:
    return Recipe("tiny", task, reward, train=Train(steps=steps, prompts_per_step=2), **{**SMALL, **sections})


def written(one: Recipe) -> dict[str, Any]:
    return yaml.safe_load(one.yaml())


def test_the_sections_are_those_of_a_recipe() -> None:
    """But for a launcher, whose processes read the recipe from files; from Python, the calling process trains."""
    assert {f.name for f in fields(Recipe)} == {f.name for f in fields(recipe.Recipe)} - {"launcher"}


def test_the_smallest_recipe_is_a_model_a_task_and_a_reward() -> None:
    made = written(Recipe("tiny", ROWS, right))
    assert made["model"]["path"] == "tiny"
    assert made["rollout"]["engine"]["class_path"] == "rlkit.engines.TorchEngine"
    assert (made["rollout"]["group_size"], made["train"]["steps"]) == (8, 100)
    assert made["advantage"]["class_path"] == "rlkit.advantages.GRPO"
    assert made["validation"] is None  # the rows hold none out
    assert made["task"].startswith("python object: Rows(100 rows, digest ")
    assert made["reward"].startswith("python object: FunctionReward(right, code ")


def test_what_a_recipe_names_registers_no_parser() -> None:
    def parse(option: str) -> Any:
        parser = ArgumentParser(exit_on_error=False)
        parser.add_argument("--one", type=Calendar)
        return parser.instantiate(parser.parse_args([f"--one={option}"])).one

    small(right).yaml()
    with pytest.raises(SystemExit):
        main(["fit", "--advantage.help", "GRPO"])
    with pytest.raises(RecipeError):
        Recipe("tiny", "Arithmetic", "ExactReward", train={"steps": "x"}).yaml()
    assert isinstance(parse("calendar.TextCalendar"), TextCalendar)


def test_names_objects_and_yaml_say_the_same() -> None:
    names = Recipe({"path": "tiny"}, "Arithmetic", "ExactReward", train={"steps": 3}, rollout={"group_size": 4})
    objects = Recipe(
        Model("tiny"), "Arithmetic", ExactReward(), GRPO(), rollout=Rollout(group_size=4), train=Train(steps=3)
    )
    composer = Composer(load_plugins())
    composer.add({"model": {"path": "tiny"}, "task": "Arithmetic", "reward": "ExactReward", "advantage": "GRPO"})
    composer.add({"loss": "ClipLoss", "train": {"steps": 3}, "rollout": {"group_size": 4}})
    assert build(composer)[1] == names.yaml() == objects.yaml()


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"train": Train(steps=0)}, "train.steps is 0, expected a whole number of 1 or more"),
        ({"train": Train(steps=1, lr=float("nan"))}, "train.lr is nan, expected a number above 0 and at most 1"),
        (
            {"train": Train(steps=1, old_logps="neither")},
            "train.old_logps is 'neither', expected one of recompute, rollout, loglinear",
        ),  # type: ignore[arg-type]
        ({"train": {"stps": 1}}, "unknown option 'train.stps'; did you mean 'train.steps'?"),
        ({"advantage": GRPO(eps=-1)}, "advantage.eps is -1, expected a number"),
        ({"advantage": "GRPOO"}, "advantage is 'GRPOO', which no plugin offers; did you mean 'GRPO'?"),
        ({"advantage": GAE()}, "advantage GAE needs values, but the recipe has no `critic:` section"),
        ({"advantage": ExactReward()}, "advantage is 'ExactReward', which is one of the rewards; known advantages: "),
        ({"advantage": Own()}, "Own object"),
        ({"loss": None}, "loss is null, expected the name of a class"),
        ({"reward": 3}, "reward is 3, expected the name of a class"),
        ({"model": "/nowhere"}, "model.path is '/nowhere', which does not exist"),
        ({"kl_loss": KLLoss(coef=-1)}, "kl_loss.coef is -1, expected a number above 0"),
        ({"validation": Validation()}, "the task has no validation rows: pass Rows(rows, validation=...)"),
        ({"task": [3]}, 'task, row 0 is 3, expected a dictionary such as {"prompt": '),
        ({"task": [{"question": "2 + 2?"}]}, "task, row 0"),
        ({"task": (row for row in ROWS)}, "expected a list of dictionaries"),
        ({"task": []}, "has no train rows"),
    ],
)
def test_what_is_wrong_is_said_as_on_the_command_line(tmp_path: Path, sections: dict[str, Any], message: str) -> None:
    given = {"model": "tiny", "task": ROWS, "reward": right, **SMALL, **sections}
    with pytest.raises(RecipeError) as raised:
        fit(Recipe(**given), out=tmp_path / "out")
    assert message in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_a_function_that_cannot_be_sent_is_refused() -> None:
    import threading

    lock = threading.Lock()

    def locked(text: str) -> float:
        with lock:
            return 1.0

    with pytest.raises(RecipeError, match=r"reward locked cannot be sent to a worker process: .*make it `async def`"):
        small(locked).yaml()


def validated(rows: list[dict[str, str]], steps: int) -> Recipe:
    return small(steps=steps, task=Rows(rows, validation=ROWS[:4]), validation=Validation(samples=0))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return fit(validated(ROWS, 2), out=tmp_path_factory.mktemp("api") / "out", quiet=True)


def test_a_run_returns_what_it_leaves_in_its_folder(trained: Result, capsys: pytest.CaptureFixture[str]) -> None:
    assert (trained.status, trained.steps) == ("ok", 2)
    assert trained.metrics == read_jsonl(trained.folder / "metrics.jsonl")
    assert trained.columns()["step"] == [1, 2]
    assert trained.columns()["reward/mean"] == [row["reward/mean"] for row in trained.metrics]
    assert min(trained.columns()["reward/mean"]) >= BONUS  # type: ignore[type-var]
    assert trained.validation == json.loads((trained.folder / "result.json").read_text())["validation"]
    assert set(trained.validation["after"] or {}) >= {"accuracy", "reward"}
    assert trained.model == trained.folder / "final"
    assert "metrics" not in repr(trained)


def test_a_run_with_objects_is_resumed_from_python_only(
    trained: Result, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(trained.folder, tmp_path / "run")
    assert main(["fit", "--resume", str(folder)]) == 2
    printed = capsys.readouterr().err
    assert "task is the Python object Rows(100 rows, digest " in printed
    assert "reward is the Python object FunctionReward(right, code " in printed
    assert "fit(recipe, resume=FOLDER) goes on with a run, or pass --reward" in printed
    longer = fit(validated(ROWS, 3), resume=folder, quiet=True)
    assert (longer.steps, longer.folder, len(longer.metrics)) == (3, folder, 3)
    assert longer.metrics[:2] == trained.metrics
    assert capsys.readouterr().out == ""
    with pytest.raises(RecipeError, match=r"task: 'python object: Rows\(100 rows.* in the checkpoint"):
        fit(validated(ROWS[1:], 3), resume=folder, quiet=True)


@pytest.mark.slow
@pytest.mark.parametrize("reward", [awaited, trl_style, Own(), Composite({"own": Own(), "exact": ExactReward()})])
def test_any_reward_trains(tmp_path: Path, reward: Any) -> None:
    done = fit(small(reward), out=tmp_path / "out", quiet=True)
    assert done.metrics[0]["reward/failed"] == 0
    assert done.metrics[0]["rollout/samples"] == 4


def test_sections_alone_are_a_recipe(tmp_path: Path) -> None:
    sections = {"train": {"steps": 1, "prompts_per_step": 2}, **SMALL}
    result = fit(model="tiny", task=ROWS, reward=right, out=tmp_path / "out", quiet=True, **sections)
    assert (result.steps, result.verdict) == (1, None)
    rows = list(result.rollouts(1))
    assert [row["prompt"] for row in rows] == [row["prompt"] for row in result.rollouts()]
    assert len(rows) == 4
    assert {"text", "reward", "tokens"} <= rows[0].keys()
    assert list(result.rollouts(2)) == []


def test_passes_over_the_data_are_the_length_of_a_run(tmp_path: Path) -> None:
    """6 rows twice, 4 in a step: 3 steps, known once the rows are."""
    train = {"data_epochs": 2, "prompts_per_step": 4}
    result = fit(model="tiny", task=ROWS[:6], reward=right, out=tmp_path, quiet=True, **SMALL, train=train)
    assert (result.status, result.steps) == ("ok", 3)


def test_objects_of_transformers_are_a_model(tmp_path: Path) -> None:
    """The run loads what the object had, and leaves the object as it was; a second start takes the same again."""
    model = AutoModelForCausalLM.from_pretrained(SHIPPED["tiny"])
    with torch.no_grad():
        model.get_input_embeddings().weight[5] = 0.25
    before = {name: value.clone() for name, value in model.state_dict().items()}
    sections = {"train": {"steps": 1, "prompts_per_step": 2}, **SMALL, "task": ROWS, "reward": right, "quiet": True}
    out = tmp_path / "out"
    result = fit(model=model, out=out, tokenizer=AutoTokenizer.from_pretrained(SHIPPED["tiny"]), **sections)
    base = AutoModelForCausalLM.from_pretrained(out / "base")
    assert (base.get_input_embeddings().weight[5] == 0.25).all()
    assert result.model is not None
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert yaml.safe_load((out / "recipe.yaml").read_text())["model"]["path"] == str(out / "base")
    assert fit(model=model, out=out, resume="auto", **sections).steps == 1


@pytest.mark.slow
def test_a_second_try_trains_the_model_that_it_is_given(tmp_path: Path) -> None:
    """A first one with another model has failed before its first step."""
    models = [AutoModelForCausalLM.from_pretrained(SHIPPED["tiny"]) for _ in range(2)]
    with torch.no_grad():
        models[1].get_input_embeddings().weight[5] = 0.25
    train = {"steps": 1, "prompts_per_step": 2, "lr": 1e-9}
    sections = {**SMALL, "task": ROWS, "reward": right, "quiet": True, "out": tmp_path / "out"}
    with pytest.raises(RecipeError, match="train.minibatches is 99"):
        fit(model=models[0], train={**train, "minibatches": 99}, **sections)
    result = fit(model=models[1], train=train, **sections)
    assert result.model is not None
    trained_model = AutoModelForCausalLM.from_pretrained(result.model)
    assert trained_model.get_input_embeddings().weight[5].allclose(torch.tensor(0.25), atol=1e-6)


def test_a_model_object_needs_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = AutoModelForCausalLM.from_pretrained(SHIPPED["tiny"])
    model.name_or_path = ""
    with pytest.raises(RecipeError, match="comes without a tokenizer; set tokenizer"):
        fit(Recipe(model=model, task=ROWS, reward=right), out=tmp_path / "out")
    with pytest.raises(RecipeError, match="fit has a tokenizer, but its model is no object"):
        fit("quickstart", tokenizer=object())
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RecipeError, match="several processes, which must agree on its folder; set out"):
        fit(Recipe(model=model, task=ROWS, reward=right))


def test_a_result_draws_its_metrics(trained: Result) -> None:
    figure = trained.plot()
    titles = [axes.get_title() for axes in figure.axes]
    assert titles[:3] == ["reward/mean", "validation/accuracy", "policy/loss"]
    [line] = figure.axes[1].lines
    accuracies = [(trained.validation[when] or {})["accuracy"] for when in ("before", "after")]
    assert line.get_xydata().tolist() == [[0, accuracies[0]], [2, accuracies[1]]]
    assert len(trained.plot("grad_norm").axes) == 1
    with pytest.raises(RecipeError, match="the run has no metric 'grad_nrom'; did you mean 'grad_norm'"):
        trained.plot("grad_nrom")


def test_a_shipped_recipe_is_run_by_its_name_with_changes(tmp_path: Path) -> None:
    changes = {"train": {"steps": 1, "prompts_per_step": 2}, "rollout": {"group_size": 2}, "fabric": CPU}
    fit("quickstart", out=tmp_path / "out", quiet=True, validation=None, loss="CISPO", **changes)
    kept = yaml.safe_load((tmp_path / "out" / "recipe.yaml").read_text())
    [shipped] = [yaml.safe_load((ROOT / "recipes" / "quickstart.yaml").read_text())]
    assert (kept["train"]["steps"], kept["train"]["lr"]) == (1, shipped["train"]["lr"])
    assert kept["loss"]["class_path"] == "rlkit.losses.CISPO"
    assert kept["validation"] is None


def test_a_list_of_rewards_is_their_sum(tmp_path: Path) -> None:
    result = fit(small([right, "ExactReward"]), out=tmp_path / "out", quiet=True)
    assert {"reward/right", "reward/ExactReward"} <= result.metrics[0].keys()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "fit needs model, task, reward, or a recipe"),
        ({"model": "tiny", "reward": right}, "fit needs task"),
        ({"recipe": "quickstrat"}, "did you mean 'quickstart'"),
        ({"recipe": 3}, "recipe is of type int, expected an rlkit.Recipe, a file or the name"),
        ({"recipe": "quickstart", "tarin": {}}, "fit has no argument 'tarin'; did you mean 'train'?"),
        ({"recipe": "quickstart", "learning_rate": 0.1}, 'did you mean train={"lr": ...}?'),
        ({"model": "tiny", "task": ROWS, "reward": [right, right]}, "two rewards of the same name"),
    ],
)
def test_wrong_arguments_of_fit_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(message)):
        fit(**arguments)


def test_a_data_set_is_a_task(tmp_path: Path) -> None:
    from datasets import Dataset

    task = Rows(Dataset.from_list(ROWS), validation_split=0.2, system="Add.")
    done = fit(small(task=task, validation=Validation(limit=3, samples=0)), out=tmp_path / "out", quiet=True)
    rows = read_jsonl(tmp_path / "out" / "rollouts" / "step-00001.jsonl.gz")
    assert rows[0]["messages"][0] == {"role": "system", "content": "Add."}
    assert done.validation["before"] is not None
    assert written(small(task=Dataset.from_list(ROWS)))["task"].startswith("python object: Rows(100 rows, digest ")


def test_a_function_is_a_tool() -> None:
    def add(a: int, b: int) -> str:
        """Adds two numbers.

        Args:
            a: The first.
            b: The second.
        """
        return str(a + b)

    made = written(small(tools={"add": add, "calculator": "Calculator"}))
    assert made["tools"]["add"].startswith("python object: ")
    assert made["tools"]["calculator"]["class_path"] == "rlkit.tools.Calculator"


@pytest.mark.slow
def test_a_recipe_can_be_run_twice_and_its_parts_are_written(tmp_path: Path) -> None:
    rollout = Rollout(group_size=2, sampling=Sampling(max_tokens=12), filter=ZeroSignal(max_refills=0))
    made = small(rollout=rollout)
    first, second = (fit(made, out=tmp_path / name, quiet=True) for name in "ab")
    metrics = [{k: v for k, v in r.metrics[0].items() if not k.startswith(("time", "memory"))} for r in (first, second)]
    assert metrics[0] == metrics[1]
    assert written(made)["rollout"]["filter"]["class_path"] == "rlkit.filters.ZeroSignal"


def test_registered_parts_keep_their_options_by_name() -> None:
    registry = load_plugins(entry_points=False)
    lost = []
    for parts in registry.parts.values():
        for part in parts.values():
            try:
                made = part.cls()
            except (TypeError, RecipeError):  # it has options without defaults; the shipped recipes have most of them
                continue
            if not isinstance(as_data(made, registry), dict):
                lost.append(part.name)
    assert not lost


def test_the_code_in_the_documentation_runs_as_in_a_notebook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a module named `__main__` that no file has, in a thread whose event loop is running."""
    text = (ROOT / "rlkit" / "docs" / "python.md").read_text()
    [code] = re.findall(r"```python\n(from rlkit import Recipe, fit\n.*?)```", text, re.S)
    code = code.replace("steps=20", "steps=1, prompts_per_step=2").replace(
        "train=", 'fabric={"accelerator": "cpu", "devices": 1}, train='
    )
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}

    async def cell() -> None:
        exec(compile(code, "<cell>", "exec"), names)
        await asyncio.sleep(0)

    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), sys.stdout
    asyncio.run(cell())
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), sys.stdout) == before
    assert names["result"].steps == 1
    assert names["result"].model == Path("runs") / names["result"].folder.name / "final"
    printed = capsys.readouterr().out
    assert "step 1/1  reward" in printed
    assert "\x1b" not in printed


def test_a_run_in_another_thread_handles_no_signals(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(fit, small(), out=tmp_path / "out", quiet=True).result()
    assert (done.status, signal.getsignal(signal.SIGINT)) == ("ok", before)


@pytest.mark.parametrize("environment", [{}, {"FORCE_COLOR": "1", "TERM": "xterm-color"}])  # as a notebook's
def test_what_is_no_terminal_gets_lines(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    display = Display(2)
    display.step(1, {"reward/mean": 0.5})
    display.finish({"validation": {"before": None, "after": None}, "steps": 1, "status": "ok", "seconds": 1}, "")
    assert capsys.readouterr().out == "step 1/2  reward 0.500\nok: 1 step in 0:01; \n"


SCRIPT = """
from rlkit import Recipe, fit

print("run as", __name__)
FOUND = 0.5

class Calls:
    count = 0

def graded(text, answer):
    Calls.count += 1
    return FOUND

fit(Recipe(
    "tiny", [{"prompt": "1 + 1 = ?", "answer": "2"}], graded, train={"steps": 1, "prompts_per_step": 1},
    rollout={"group_size": 2, "sampling": {"max_tokens": 4}}, fabric={"accelerator": "cpu", "devices": 1},
), out="out")
print("calls here", Calls.count)
"""


@pytest.mark.slow
def test_a_script_needs_no_guard(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = (sys.executable, "train.py")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.count("run as __main__") == 1
    assert "run as" not in done.stderr
    assert "calls here 0" in done.stdout  # it ran in workers
    assert read_jsonl(tmp_path / "out" / "metrics.jsonl")[0]["reward/mean"] == 0.5


def test_the_command_line_and_import_stay_light() -> None:
    script = "import sys, rlkit; print([m for m in ('torch', 'yaml', 'rlkit.api', 'cloudpickle') if m in sys.modules])"
    assert subprocess.run((sys.executable, "-c", script), capture_output=True, text=True, check=True).stdout == "[]\n"


def test_rows_of_plain_texts_are_no_prompts_to_sample_from(tmp_path: Path) -> None:
    rows = [{"text": f"{i} + 1 = ?", "label": str(i + 1)} for i in range(4)]
    train = {"steps": 1, "prompts_per_step": 2, "warmup_steps": 0}
    words: dict[str, object] = {
        "task": rows,
        "train": train,
        "validation": None,
        "out": tmp_path / "run",
        "quiet": True,
    }
    with pytest.raises(RecipeError) as error:
        fit("quickstart", **words, reward=lambda text: 1.0)  # type: ignore[arg-type]
    assert "no field 'prompt' (task.prompt_field); the row has: text, label" in str(error.value)
    assert fit("quick_sft", **words, reward=None).status == "ok"  # type: ignore[arg-type]
