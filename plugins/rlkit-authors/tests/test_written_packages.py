"""A package of each kind from `rlkit plugins new`, built, installed, and used by `rlkit fit`."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
from hatchling.build import build_wheel
from rlkit_authors.scaffold import PLURALS, WRITTEN
from safetensors.torch import load_file

from rlkit.cli.main import main
from rlkit.hooks import KINDS
from rlkit.models.load import load_tokenizer
from rlkit.recipe import Model
from tests.conftest import ROOT, read_jsonl
from tests.stubs import Stub, serving

TINY = ROOT / "rlkit" / "models" / "tiny"
SHORT = ("--train.prompts_per_step=4", "--rollout.group_size=4")
ANSWERS_7 = (
    "--rollout.engine=NewEngine", "--rollout.engine.text=7", "--rollout.max_gap=1000", "--train.steps=1",
    "--validation=null",
)  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel of a package of every kind, unpacked as pip does."""
    folder = tmp_path_factory.mktemp("written")
    for kind in WRITTEN:
        source = folder / kind
        assert main(["plugins", "new", f"rlkit-new-{kind}", "--kind", kind, "--out", str(source)]) == 0
        with chdir(source):
            wheel = build_wheel(str(folder))
        with zipfile.ZipFile(folder / wheel) as archive:
            archive.extractall(folder / "site")
    return folder / "site"


@pytest.fixture(autouse=True)
def installed(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(site)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")


@pytest.fixture
def posted() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The address of a server, and the JSON that was posted to it."""
    bodies: list[dict[str, Any]] = []

    class Handler(Stub):
        def do_POST(self) -> None:
            bodies.append(self.read())
            self.answer()

    with serving(Handler) as url:
        yield url, bodies


def fit(*options: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Train; return the metrics, and the trajectories of the first step."""
    assert main(["fit", *options, *SHORT, "--out=out"]) == 0
    return read_jsonl(Path("out/metrics.jsonl")), read_jsonl(Path("out/rollouts/step-00001.jsonl.gz"))


def named(*kinds: str) -> list[str]:
    """Return the options that name the written part of each kind."""
    return [f"--{KINDS[PLURALS[kind]].key}=New{kind.capitalize()}" for kind in kinds]


@pytest.mark.slow
def test_each_is_listed_and_passes_its_test(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "list"]) == 0
    listed = capsys.readouterr().out
    for kind in WRITTEN:
        assert f"rlkit-new-{kind}" in listed
        assert main(["plugins", "test", f"rlkit-new-{kind}"]) == 0, kind


def test_engine_parser_tool_reward_callback_and_logger(
    posted: tuple[str, list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    """The engine answers all with a call in the parser's syntax, for which the tool pays 0.25."""
    address, bodies = posted
    metrics, rollouts = fit(
        "--recipe=quickstart",
        *named("engine", "parser", "reward"),
        '--rollout.engine.text=@add {"numbers": [2, 3]}',
        "--rollout.max_gap=1000",
        "--rollout.sampling.max_tokens=40",
        "--tools={add: {class_path: NewTool, init_args: {call_reward: 0.25}}}",
        "--conversation.turns=2",
        "--callbacks=[{class_path: NewCallback, init_args: {patience: 1}}]",
        f"--log.loggers=[{{class_path: NewLogger, init_args: {{url: '{address}'}}}}]",
        "--train.steps=3",
        "--validation={every: 1, limit: 2, samples: 0}",
    )
    assert len(rollouts) == 16
    for row in rollouts:
        assert [role for role, _, _ in row["turns"]] == ["user", "assistant", "tool", "assistant"]
        assert row["turn_rewards"] == [0.25, 0.25]
        assert row["components"]["words"] == 4  # @add {"numbers": [2, 3]}
        assert row["reward"] == pytest.approx(4 / 10 + 2 * 0.25)
    assert len(metrics) == 1  # no validation was better than the one before training
    assert "callback NewCallback of plugin 'new-callback'" in capsys.readouterr().out
    [step, end] = bodies
    assert (step["step"], step["metrics"]["reward/mean"]) == (1, pytest.approx(metrics[0]["reward/mean"]))
    assert end["status"] == "success"


@pytest.mark.slow
def test_a_launcher_starts_the_ranks(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(site))
    options = ("--recipe=quickstart", "--launcher=NewLauncher", "--train.steps=1", "--validation=null")
    assert main(["fit", *options, *SHORT, "--out=out"]) == 0
    assert len(read_jsonl(Path("out/metrics.jsonl"))) == 1
    assert "NewLauncher" in Path("out/recipe.yaml").read_text()


def test_an_agent_asks_twice() -> None:
    _, rollouts = fit(
        "--recipe=quickstart",
        *named("agent", "reward"),
        "--train.steps=1",
        "--validation=null",
    )
    for row in rollouts:
        assert [role for role, _, _ in row["turns"]] == ["user", "assistant", "user", "assistant"]
        assert row["conversation"][1]["content"] == "Check this, and answer again."
        assert row["counts"]["forks"] == 0


def test_every_kind_of_part_in_one_run() -> None:
    metrics, rollouts = fit(
        "--recipe=quickstart",
        *named("task", "filter", "reward", "advantage", "loss", "optimizer", "schedule"),
        "--rollout.sampling.temperature=4",
        "--rollout.filter={low: 0.11, high: 0.19}",
        "--advantage.scale=2",
        "--train={lr: 1e-5, warmup_steps: 0, steps: 2}",
        "--train.schedule.decay_ratio=1",
        "--validation=null",
    )
    groups = [rollouts[first : first + 4] for first in range(0, 16, 4)]
    means = [sum(row["reward"] for row in group) / 4 for group in groups]
    kept = [0.11 <= mean <= 0.19 for mean in means]
    assert metrics[0]["filter/dropped"] == kept.count(False) / 4
    assert {True, False} == set(kept)
    loss, tokens = 0.0, 0
    for row, mean, learned in zip(
        rollouts, (m for m in means for _ in range(4)), (k for k in kept for _ in range(4)), strict=True
    ):
        assert row["prompt"].strip("ab") == ""
        assert row["reward"] == pytest.approx(len(row["text"].split()) / 10)
        assert ("advantages" in row) == learned
        for logp, mask, advantage in zip(row["logps"], row["mask"], row.get("advantages", ()), strict=False):
            assert advantage == pytest.approx(2 * (row["reward"] - mean) * mask, abs=1e-6)
            loss, tokens = loss - advantage * logp, tokens + mask
    assert metrics[0]["policy/loss"] == pytest.approx(loss / tokens, rel=1e-3)
    assert [row["lr"] for row in metrics] == [1e-5, 5e-6]
    before, after = load_file(TINY / "model.safetensors"), load_file("out/final/model.safetensors")
    moved = max(float((after[name] - weight).abs().max()) for name, weight in before.items())
    assert moved == pytest.approx(1.5e-5, rel=0.05)  # by the sign alone: both steps' rates


@pytest.mark.parametrize(
    ("loss", "metric", "options"),
    [
        ("NewSequenceLoss", "mean_logp", ("--recipe=quickstart",)),
        ("NewPairLoss", "margin", ("--recipe=quickstart", "--rollout.sampling.temperature=4", "--reward=NewReward")),
        ("NewScoreLoss", "error", ("--recipe=quick_rm",)),
    ],
)
def test_losses_of_each_kind(loss: str, metric: str, options: tuple[str, ...]) -> None:
    metrics, _ = fit(*options, f"--loss={loss}", "--advantage=null", "--train.steps=2", "--validation=null")
    assert all(f"policy/{metric}" in row for row in metrics)
    assert all(row["grad_norm"] > 0 for row in metrics)


def test_verb_recipe_and_environment(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new-command", "--recipe=new-recipe", "--first=2"]) == 0
    first, second, count = capsys.readouterr().out.splitlines()
    assert (" + " in first, " + " in second, count) == (True, True, "397 rows")
    _, rollouts = fit(
        "--recipe=new-recipe",
        "--environment={class_path: NewEnvironment, init_args: {max_turns: 2}}",
        "--reward=EpisodeReward",
        *ANSWERS_7,
    )
    tokenizer = load_tokenizer(Model("tiny"))
    for row in rollouts:
        text = tokenizer.decode(row["tokens"])
        assert ("Say 7." in text, len(row["turns"])) in ((True, 2), (False, 4))
        assert row["reward"] == float("Say 7." in text)
    assert {row["reward"] for row in rollouts} == {0.0, 1.0}


def test_interaction() -> None:
    _, rollouts = fit("--recipe=new-recipe", *named("interaction"), "--interaction.question=Surely so?", *ANSWERS_7)
    for row in rollouts:
        assert [role for role, _, _ in row["turns"]] == ["user", "assistant", "user", "assistant"]
