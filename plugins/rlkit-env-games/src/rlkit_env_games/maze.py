"""Walk from one number to another with moves such as `+3`, `*2` and `-1`. Best played by breadth-first search."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from rlkit.base.errors import RecipeError
from rlkit.base.ranges import Count, FiniteInt, NonNegativeFloat, Repeats
from rlkit.interfaces.environment import Environment, Observation
from rlkit.interfaces.parser import after_thinking
from rlkit.interfaces.tool import State
from rlkit.types import Prompt
from rlkit_env_games.game import GameTask, Rows, draw, read_meta

LARGEST_RANGE = 1000
"""Numbers in a range at most: searching them all takes some milliseconds of the event loop."""


@dataclass(frozen=True)
class Maze:
    """Get from `start` to `target` with `moves`, never leaving `low` to `high`."""

    start: int
    target: int
    moves: tuple[str, ...]
    low: int
    high: int

    def after(self, value: int, move: str) -> int | None:
        """Return the cell to which a move leads, or None if there is no such move from here."""
        if move not in self.moves:
            return None
        result = apply(value, move)
        return result if self.low <= result <= self.high else None


class MazeTask(GameTask):
    """Prompts that start `CalculatorMaze`.

    Args:
        moves: What may be done to a number: `+`, `-` or `*`, and a whole number.
        low: The smallest number of the maze.
        high: The largest.
        distance: How many moves the target is away at most.
        rows: Training prompts.
        validation_rows: Validation prompts, with other seeds.
    """

    def __init__(
        self,
        moves: Sequence[str] = ("+3", "*2", "-1"),
        low: FiniteInt = 0,
        high: FiniteInt = 99,
        *,
        distance: Count = 3,
        rows: Rows = 1000,
        validation_rows: Rows = 100,
    ) -> None:
        if wrong := [move for move in moves if not re.fullmatch(r"[-+*][0-9]{1,4}", move)]:
            raise RecipeError(f"MazeTask has the moves {', '.join(wrong)}, expected such as +3, -1 or *2")
        if not 0 <= high - low < LARGEST_RANGE:
            raise RecipeError(
                f"MazeTask has low={low} and high={high}, expected a range of 1 to {LARGEST_RANGE} numbers"
            )
        draw_maze(moves, low, high, distance, seed=0)
        meta = {"moves": list(moves), "low": low, "high": high, "distance": distance}
        super().__init__("maze", meta, rows, validation_rows)


class CalculatorMaze(Environment):
    """Asks for the way from one number to another, both chosen by the episode's seed (see `MazeTask`).

    The first observation is such as `5>13 +3 *2 -1`, those after a move are such as `8>13`. An action is one of the
    moves and nothing else, besides thinking; anything else, or a move out of the range, is told so and costs a turn.
    Reaching the target is worth max(0, 1 - detour_cost * turns beyond the shortest way), not reaching it 0.

    Args:
        spare_turns: Turns beyond the shortest way, after which the episode is over.
        detour_cost: What each of them takes off the reward.
    """

    def __init__(self, spare_turns: Repeats = 2, detour_cost: NonNegativeFloat = 0.0) -> None:
        self.spare_turns = spare_turns
        self.detour_cost = detour_cost

    async def reset(self, prompt: Prompt, seed: int, state: State) -> str:
        moves, low, high, distance = read_meta(prompt, ("moves", "low", "high", "distance"), "MazeTask")
        maze = draw_maze(moves, low, high, distance, seed)
        shortest = len(shortest_path(maze) or ())
        state.update(maze=maze, value=maze.start, turn=0, shortest=shortest)
        return f"{maze.start}>{maze.target} {' '.join(maze.moves)}"

    async def step(self, action: str, state: State) -> Observation:
        state["turn"] += 1
        maze: Maze = state["maze"]
        detour = state["turn"] - state["shortest"]
        move = after_thinking(action).strip()
        value = maze.after(state["value"], move)
        if value == maze.target:
            return Observation("correct", self.reward_at(detour), done=True)
        over = detour >= self.spare_turns
        if value is None:
            known = move in maze.moves
            wrong = f"not {maze.low}..{maze.high}" if known else f"not {' '.join(maze.moves)}"
            return Observation(wrong, done=over)
        state["value"] = value
        return Observation(f"{value}>{maze.target}", done=over)

    def reward_at(self, detour: int) -> float:
        """Return the reward for reaching the target, so many turns beyond the shortest way; `optimal_move` gets 1."""
        return max(0.0, 1.0 - self.detour_cost * detour)


def apply(value: int, move: str) -> int:
    """Return the result of applying `+3`, `-1` or `*2` to a number."""
    operand = int(move[1:])
    return {"+": value + operand, "-": value - operand, "*": value * operand}[move[0]]


def draw_maze(moves: Sequence[str], low: int, high: int, distance: int, seed: int) -> Maze:
    """Return the maze of a seed: any start from which a move leads on, any target at most `distance` moves away.

    Raises:
        RecipeError: No move leads from any number of the range to another.
    """
    count = high - low + 1
    first = draw(count, seed, "start")
    for offset in range(count):
        start = low + (first + offset) % count
        maze = Maze(start, start, tuple(moves), low, high)
        near = takewhile(lambda way: len(way[1]) <= distance, _ways(maze, start))
        if targets := [value for value, _ in near if value != start]:
            return Maze(start, targets[draw(len(targets), seed, "target")], tuple(moves), low, high)
    raise RecipeError(f"the moves {', '.join(moves) or '(none)'} lead nowhere from {low} to {high}; add others")


def shortest_path(maze: Maze, value: int | None = None) -> list[str] | None:
    """Return a shortest way to the target from the start, or from another value; None if there is none.

    Of ways of one length it is the first in the order of the moves.
    """
    ways = _ways(maze, maze.start if value is None else value)
    return next((path for reached, path in ways if reached == maze.target), None)


def optimal_move(maze: Maze, value: int | None = None) -> str | None:
    """Return the best next move; None at the target, or where no way leads to it."""
    path = shortest_path(maze, value)
    return path[0] if path else None


def _ways(maze: Maze, start: int) -> Iterator[tuple[int, list[str]]]:
    """Return all that can be reached with a shortest way to each, nearest first: breadth-first search."""
    ways: dict[int, list[str]] = {start: []}
    for value in (queue := [start]):
        yield value, ways[value]
        for move in maze.moves:
            reached = maze.after(value, move)
            if reached is not None and reached not in ways:
                ways[reached] = [*ways[value], move]
                queue.append(reached)
