"""The run's prompts, checked before any weights are loaded, and their order."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil
from typing import Any

import torch

from rlkit.concurrency.garbage import uncollected
from rlkit.errors import RecipeError
from rlkit.interfaces import outputs
from rlkit.interfaces.task import Curriculum
from rlkit.models.activations import token_limit
from rlkit.models.load import context_length, load_config, load_tokenizer, stop_ids
from rlkit.parsers.detect import detect
from rlkit.recipe import Recipe
from rlkit.recipe.unscorable import select_scorable, unscorable_training
from rlkit.registry import calling, require
from rlkit.rollout.lengths import AnswerSizes, measure, measure_answers, shorten
from rlkit.rollout.participants import Participants
from rlkit.rollout.recorded import check_recorded
from rlkit.rollout.template import USER, ChatTemplate
from rlkit.tasks.order import Drawn, Order, permutation_of
from rlkit.train.distill.check import check_sources, check_tokenizers
from rlkit.train.distill.prompts import TeacherPrompts, teacher_prompts
from rlkit.train.mixtures.recipes import naming_mixture, recipe_of
from rlkit.train.prompts import held_out, make_prompt, rows_of
from rlkit.types import Prompt, Row


@dataclass
class Data:
    """What a run reads: the tokenizer, how much of the context the engine can fill, and prompts known to fit."""

    tokenizer: Any
    context: int
    recipe: Recipe
    train: Sequence[Row]
    held_out: list[Prompt]
    stop_ids: frozenset[int] = frozenset()
    longest: int = 0
    """Tokens of the longest prompt that the run will use."""

    answers: AnswerSizes | None = None
    """Sizes of the recorded answers that the run will use."""

    overlong: int = 0
    """Prompts that were too long, of those that the run measured."""

    unscorable: str = ""
    """The prompts that the reward cannot score and the run leaves out, in words; empty if there are none."""

    kept: Sequence[int] = ()
    """The training rows that are used: without those that are left out for their length, or cannot be scored."""

    validation: list[Prompt] = field(default_factory=list)
    """Held-out prompts that are used, of a length that fits."""

    order: Order | None = None
    """The order of `kept`, where it depends on what happened in earlier steps; else it follows from the seed alone."""

    mixtures: dict[str, Data] = field(default_factory=dict)
    """What the mixtures of a step learn from, by their names."""

    show: bool = False
    """Whether to show the progress of what takes long."""

    participants: Participants = field(default_factory=Participants)

    teacher_prompts: TeacherPrompts | None = None
    """Makes what a teacher reads; None without one."""

    @cached_property
    def template(self) -> ChatTemplate:
        """Renders conversations, the tools of the participants included."""
        return ChatTemplate(
            self.tokenizer, self.stop_ids, self.participants.schemas(), self.recipe.model.chat_template_kwargs
        )

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

    @property
    def limit(self) -> int:
        """The most tokens of a prompt: a token of the context is left for an answer."""
        return min(self.context - 1, self.recipe.rollout.max_prompt_tokens or self.context)

    @property
    def longest_row(self) -> int:
        """Tokens of the longest trajectory that the run can have."""
        longest = self.longest + self.recipe.rollout.sampling.max_tokens
        return min(longest if self.answers is None else self.answers.longest, self.context)

    @property
    def largest_group(self) -> int:
        """Trajectories of the largest group that the run can have."""
        return self.recipe.rollout.group_size if self.answers is None else self.answers.most

    @property
    def count(self) -> int:
        """Prompts that a step starts; with `rollout.oversample` more than it trains on."""
        return ceil(round(self.recipe.train.prompts_per_step * self.recipe.rollout.oversample, 6))

    def slots(self, step: int) -> list[int]:
        """Return the rows of a step (the first is step 1), in an order that depends on the seed alone.

        Each epoch is a permutation of all rows; a step may span two. With a curriculum or over-sampling the rows depend
        on the steps before as well: they are those of the next step.
        """
        if self.order is not None:
            return [self.kept[one.row] for one in self.order.draw(self.count)]
        count = self.recipe.train.prompts_per_step
        return [self.row(place) for place in range((step - 1) * count, step * count)]

    def row(self, place: int) -> int:
        """Return the row at a place of the order that the seed alone determines, counted over all epochs."""
        rows = len(self.kept)
        return self.kept[int(permutation_of(self.recipe.train.seed, place // rows, rows)[place % rows])]

    def prompts(self, step: int) -> list[tuple[int, Prompt]]:
        """Return the prompts of a step with their place in it, those that were postponed before first."""
        return [(slot, self.prompt(row)) for slot, row in enumerate(self.slots(step))]

    def drawn(self) -> list[Drawn]:
        """Return what the order has drawn for the next step, with the places of `prompts`; nothing without one."""
        return [] if self.order is None else self.order.draw(self.count)

    def record(self, drawn: Sequence[Drawn], rates: Mapping[int, float | None]) -> None:
        """Record the outcome of a step's prompts, alike on all ranks.

        Args:
            drawn: Those of the step.
            rates: The success rate of each prompt by its place, None where it is not known; those that are missing were
                stopped, and come first in the next step.

        Raises:
            PartError: The curriculum raised something, or what it returned is no number of epochs.
        """
        if self.order is not None:
            waits = [self._wait(rates[slot]) if slot in rates else None for slot in range(len(drawn))]
            self.order.record(drawn, waits)

    def _wait(self, rate: float | None) -> int:
        curriculum = self.recipe.curriculum
        if curriculum is None or rate is None:
            return 1
        with calling(curriculum, "wait"):
            epochs = curriculum.wait(rate)
        require(curriculum, "wait", outputs.of_wait(epochs))
        return epochs

    def _make_order(self) -> Order:
        """Return the order of the rows that are used under a curriculum, or with over-sampling."""
        curriculum, difficulty = self.recipe.curriculum, None
        if curriculum is not None and type(curriculum).difficulty is not Curriculum.difficulty:
            found = []
            for row in self.kept:
                with calling(curriculum, "difficulty"):
                    found.append(curriculum.difficulty(make_prompt(self.recipe.task, self.train, row)))
                require(curriculum, "difficulty", outputs.of_difficulty(found[-1]))
            difficulty = torch.tensor(found, dtype=torch.float64)
        return Order(len(self.kept), self.recipe.train.seed, difficulty)

    def prompt(self, row: int) -> Prompt:
        """Return the prompt of a training row, shortened if the recipe has that done to one of its length."""
        return self._shortened(make_prompt(self.recipe.task, self.train, row))

    def spare(self, step: int, attempt: int, group: int) -> Prompt:
        """Return a prompt to take the place of a group that was dropped: any row, by the seed and the place.

        One that is too long, or cannot be scored, is passed over, as its row may be none that was measured.
        """
        place = f"spare/{self.recipe.train.seed}/{step}/{attempt}/{group}/0"
        first = int.from_bytes(hashlib.blake2b(place.encode(), digest_size=8).digest(), "little")
        for extra in range(len(self.kept)):
            prompt = self.prompt(self.kept[(first + extra) % len(self.kept)])
            if self._training_lengths([prompt])[0] <= self.limit and not unscorable_training(self.recipe, [prompt]):
                return prompt
        raise RecipeError("no spare prompt is short enough and can be scored; set rollout.filter.max_refills to 0")

    def examples(self, count: int) -> list[Prompt]:
        """Return some prompts to try things on: held-out ones, or the first step's where validation is off."""
        return self.validation[:count] or [prompt for _, prompt in self.prompts(1)][:count]

    def length(self, prompt: Prompt) -> int:
        """Return the prompt's length in tokens, as the rollout will render it.

        Raises:
            RecipeError: The chat template refuses it, or it names a tool that the recipe has not.
        """
        return self.lengths([prompt])[0]

    def lengths(self, prompts: Sequence[Prompt]) -> list[int]:
        """Return the lengths of prompts in tokens, as the rollout will render them.

        Raises:
            RecipeError: The chat template refuses one, or one names a tool that the recipe has not.
        """
        known = self.recipe.tools or {}
        for prompt in prompts:
            for name in prompt.tools or ():
                if name not in known:
                    raise RecipeError(
                        f"prompt {prompt.id!r} names the tool {name!r}, but the recipe's tools are: "
                        f"{', '.join(known) or 'none'}"
                    )
        return measure(self.template, prompts, self.show)

    def _training_lengths(self, prompts: Sequence[Prompt]) -> list[int]:
        """Return the lengths of prompts in tokens, above the limit for those that a teacher has no room for."""
        lengths = self.lengths(prompts)
        if self.teacher_prompts is None:
            return lengths
        fits = self.teacher_prompts.fits(self.template, prompts, lengths)
        return [n if fit else max(n, self.limit + 1) for n, fit in zip(lengths, fits, strict=True)]

    def check_lengths(self) -> None:
        """Measure and check all prompts that the run will use, and leave out those that the recipe drops.

        Raises:
            RecipeError: One is too long, or cannot be scored, or all are dropped.
        """
        self.kept, self.order = range(len(self.train)), None
        rollout = self.recipe.rollout
        drops, drops_unscorable = rollout.overlong == "drop", rollout.unscorable == "drop"
        by_outcome = self.recipe.curriculum is not None or rollout.oversample > 1
        rows = list(self.kept) if drops or drops_unscorable or by_outcome else self._used()
        prompts = [make_prompt(self.recipe.task, self.train, row) for row in rows]
        if len(rows) == len(self.train):
            check_sources(self.recipe, prompts)
        scorable = select_scorable(self.recipe, rows, prompts, self.held_out)
        self.unscorable, validation = scorable.left_out, scorable.validation
        if drops_unscorable:
            rows, prompts = [rows[i] for i in scorable.training], [prompts[i] for i in scorable.training]
            self.kept = rows
        lengths, held_out = self._training_lengths(prompts), self.lengths(validation)
        if self.recipe.rollout.engine.recorded:
            check_recorded(prompts, self.recipe.loss)
            answers = measure_answers(self.template, prompts, self.show)
            whole = [n + max(sizes) for n, sizes in zip(lengths, answers, strict=True)]
            lengths = [both if both > self.context else n for n, both in zip(lengths, whole, strict=True)]
            kept = [i for i, n in enumerate(lengths) if n <= self.limit or not drops]
            self.answers = AnswerSizes.of([answers[i] for i in kept], [whole[i] for i in kept])
        measured = [*lengths, *held_out]
        self.overlong = sum(length > self.limit for length in measured)
        if self.overlong and rollout.overlong == "error":
            self._refuse([*prompts, *validation], measured)
        if drops:
            self.kept = [row for row, length in zip(rows, lengths, strict=True) if length <= self.limit]
            self.validation = [p for p, length in zip(validation, held_out, strict=True) if length <= self.limit]
            if not self.kept or len(self.validation) < bool(self.held_out):
                raise RecipeError(
                    f"no {'validation' if self.kept else 'training'} prompt has at most {self.limit} tokens; choose "
                    "shorter prompts, a higher rollout.max_prompt_tokens or a model with a longer context"
                )
            measured = [length for length in measured if length <= self.limit]
        else:
            self.validation = [self._shortened(prompt) for prompt in validation]
        self.longest = min(max(measured), self.limit)
        if by_outcome:
            self.order = self._make_order()

    def _used(self) -> list[int]:
        """Return the training rows that the run will use; a filter may also take others."""
        train = self.recipe.train
        used = min(train.steps * train.prompts_per_step, len(self.kept))
        steps = range(1, -(-used // train.prompts_per_step) + 1)
        return list(dict.fromkeys(row for step in steps for row in self.slots(step)))

    def _refuse(self, prompts: Sequence[Prompt], lengths: Sequence[int]) -> None:
        longest = max(range(len(prompts)), key=lengths.__getitem__)
        if lengths[longest] >= self.context:
            limit = (
                f"the context of model.path {self.recipe.model.path!r} is {self.context} and an answer needs room; "
                "choose a model with a longer context, shorten the prompt"
            )
        else:
            limit = f"rollout.max_prompt_tokens is {self.limit}; set it higher, shorten the prompt"
        others = f" ({self.overlong} prompts are too long)" if self.overlong > 1 else ""
        raise RecipeError(
            f"prompt {prompts[longest].id!r} has {lengths[longest]} tokens, but {limit}, or set rollout.overlong to "
            f"drop, left, right or middle{others}"
        )

    def _shortened(self, prompt: Prompt) -> Prompt:
        side = self.recipe.rollout.overlong
        if side == "error" or side == "drop":  # noqa: PLR1714 (mypy narrows this form alone)
            return prompt
        return shorten(self.template, prompt, self.limit, side)


@uncollected()
def load_data(recipe: Recipe) -> Data:
    """Load the tokenizer and the rows, and check every prompt that the run will use.

    Raises:
        RecipeError: There are no rows, a row cannot become a prompt, or a prompt does not fit the context.
    """
    config = load_config(recipe.model)
    _check_stop_ids(recipe, config.get_text_config().vocab_size)
    context = context_length(config) - recipe.rollout.engine.reserved
    tokenizer = load_tokenizer(recipe.model)
    train = rows_of(recipe.task, "train")
    check_tokenizers(recipe, tokenizer)
    data = Data(tokenizer, context, recipe, train, held_out(recipe), stop_ids(recipe.model, tokenizer))
    data.teacher_prompts = teacher_prompts(recipe)
    data.show = os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0"
    data.check_lengths()
    for name, mixture in (recipe.mix or {}).items():
        alone = recipe_of(mixture, recipe)
        with naming_mixture(name):
            data.mixtures[name] = load_data(alone) if mixture.task is not None else replace(data, recipe=alone)
    return data


def _check_stop_ids(recipe: Recipe, vocabulary: int) -> None:
    held_out = None if recipe.validation is None else recipe.validation.sampling
    for key, sampling in (("rollout", recipe.rollout.sampling), ("validation", held_out)):
        beyond = [token for token in (sampling.stop_ids if sampling is not None else ()) if token >= vocabulary]
        if beyond:
            known = f"token ids of the model, below {vocabulary}"
            raise RecipeError(f"{key}.sampling.stop_ids has {beyond[0]}, expected {known}")
