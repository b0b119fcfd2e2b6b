"""Guess a hidden number: `1..8`, then `higher`, `lower` or `correct`. Best played by halving the range."""

from __future__ import annotations

import re
from collections.abc import Iterable

from rlkit.base.errors import RecipeError
from rlkit.base.ranges import Count, FiniteInt, NonNegativeFloat
from rlkit.interfaces.environment import Environment, Observation
from rlkit.interfaces.parser import after_thinking
from rlkit.interfaces.tool import State
from rlkit.types import Prompt
from rlkit_env_games.game import GameTask, Rows, draw, read_meta

HIGHER, LOWER, CORRECT = "higher", "lower", "correct"


class GuessTask(GameTask):
    """Prompts that start `GuessNumber`.

    Args:
        low: The smallest number that may be hidden.
        high: The largest.
        rows: Training prompts.
        validation_rows: Validation prompts, with other seeds.
    """

    def __init__(self, low: FiniteInt = 1, high: FiniteInt = 8, rows: Rows = 1000, validation_rows: Rows = 100) -> None:
        if low > high:
            raise RecipeError(f"GuessTask has low={low} and high={high}, expected low <= high")
        super().__init__("guess", {"low": low, "high": high}, rows, validation_rows)


class GuessNumber(Environment):
    """Hides a number from `low` to `high` of the prompt's meta data (see `GuessTask`), chosen by the episode's seed.

    An action is a number and nothing else, besides thinking; anything else, or a number out of range, is told so and
    costs a turn. Finding the number at turn k is worth max(0, 1 - guess_cost * (k - 1)), not finding it 0.

    Args:
        max_turns: After so many turns the episode is over; null allows as many as halving may need.
        guess_cost: What each turn after the first takes off the reward.
    """

    def __init__(self, max_turns: Count | None = None, guess_cost: NonNegativeFloat = 0.0) -> None:
        self.max_turns = max_turns
        self.guess_cost = guess_cost

    async def reset(self, prompt: Prompt, seed: int, state: State) -> str:
        low, high = read_meta(prompt, ("low", "high"), "GuessTask")
        state.update(low=low, high=high, hidden=hidden_number(low, high, seed), turn=0)
        return f"{low}..{high}"

    async def step(self, action: str, state: State) -> Observation:
        state["turn"] += 1
        low, high, hidden, turn = state["low"], state["high"], state["hidden"], state["turn"]
        guess = read_guess(action, low, high)
        if guess == hidden:
            return Observation(CORRECT, self.reward_at(turn), done=True)
        text = f"not {low}..{high}" if guess is None else HIGHER if guess < hidden else LOWER
        return Observation(text, done=turn >= self.turns_allowed(low, high))

    def turns_allowed(self, low: int, high: int) -> int:
        """Return after how many turns an episode is over."""
        return most_guesses(low, high) if self.max_turns is None else self.max_turns

    def reward_at(self, turn: int) -> float:
        """Return the reward for finding the number at this turn; the first turn is 1."""
        return max(0.0, 1.0 - self.guess_cost * (turn - 1))

    def best_reward(self, low: int, high: int) -> float:
        """Return the expected reward of `optimal_guess`, which no policy exceeds.

        Halving finds 1 number at the first turn, up to 2 at the second, 4 at the third, …, and no policy more.
        """
        count = left = high - low + 1
        total = 0.0
        for turn in range(1, self.turns_allowed(low, high) + 1):
            found = min(left, 2 ** (turn - 1))
            total += found * self.reward_at(turn)
            left -= found
        return total / count


def hidden_number(low: int, high: int, seed: int) -> int:
    """Return the number that an episode with this seed hides."""
    return low + draw(high - low + 1, seed, "hidden")


def most_guesses(low: int, high: int) -> int:
    """Return the guesses that halving needs at worst: floor(log2(n)) + 1 for n numbers, the last one `correct`."""
    return (high - low + 1).bit_length()


def read_guess(action: str, low: int, high: int) -> int | None:
    """Return the number that the action is, or None if it is not one from `low` to `high`."""
    if not re.fullmatch(r"-?[0-9]{1,18}", text := after_thinking(action).strip()):
        return None
    return int(text) if low <= int(text) <= high else None


def optimal_guess(low: int, high: int, turns: Iterable[tuple[str, str]] = ()) -> str:
    """Return the best next action after `turns`, which are (action, observation): the middle of what is left."""
    for action, observation in turns:
        guess = read_guess(action, low, high)
        if guess is not None and observation == HIGHER:
            low = max(low, guess + 1)
        elif guess is not None and observation == LOWER:
            high = min(high, guess - 1)
    return str((low + high) // 2)
