"""Both games: rewards worked by hand, best play within the bound, nothing that an action can break."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import pytest
import rlkit_env_games
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rlkit_env_games import (
    CalculatorMaze,
    GuessNumber,
    GuessTask,
    Maze,
    MazeTask,
    draw_maze,
    hidden_number,
    optimal_guess,
    optimal_move,
    shortest_path,
)
from rlkit_env_games.maze import apply

from rlkit.base.errors import RecipeError
from rlkit.interfaces.environment import Environment, Observation
from rlkit.registry import load_plugins
from rlkit.testing import check_task
from rlkit.types import Prompt

SEEDS = st.integers(0, 2**63 - 1)
MOVES = st.lists(st.sampled_from(["+3", "*2", "-1", "+7", "-4", "*3"]), min_size=1, max_size=4, unique=True)
Turns = list[tuple[str, str]]


def play(
    game: Environment, meta: Mapping[str, Any], seed: int, act: Callable[[str, Turns], str]
) -> tuple[str, list[Observation]]:
    """Play an episode to its end; give the first observation and all that follow."""

    async def episode() -> tuple[str, list[Observation]]:
        state: dict[str, Any] = {}
        first = await game.reset(Prompt("p", [], meta=meta), seed, state)
        turns: Turns = []
        seen: list[Observation] = []
        while not seen or not seen[-1].done:
            action = act(first, turns)
            seen.append(await game.step(action, state))
            turns.append((action, seen[-1].text))
        await game.finish(state)
        return first, seen

    return asyncio.run(episode())


def scripted(*actions: str) -> Callable[[str, Turns], str]:
    return lambda first, turns: actions[len(turns)]


def seed_hiding(number: int, low: int, high: int) -> int:
    return next(seed for seed in range(10_000) if hidden_number(low, high, seed) == number)


# --- GuessNumber


def test_guesses_pay_less_with_each_turn() -> None:
    meta, seed = {"low": 1, "high": 8}, seed_hiding(6, 1, 8)
    first, seen = play(GuessNumber(guess_cost=0.25), meta, seed, scripted("4", " 7\n", "6"))
    assert first == "1..8"
    # the third turn is worth 1 - 0.25 * 2
    assert seen == [
        Observation("higher", 0.0, False),
        Observation("lower", 0.0, False),
        Observation("correct", 0.5, True),
    ]


def test_a_reward_is_never_negative() -> None:
    meta, seed = {"low": 1, "high": 8}, seed_hiding(6, 1, 8)
    _, seen = play(GuessNumber(guess_cost=0.75), meta, seed, scripted("4", "7", "6"))
    assert seen[-1] == Observation("correct", 0.0, True)


@pytest.mark.parametrize("action", ["", "four", "0", "9", "4.0", "1_0", "\uff14", "4 5", "9" * 5000, "-", "\x00"])
def test_an_invalid_guess_is_told_so_and_costs_a_turn(action: str) -> None:
    meta, seed = {"low": 1, "high": 8}, seed_hiding(4, 1, 8)
    _, seen = play(GuessNumber(max_turns=2, guess_cost=0.1), meta, seed, scripted(action, "4"))
    assert seen == [Observation("not 1..8", 0.0, False), Observation("correct", 0.9, True)]


def test_an_episode_ends_unrewarded_after_its_last_turn() -> None:
    meta, seed = {"low": 1, "high": 8}, seed_hiding(6, 1, 8)
    _, seen = play(GuessNumber(max_turns=2), meta, seed, scripted("4", "x"))
    assert seen[-1] == Observation("not 1..8", 0.0, True)


@given(low=st.integers(-50, 50), count=st.integers(1, 300), seed=SEEDS)
def test_halving_finds_every_number_within_the_bound(low: int, count: int, seed: int) -> None:
    high = low + count - 1
    first, seen = play(
        GuessNumber(), {"low": low, "high": high}, seed, lambda first, turns: optimal_guess(low, high, turns)
    )
    # ceil(log2(count)) questions leave one number, and naming it may be one more: ceil(log2(count + 1)) in all
    assert 2 ** (len(seen) - 1) <= count
    assert first == f"{low}..{high}"
    assert seen[-1] == Observation("correct", 1.0, True)


def test_the_best_reward_of_eight_numbers_by_hand() -> None:
    # 4 is found at turn 1; 2 and 6 at turn 2; 1, 3, 5, 7 at turn 3; 8 at turn 4
    game = GuessNumber(guess_cost=0.1)
    assert game.best_reward(1, 8) == pytest.approx((1 + 2 * 0.9 + 4 * 0.8 + 1 * 0.7) / 8)
    assert GuessNumber(max_turns=2).best_reward(1, 8) == pytest.approx(3 / 8)
    assert GuessNumber().best_reward(1, 8) == 1.0


@settings(max_examples=30)
@given(
    count=st.integers(1, 40),
    cost=st.sampled_from([0.0, 0.1, 0.4]),
    max_turns=st.none() | st.integers(1, 6),
)
def test_the_best_reward_is_what_halving_gets_on_average(count: int, cost: float, max_turns: int | None) -> None:
    game = GuessNumber(max_turns, cost)
    meta = {"low": 1, "high": count}
    rewards = [
        play(game, meta, seed_hiding(n, 1, count), lambda first, turns: optimal_guess(1, count, turns))[1][-1].reward
        for n in range(1, count + 1)
    ]
    assert sum(rewards) / count == pytest.approx(game.best_reward(1, count))


def test_no_policy_beats_halving_on_five_numbers() -> None:
    """Every decision tree over 1..5, by exhaustion: the expected reward of the best is that of halving."""

    def best(numbers: tuple[int, ...], turn: int) -> float:
        if not numbers or turn > game.turns_allowed(1, 5):
            return 0.0
        return max(
            (g in numbers) * game.reward_at(turn)
            + best(tuple(n for n in numbers if n < g), turn + 1)
            + best(tuple(n for n in numbers if n > g), turn + 1)
            for g in numbers
        )

    for cost, turns in product((0.0, 0.3), (None, 1, 2)):
        game = GuessNumber(turns, cost)
        assert best((1, 2, 3, 4, 5), 1) / 5 == pytest.approx(game.best_reward(1, 5))


# --- CalculatorMaze


def test_moves_are_answered_and_a_detour_costs() -> None:
    meta = {"moves": ["+3", "*2", "-1"], "low": 0, "high": 99, "distance": 3}
    seed = next(s for s in range(1000) if draw_maze(meta["moves"], 0, 99, 3, s).start == 5)
    maze = draw_maze(meta["moves"], 0, 99, 3, seed)
    way = shortest_path(maze)
    assert way is not None
    game = CalculatorMaze(spare_turns=2, detour_cost=0.25)
    first, seen = play(game, meta, seed, scripted("jump", *way))
    assert first == f"5>{maze.target} +3 *2 -1"
    assert seen[0] == Observation("not +3 *2 -1", 0.0, False)
    assert seen[-1] == Observation("correct", 0.75, True)  # one turn more than the shortest way
    assert len(seen) == len(way) + 1


def test_a_move_out_of_the_range_is_told_so_and_leads_nowhere() -> None:
    meta = {"moves": ["+3", "-1"], "low": 0, "high": 3, "distance": 1}
    seed = next(s for s in range(1000) if draw_maze(["+3", "-1"], 0, 3, 1, s) == Maze(0, 3, ("+3", "-1"), 0, 3))
    first, seen = play(CalculatorMaze(), meta, seed, scripted("-1", "+3"))
    assert first == "0>3 +3 -1"
    assert seen == [Observation("not 0..3", 0.0, False), Observation("correct", 1.0, True)]


def test_the_maze_ends_after_the_spare_turns() -> None:
    meta = {"moves": ["+1", "-1"], "low": 0, "high": 9, "distance": 1}
    _, seen = play(CalculatorMaze(spare_turns=2), meta, 0, lambda first, turns: "nowhere")
    assert len(seen) == 3  # the shortest way has 1 move
    assert seen[-1] == Observation("not +1 -1", 0.0, True)


def test_the_shortest_way_by_hand() -> None:
    # one move reaches 8, 10, 4 and two reach 11, 16, 7, 13, 20, 9, 3; of 8, 16, 19 and 10, 20, 19 the former is first
    maze = Maze(5, 19, ("+3", "*2", "-1"), 0, 99)
    assert shortest_path(maze) == ["+3", "*2", "+3"]
    assert optimal_move(maze, 20) == "-1"
    assert optimal_move(maze, 19) is None
    assert optimal_move(Maze(5, 4, ("+3",), 0, 99)) is None


@given(moves=MOVES, low=st.integers(-20, 5), count=st.integers(10, 120), distance=st.integers(1, 5), seed=SEEDS)
def test_the_best_moves_always_get_the_whole_reward(
    moves: list[str], low: int, count: int, distance: int, seed: int
) -> None:
    numbers = range(low, low + count)
    assume(any(apply(n, move) in numbers and apply(n, move) != n for n in numbers for move in moves))
    meta = {"moves": moves, "low": low, "high": low + count - 1, "distance": distance}
    maze = draw_maze(moves, low, low + count - 1, distance, seed)

    def act(first: str, turns: Turns) -> str:
        return optimal_move(maze, int(turns[-1][1].partition(">")[0]) if turns else maze.start) or ""

    _, seen = play(CalculatorMaze(spare_turns=0, detour_cost=1.0), meta, seed, act)
    assert seen[-1] == Observation("correct", 1.0, True)
    assert len(seen) <= distance


@given(moves=MOVES, seed=SEEDS)
def test_no_shorter_way_exists(moves: list[str], seed: int) -> None:
    maze = draw_maze(moves, 0, 60, 3, seed)
    path = shortest_path(maze)
    assert path is not None
    for length in range(len(path)):
        for way in product(moves, repeat=length):
            value: int | None = maze.start
            for move in way:
                value = None if value is None else maze.after(value, move)
            assert value != maze.target


# --- both

BOTH = [
    (GuessNumber(max_turns=4), GuessTask(1, 20)),
    (CalculatorMaze(), MazeTask()),
]


@pytest.mark.parametrize(("game", "task"), BOTH)
@given(seed=SEEDS, actions=st.lists(st.text() | st.sampled_from(["3", "+3", "*2", "-1"]), min_size=9, max_size=9))
def test_no_action_raises_and_one_seed_is_one_game(
    game: Environment, task: GuessTask | MazeTask, seed: int, actions: list[str]
) -> None:
    first, seen = play(game, task.meta, seed, scripted(*actions))
    assert (first, seen) == play(game, task.meta, seed, scripted(*actions))
    assert all(len(text) <= 16 for text in (first, *(o.text for o in seen)))


@pytest.mark.parametrize(("game", "task"), BOTH)
def test_seeds_make_different_games(game: Environment, task: GuessTask | MazeTask) -> None:
    games = {str(play(game, task.meta, seed, lambda first, turns: "3")) for seed in range(50)}
    assert len(games) > 1
    assert len({hidden_number(1, 20, seed) for seed in range(400)}) == 20


@pytest.mark.parametrize("task", [GuessTask(1, 20, rows=3, validation_rows=2), MazeTask(rows=3, validation_rows=2)])
def test_tasks_give_their_rows_and_start_the_game(task: GuessTask | MazeTask) -> None:
    train, held_out = check_task(task)
    assert train.messages == [{"role": "system", "content": task.game}]
    assert train.meta == held_out.meta == task.meta
    assert [row["id"] for row in task.rows("train")] == [f"{task.game}-train-{i}" for i in range(3)]
    assert [row["id"] for row in task.rows("validation")] == [f"{task.game}-validation-{i}" for i in range(2)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GuessTask(5, 4), "low=5 and high=4"),
        (lambda: MazeTask(["+3", "/2"]), "has the moves /2"),
        (lambda: MazeTask(["+0", "*1"]), "lead nowhere from 0 to 99"),
        (lambda: MazeTask([]), r"\(none\) lead nowhere"),
        (lambda: MazeTask(high=5000), "a range of 1 to 1000"),
    ],
)
def test_options_are_checked(make: Callable[[], object], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        make()


def test_a_prompt_of_another_task_is_refused() -> None:
    with pytest.raises(RecipeError, match="has low, high, expected also moves, distance; use `task: MazeTask`"):
        play(CalculatorMaze(), GuessTask().meta, 0, scripted())


def test_they_register() -> None:
    registry = load_plugins([("env-games", rlkit_env_games)], entry_points=False)
    registry.require_healthy()
    assert {"GuessNumber", "CalculatorMaze"} <= set(registry.parts["environments"])
    assert {"GuessTask", "MazeTask"} <= set(registry.parts["tasks"])


@pytest.mark.parametrize(
    ("game", "meta", "right"),
    [
        (GuessNumber(max_turns=2), {"low": 1, "high": 1}, "1"),
        (CalculatorMaze(), {"moves": ["+1"], "low": 0, "high": 1, "distance": 1}, "+1"),
    ],
    ids=["guess", "maze"],
)
def test_a_move_in_thinking_is_none(game: Environment, meta: Mapping[str, Any], right: str) -> None:
    _, seen = play(game, meta, 0, scripted(f"<think>{right}", f"<think>9</think>\n{right}"))
    assert [answer.done for answer in seen] == [False, True]
    assert seen[0].text != seen[1].text == "correct"
