"""reasoning-gym's generators as a task, and their own scorers as a reward."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Annotated, Any

from annotated_types import Ge, Le

from rlkit.base.errors import RecipeError, explain, show
from rlkit.base.ranges import NUMBER, PositiveFloat, Seconds
from rlkit.interfaces.parser import after_thinking
from rlkit.interfaces.reward import OnError, RewardFunction, as_number
from rlkit.interfaces.task import Split, Task
from rlkit.types import Prompt, Row, Score, Trajectory
from rlkit_env_gym.generators import (
    PARSED,
    is_formula,
    make_composite,
    make_generator,
    names_of,
    require_generator,
    scorer,
)

Size = Annotated[int, Ge(1), Le(1_000_000), NUMBER]
Seed = Annotated[int, Ge(0), Le(2**31 - 1), NUMBER]
ATTEMPTS = 3
"""Spare rows for each row that its generator cannot make."""
CACHED = 4096
"""Rows that are kept, since some generators take a second for each."""
INSTRUCTIONS = (
    "Given a problem, answer the question by thinking step by step. Then write the final answer alone as "
    "<answer>answer here</answer>."
)


class ReasoningGym(Task):
    """Problems of reasoning-gym, generated when they are needed; `ReasoningGymScore` scores them.

    Training rows are rows 0 to `size` - 1 of the data set with this seed, as `reasoning_gym.create_dataset` returns
    them; the next `validation_size` rows are held out. A row whose generator fails is replaced by a spare one, with a
    warning.

    Args:
        dataset: The name of a data set, such as `basic_arithmetic`; or names with weights, for a mixture.
        size: Training rows.
        validation_size: Validation rows.
        seed: Seed of the data set.
        config: Options of the data set; for a mixture by the name of the data set.
        instructions: The system message; empty for none.
    """

    def __init__(
        self,
        dataset: str | dict[str, PositiveFloat] = "basic_arithmetic",
        size: Size = 1000,
        validation_size: Size = 100,
        seed: Seed = 42,
        *,
        config: dict[str, Any] | None = None,
        instructions: str = INSTRUCTIONS,
    ) -> None:
        self.dataset = dataset
        self.size = size
        self.validation_size = validation_size
        self.seed = seed
        self.config = dict(config or {})
        self.instructions = instructions

    def rows(self, split: Split) -> Sequence[Row]:
        names = names_of(self.dataset)
        if not names:
            raise RecipeError("ReasoningGym has no data sets, expected a name, or names with weights")
        for name in names:
            require_generator(name)
        rows = self.size + self.validation_size
        total = rows * (1 + ATTEMPTS)
        if isinstance(self.dataset, str):
            generator = make_generator(self.dataset, self.seed, total, self.config)
        else:
            unknown = self.config.keys() - self.dataset.keys()
            if unknown:
                listed = ", ".join(sorted(unknown))
                raise RecipeError(f"ReasoningGym has a config for {listed}, expected only: {', '.join(names)}")
            generator = make_composite(self.dataset, self.seed, total, self.config)
        indices = range(self.size) if split == "train" else range(self.size, rows)
        return GeneratedRows(generator, indices, rows)

    def prompt(self, row: Row, index: int) -> Prompt:
        entry = row["entry"]
        name = self.dataset if isinstance(self.dataset, str) else entry["metadata"]["source_dataset"]
        config = self.config if isinstance(self.dataset, str) else self.config.get(name, {})
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        answer = entry.get("answer")
        return Prompt(
            id=f"{name}-{self.seed}-{row['index']}",
            messages=[*system, {"role": "user", "content": entry["question"]}],
            answer=answer if isinstance(answer, str) else None,
            meta={"data_source": name, "config": config, "entry": entry},
        )


class GeneratedRows(Sequence[Row]):
    """Rows of a data set, each generated when it is read.

    Args:
        generator: A data set of reasoning-gym.
        indices: The rows of the split.
        first_spare: Rows from here on replace those that cannot be generated.
    """

    def __init__(self, generator: Any, indices: range, first_spare: int) -> None:
        self.generator = generator
        self.indices = indices
        self.first_spare = first_spare
        self._cached = lru_cache(CACHED)(self._generate)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Row:  # type: ignore[override]
        return self._cached(self.indices[index])

    def _generate(self, index: int) -> Row:
        errors = []
        for attempt in range(1 + ATTEMPTS):
            drawn = index if attempt == 0 else self.first_spare + ATTEMPTS * index + attempt - 1
            try:
                entry = _checked(self.generator[drawn])
            except Exception as error:  # the generator's own code
                errors.append(explain(error))
                continue
            if errors:
                warnings.warn(f"row {index} of reasoning-gym is replaced by another: {errors[0]}", stacklevel=2)
            return {"index": index, "entry": entry}
        raise RecipeError(f"reasoning-gym cannot generate row {index}, nor {ATTEMPTS} others: {errors[0]}")


def _checked(entry: Any) -> dict[str, Any]:
    if not isinstance(entry, dict) or not isinstance(entry.get("question"), str):
        raise TypeError(f"the generator returned {show(entry)}, expected a dictionary with the text `question`")
    return entry


class ReasoningGymScore(RewardFunction):
    """The score of reasoning-gym's own scorer of the prompt's data set, usually from 0 to 1; for `ReasoningGym`.

    The answer is the content of the last `<answer>`. Its `accuracy` is 1 if the score is 1 or more. Answers are never
    evaluated as Python: a scorer that would do so gets literals and formulae only, and any other answer is worth 0.
    An answer on which the scorer fails, but not on the reference, is worth 0 and counts as `reward/ungradable`.

    Args:
        tagged: Whether a completion without `<answer>` has no answer; otherwise the answer is the text after the last
            `####`, else all of it, without the thinking.
        timeout: Seconds for one trajectory.
        on_error: What happens to a group with a failed score.
    """

    components = ("accuracy",)

    def __init__(self, tagged: bool = True, timeout: Seconds = 10.0, on_error: OnError = "drop") -> None:
        self.tagged = tagged
        self.timeout = timeout
        self.on_error = on_error

    def grade(self, trajectory: Trajectory) -> Score:
        problem = self.unscorable(trajectory.prompt)
        if problem is not None:
            return Score(None, error=f"prompt {trajectory.prompt.id!r} {problem}")
        meta = trajectory.prompt.meta
        name = meta["data_source"]
        answer = answer_of(trajectory.opened_thinking + trajectory.text, self.tagged)
        if answer is not None and name in PARSED and not is_formula(answer):
            return Score(0.0, {"accuracy": 0.0}, answer=answer)
        value = as_number(scorer(name, json.dumps(meta["config"])).score_answer(answer, meta["entry"]))
        return Score(value, {"accuracy": float(value >= 1)}, answer=answer or "")

    def unscorable(self, prompt: Prompt) -> str | None:
        missing = [key for key in ("data_source", "config", "entry") if key not in prompt.meta]
        return f"has no {', '.join(missing)} in its meta; use `task: ReasoningGym`" if missing else None

    def control(self, trajectory: Trajectory) -> Trajectory | None:
        reference = trajectory.prompt.answer
        if reference is None:
            return None
        return replace(trajectory, text=f"<answer>{reference}</answer>", messages=[], opened_thinking="")

    def ungradable(self) -> Score:
        return Score(0.0, {"accuracy": 0.0}, ungradable=True, answer="")


def answer_of(text: str, tagged: bool) -> str | None:
    """Return the answer in a completion; None if `tagged` and there is no `<answer>`."""
    text = after_thinking(text)
    before, end, _ = text.rpartition("</answer>")
    _, start, answer = before.rpartition("<answer>")
    if end and start:
        return answer.strip()
    return None if tagged else text.rpartition("####")[2].strip()
