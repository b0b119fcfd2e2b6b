"""Two small text games, whose best play and best reward are known."""

from __future__ import annotations

from collections.abc import Callable

from rlkit import hookimpl
from rlkit.interfaces.environment import Environment
from rlkit.interfaces.task import Task
from rlkit_env_games.guess import GuessNumber, GuessTask, hidden_number, optimal_guess
from rlkit_env_games.maze import CalculatorMaze, Maze, MazeTask, draw_maze, optimal_move, shortest_path

__all__ = [
    "CalculatorMaze",
    "GuessNumber",
    "GuessTask",
    "Maze",
    "MazeTask",
    "draw_maze",
    "hidden_number",
    "optimal_guess",
    "optimal_move",
    "shortest_path",
]


@hookimpl
def rlkit_register_environments(register: Callable[[type[Environment]], None]) -> None:
    register(GuessNumber)
    register(CalculatorMaze)


@hookimpl
def rlkit_register_tasks(register: Callable[[type[Task]], None]) -> None:
    register(GuessTask)
    register(MazeTask)
