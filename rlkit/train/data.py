"""The run's prompts, checked before any weights are loaded, and their order."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

from torch import Tensor

from rlkit.concurrency.garbage import uncollected
from rlkit.errors import RecipeError
from rlkit.interfaces import outputs
from rlkit.interfaces.task import Split, Task
from rlkit.models.activations import token_limit
from rlkit.models.load import context_length, load_config, load_tokenizer, stop_ids
from rlkit.ops.random import permutation
from rlkit.parsers.detect import detect
from rlkit.recipe import Recipe
from rlkit.registry import calling, require
from rlkit.rollout.participants import Participants
from rlkit.rollout.template import USER, ChatTemplate
from rlkit.types import Prompt, Row


@dataclass
class Data:
    """What a run reads: the tokenizer, how much of the context the engine can fill, and prompts known to fit."""

    tokenizer: Any
    context: int
    recipe: Recipe
    train: Sequence[Row]
    validation: list[Prompt]
    stop_ids: frozenset[int] = frozenset()
    longest: int = 0
    """Tokens of the longest prompt that the run will use."""

    participants: Participants = field(default_factory=Participants)

    @cached_property
    def template(self) -> ChatTemplate:
        """Renders conversations, the tools of the participants included."""
        return ChatTemplate(self.tokenizer, self.stop_ids, self.participants.schemas())

    @cached_property
    def token_limit(self) -> int:
        """The tokens of a micro-batch."""
        return token_limit(self.recipe.train, self.recipe.model, self.recipe.fabric)

    def bind_tools(self) -> None:
        """Make the participants of conversations, whose tools are bound by now, and check the prompts with them.

        Raises:
            RecipeError: No parser is known for the calls of this model, its template cannot go on after a turn, or a
                prompt does not fit the context once the tools are described in it.
        """
        recipe, template = self.recipe, str(self.tokenizer.chat_template)
        parser = recipe.parser
        if recipe.tools and parser is None:
            found = detect(template)
            if found is None:
                raise RecipeError(
                    f"the chat template of {recipe.model.path!r} does not show how the model writes tool calls; set "
                    "parser: HermesParser, or another"
                )
            parser = found()
        self.participants = Participants(recipe.tools or {}, parser, recipe.interaction, recipe.environment)
        if recipe.tools:
            self.__dict__.pop("template", None)  # which does not describe them yet
            self.template.delta([{"role": "tool", "content": "7", "name": next(iter(recipe.tools))}])
            self.check_lengths()
        if recipe.interaction or recipe.environment:
            self.template.delta([USER])

    def slots(self, step: int) -> list[int]:
        """Return the rows of a step (the first is step 1), in an order that depends on the seed alone.

        Each epoch is a permutation of all rows; a step may span two.
        """
        size, rows = self.recipe.train.prompts_per_step, len(self.train)
        first = (step - 1) * size
        return [
            int(_permutation(self.recipe.train.seed, i // rows, rows)[i % rows]) for i in range(first, first + size)
        ]

    def prompts(self, step: int) -> list[tuple[int, Prompt]]:
        """Return the prompts of a step with their place in it, those that do not fit left out."""
        task = self.recipe.task
        chosen = [(slot, make_prompt(task, self.train, row)) for slot, row in enumerate(self.slots(step))]
        return [(slot, prompt) for slot, prompt in chosen if self.fits(prompt)]

    def spare(self, step: int, attempt: int, group: int) -> Prompt:
        """Return a prompt to take the place of a group that was dropped: any row, by the seed and the place.

        One that does not fit the context is passed over, as its row may be none that the run was to use.
        """
        place = f"spare/{self.recipe.train.seed}/{step}/{attempt}/{group}/0"
        first = int.from_bytes(hashlib.blake2b(place.encode(), digest_size=8).digest(), "little")
        for extra in range(len(self.train)):
            prompt = make_prompt(self.recipe.task, self.train, (first + extra) % len(self.train))
            if self.length(prompt) < self.context:
                return prompt
        raise RecipeError("no spare prompt fits the context; set rollout.filter.max_refills to 0")

    def fits(self, prompt: Prompt) -> bool:
        """Whether the context has room for an answer; always, unless the recipe skips long prompts."""
        return not self.recipe.rollout.skip_long_prompts or self.length(prompt) < self.context

    def examples(self, count: int) -> list[Prompt]:
        """Return some prompts to try things on: held-out ones, or the first step's where validation is off."""
        found, step = self.validation[:count], 0
        while not found and step < self.recipe.train.steps:  # all prompts of a step may be too long
            step += 1
            found = [prompt for _, prompt in self.prompts(step)][:count]
        return found

    def length(self, prompt: Prompt) -> int:
        """Return the prompt's length in tokens, as the rollout will render it.

        Raises:
            RecipeError: The chat template refuses it.
        """
        self._check_tools(prompt)
        try:
            return len(self.template.start(prompt.messages, prompt.tools))
        except RecipeError as error:
            raise RecipeError(f"prompt {prompt.id!r}: {error}") from error

    def _check_tools(self, prompt: Prompt) -> None:
        known = self.recipe.tools or {}
        for name in prompt.tools or ():
            if name not in known:
                raise RecipeError(
                    f"prompt {prompt.id!r} names the tool {name!r}, but the recipe's tools are: "
                    f"{', '.join(known) or 'none'}"
                )

    def check_lengths(self) -> None:
        """Measure all prompts that the run will use, and drop the validation prompts that it skips.

        Raises:
            RecipeError: One does not fit the context, or none does.
        """
        train = self.recipe.train
        used = min(train.steps * train.prompts_per_step, len(self.train))
        steps = range(1, -(-used // train.prompts_per_step) + 1)
        self.validation = [prompt for prompt in self.validation if self.fits(prompt)]
        prompts = [prompt for step in steps for _, prompt in self.prompts(step)]
        if not prompts:
            raise RecipeError(
                f"no training prompt is shorter than the model's context of {self.context} tokens; choose shorter "
                "prompts or a model with a longer context"
            )
        measured = ((p, self.length(p)) for p in prompts + self.validation)
        longest, self.longest = max(measured, key=lambda pair: pair[1])
        if self.longest >= self.context:
            raise RecipeError(
                f"prompt {longest.id!r} has {self.longest} tokens, but the context of model.path "
                f"{self.recipe.model.path!r} is {self.context} and an answer needs room; choose a model with a longer "
                "context, shorten the prompt, or set rollout.skip_long_prompts: true"
            )


@lru_cache(maxsize=2)  # a step spans two epochs at most, unless the data are few
def _permutation(seed: int, epoch: int, rows: int) -> Tensor:
    return permutation(f"order/{seed}/{epoch}", rows)


@uncollected()
def load_data(recipe: Recipe) -> Data:
    """Load the tokenizer and the rows, and check every prompt that the run will use.

    Raises:
        RecipeError: There are no rows, a row cannot become a prompt, or a prompt does not fit the context.
    """
    context = context_length(load_config(recipe.model)) - recipe.rollout.engine.reserved
    tokenizer = load_tokenizer(recipe.model)
    train = _rows(recipe.task, "train")
    data = Data(tokenizer, context, recipe, train, held_out(recipe), stop_ids(recipe.model, tokenizer))
    data.check_lengths()
    return data


def make_prompt(task: Task, rows: Sequence[Row], index: int) -> Prompt:
    """Return the prompt of a row.

    Raises:
        RecipeError: The row is malformed.
        PartError: The task raised something else, or what it returned is no prompt.
    """
    with calling(task, "prompt"):
        prompt = task.prompt(rows[index], index)
    require(task, "prompt", outputs.of_task(prompt))
    return prompt


def held_out(recipe: Recipe) -> list[Prompt]:
    """Return the validation prompts: those of the recipe's task, or those of `validation.tasks`, under their names."""
    if recipe.validation is None:
        return []
    if recipe.validation.tasks is None:
        return _held_out(recipe.task, recipe.validation.limit)
    return [
        replace(
            prompt,
            id=f"{name}/{prompt.id}",
            meta={**prompt.meta, "data_source": prompt.meta.get("data_source") or name},  # by which Router chooses
            source=name,
        )
        for name, task in recipe.validation.tasks.items()
        for prompt in _held_out(task or recipe.task, recipe.validation.limit)
    ]


def _held_out(task: Task, limit: int | None) -> list[Prompt]:
    rows = _rows(task, "validation")
    return [make_prompt(task, rows, i) for i in range(min(limit or len(rows), len(rows)))]


def _rows(task: Task, split: Split) -> Sequence[Row]:
    with calling(task, "rows"):
        rows = task.rows(split)
    if len(rows) == 0:
        raise RecipeError(f"task {type(task).__name__} has no {split} rows, expected at least one")
    return rows
