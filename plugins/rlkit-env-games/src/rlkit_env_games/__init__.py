"""Two small text games, whose best play and best reward are known."""

from __future__ import annotations

from pathlib import Path

from rlkit.hooks import Register, hookimpl
from rlkit_env_games.guess import GuessNumber, GuessTask, hidden_number, optimal_guess
from rlkit_env_games.maze import CalculatorMaze, Maze, MazeTask, draw_maze, optimal_move, shortest_path

__all__ = [
    "CalculatorMaze", "GuessNumber", "GuessTask", "Maze", "MazeTask", "draw_maze", "hidden_number", "optimal_guess",
    "optimal_move", "shortest_path",
]  # fmt: skip


@hookimpl
def rlkit_register(register: Register) -> None:
    register(GuessNumber)
    register(CalculatorMaze)
    register(GuessTask)
    register(MazeTask)


@hookimpl
def rlkit_recipes() -> Path:
    """Return the folder of `quick_guess` and `grpo_guess`."""
    return Path(__file__).parent / "recipes"
