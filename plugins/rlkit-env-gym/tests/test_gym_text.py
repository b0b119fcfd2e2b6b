"""GymText with real environments: rewards known by hand, hostile actions, and episodes that are always closed."""

from __future__ import annotations

import asyncio
import threading
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import rlkit_env_gym
from gymnasium.spaces import Box, Discrete, Text
from rlkit_authors.runtime import ExampleRuntime
from rlkit_env_gym import GymTask, GymText
from rlkit_env_gym.packages import SUPPORTED
from rlkit_env_gym.spaces import Actions, plain

from rlkit.base.errors import RecipeError
from rlkit.interfaces.environment import Observation
from rlkit.registry import load_plugins
from rlkit.rollout.guard import GuardError, guard
from rlkit.testing import check_environment, check_task
from rlkit.types import Prompt

closed: list[str] = []
release = threading.Event()


class Echo(gymnasium.Env[str, str]):
    """Says a word of `abc`, and is worth the characters that the action has in common with it."""

    observation_space = Text(4, charset="abc")
    action_space = Text(4, charset="abc")

    def __init__(self, trouble: str = "") -> None:
        self.trouble = trouble
        self.word = ""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        if self.trouble == "reset":
            raise ValueError("no episode")
        self.word = "".join(self.np_random.choice(list("abc"), 4))
        return self.word, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if self.trouble == "hang":
            release.wait(60)
        if self.trouble == "stop":
            raise StopIteration
        return self.word, sum(a == b for a, b in zip(action, self.word, strict=False)), action == self.word, False, {}

    def close(self) -> None:
        closed.append(self.trouble)


class Numbers(Echo):
    observation_space = Box(0.0, 1.0)  # type: ignore[assignment]


class Boxed(Echo):
    action_space = Box(0.0, 1.0)  # type: ignore[assignment]


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    for name, cls in (("Echo-v0", Echo), ("Numbers-v0", Numbers), ("Boxed-v0", Boxed)):
        gymnasium.register(name, cls, max_episode_steps=5)


def play(game: GymText, *actions: str, seed: int = 0) -> tuple[str, list[Observation]]:
    """Play the actions until the episode is over; return the first observation and those that follow."""

    async def episode() -> tuple[str, list[Observation]]:
        state: dict[str, Any] = {}
        try:
            first = await game.reset(Prompt("p", []), seed, state)
            seen: list[Observation] = []
            for action in actions:
                seen.append(await game.step(action, state))
                if seen[-1].done:
                    break
            return first, seen
        finally:
            await game.finish(state)

    return asyncio.run(episode())


def test_a_lake_is_crossed_by_hand() -> None:
    game = GymText("FrozenLake-v1", {"is_slippery": False})
    way = ("down", "down", "right", "<action>Right</action>", "I go <action>up</action>, no, <action> down\n</action>")
    first, seen = play(game, *way, "<think>left?</think> RIGHT")
    assert first == "[S]FFF\nFHFH\nFFFH\nHFFG\nYour action: one of left, down, right, up."
    assert [(o.reward, o.done) for o in seen] == [(0.0, False)] * 5 + [(1.0, True)]
    assert seen[0].text == "  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG"
    assert seen[-1].text == "  (Right)\nSFFF\nFHFH\nFFFH\nHFF[G]"


def test_a_hole_ends_the_episode_unrewarded() -> None:
    _, seen = play(GymText(options={"is_slippery": False}), "right", "down", "left")
    assert [(o.reward, o.done) for o in seen] == [(0.0, False), (0.0, True)]


def test_each_step_of_a_taxi_has_its_reward() -> None:
    # a step costs 1, dropping nobody off costs 10
    first, seen = play(GymText("Taxi-v4"), "north", "dropoff")
    assert [o.reward for o in seen] == [-1.0, -10.0]
    assert first.count("[") == 1  # the taxi
    assert first.count("*") == 2  # the passenger
    assert "<" in first  # the destination


def test_truncation_ends_an_episode() -> None:
    _, seen = play(GymText("CliffWalking-v1", max_steps=2), "right", "up", "up")
    assert [(o.reward, o.done) for o in seen] == [(-100.0, False), (-1.0, True)]


def test_names_of_actions_are_the_recipes() -> None:
    game = GymText(options={"is_slippery": False}, actions=["l", "d", "r", "u"])
    first, seen = play(game, "d", "left")
    assert first.endswith("Your action: one of l, d, r, u.")
    assert seen[1] == Observation("That is no action, expected one of l, d, r, u.", 0.0, False)


def test_text_is_an_action_and_an_observation() -> None:
    first, [one, other, right] = play(GymText("Echo-v0"), "a", "aaaa", "bcab", seed=7)
    word = first.partition("\n")[0]
    assert first == f"{word}\nYour action: 1 to 4 of the characters abc."
    assert one == Observation(word, float(word[0] == "a"), False)
    assert other.reward == word.count("a")
    assert right.done == (word == "bcab")


HOSTILE = [
    "",
    " \n",
    "NaN",
    "1e999",
    "9" * 100_000,
    "\x00",
    "\uff11",
    "\u0661",
    "left right",
    "<action></action>",
    "4",
    "-1",
]


@pytest.mark.parametrize("action", HOSTILE)
@pytest.mark.parametrize("id", ["FrozenLake-v1", "Echo-v0"], ids=["named", "texts"])
def test_an_unreadable_action_is_answered_and_counted(id: str, action: str) -> None:
    game = GymText(id, max_unreadable=2, unreadable_reward=-0.25)
    _, seen = play(game, action, action, action)
    assert [(o.reward, o.done) for o in seen] == [(-0.25, False), (-0.25, True)]
    assert all("That is no action, expected " in o.text and len(o.text) < 200 for o in seen)


def test_numbers_are_actions_without_names() -> None:
    actions = Actions(Discrete(3, start=-1))
    assert [actions.read(text) for text in ("-1", " 1 ", "2", "1.0", "01")] == [-1, 1, None, None, 1]
    thoughts = (
        "<think>0</think>1",
        "0</think>1",
        "<think><action>1</action>",
        "<action>1</action><think><action>0</action>",
    )
    assert [actions.read(text) for text in thoughts] == [1, 1, None, 1]
    assert actions.description == "a number from -1 to 1"


def test_a_seed_is_an_episode_of_its_own() -> None:
    starts = {play(GymText("Taxi-v4"), seed=seed)[0] for seed in range(20)}
    assert len(starts) > 10
    slips = ["right"] * 20
    assert play(GymText(), *slips, seed=-(2**62)) == play(GymText(), *slips, seed=-(2**62))


@pytest.mark.parametrize("trouble", ["reset", "stop", ""])
def test_an_episode_is_closed_whatever_happens(trouble: str) -> None:
    closed.clear()
    game = GymText("Echo-v0", {"trouble": trouble})
    if trouble:
        with pytest.raises((ValueError, RuntimeError), match="no episode|StopIteration"):
            play(game, "a")
    else:
        play(game, "a")
    assert closed == [trouble]


def test_a_step_that_hangs_ends_its_own_episode_alone() -> None:
    hanging, sane = GymText("Echo-v0", {"trouble": "hang"}, timeout=0.2), GymText("Echo-v0")

    async def both() -> Observation:
        stuck: dict[str, Any] = {}
        state: dict[str, Any] = {}
        await hanging.reset(Prompt("p", []), 0, stuck)
        await sane.reset(Prompt("p", []), 0, state)
        with pytest.raises(GuardError, match=r"GymText of .*env.gym.*: did not finish within 0\.2 s"):
            await guard(lambda: hanging.step("a", stuck), hanging)
        await guard(lambda: hanging.finish(stuck), hanging)
        observation = await sane.step("a", state)
        await sane.finish(state)
        return observation

    closed.clear()
    try:
        assert not asyncio.run(both()).done
    finally:
        release.set()
    assert sorted(closed) == ["", "hang"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GymText("FrozenLak-v1"), "did you mean 'FrozenLake-v1'"),
        (lambda: GymText("os:Env-v0"), "a recipe imports no module; import 'os' in a plugin of your own"),
        (lambda: GymText(options={"render_mode": "human"}), "has the options render_mode, which it sets itself"),
        (lambda: bound("Numbers-v0"), "GymText cannot play Numbers-v0: its observations are Box"),
        (lambda: bound("Boxed-v0"), "the action space is Box.*expected Discrete or Text"),
        (lambda: bound("FrozenLake-v1", actions=["a"]), "`actions` has 1 names, expected 4"),
        (lambda: bound("FrozenLake-v1", actions=["a", "A", "b", "c"]), "has a name twice"),
        (lambda: bound("Echo-v0", actions=["a"]), "`actions` names 1 actions, but the action space is Text"),
        (lambda: bound("FrozenLake-v1", {"ice": 1}), "cannot make FrozenLake-v1: TypeError.*'ice'"),
    ],
)
def test_what_cannot_be_played_is_refused(make: Any, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        make()


def bound(id: str, options: dict[str, Any] | None = None, actions: list[str] | None = None) -> None:
    GymText(id, options, actions).bind(ExampleRuntime())


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlkit.base.imports.metadata.version", lambda package: "0.29.1")
    with pytest.raises(RecipeError, match=r"gymnasium is 0.29.1, but rlkit-env-gym supports >=1.4,<2: pip install"):
        GymText()


def test_the_supported_versions_are_those_required() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert project["dependencies"][1:] == [f"{package}{versions}" for package, versions in SUPPORTED.items()]


@pytest.mark.parametrize(
    ("rendering", "text"),
    [
        ("a\x1b[41mb\x1b[0mc", "a[b]c"),
        ("\x1b[34;1m\x1b[43mR\x1b[0m\x1b[0m.", "[*R*]."),
        ("\x1b[35mR\x1b[m \x1b[2Jx\n", "<R> x"),
        ("\x1b[41", "\x1b[41"),
    ],
)
def test_colours_become_marks(rendering: str, text: str) -> None:
    assert plain(rendering) == text


@pytest.mark.parametrize("id", ["FrozenLake-v1", "Taxi-v4", "Echo-v0"])
def test_the_contract_holds(id: str) -> None:
    check_environment(lambda: GymText(id))


def rows_of(task: GymTask, split: Any) -> Sequence[Any]:
    return [row["id"] for row in task.rows(split)]


def test_each_row_starts_an_episode() -> None:
    task = GymTask("Play.", rows=2, validation_rows=1)
    train, held_out = check_task(task)
    assert train.messages == held_out.messages == [{"role": "system", "content": "Play."}]
    assert rows_of(task, "train") + rows_of(task, "validation") == ["gym-train-0", "gym-train-1", "gym-validation-0"]


def test_they_register() -> None:
    registry = load_plugins([("env-gym", rlkit_env_gym)], entry_points=False)
    registry.require_healthy()
    assert "GymText" in registry.parts["environments"]
    assert "ReasoningGymScore" in registry.parts["rewards"]
    assert {"GymTask", "ReasoningGym"} <= set(registry.parts["tasks"])
