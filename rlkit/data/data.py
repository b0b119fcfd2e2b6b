"""The prompts of a run: loaded, measured and checked before any weights are loaded."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

import torch

from rlkit.base.errors import RecipeError
from rlkit.base.garbage import uncollected
from rlkit.data.checks import check_retokenize, check_sources, check_tokenizers, reference_rewards
from rlkit.data.lengths import PromptLengths
from rlkit.data.measure import AnswerSizes, measure_answers
from rlkit.data.mixtures import naming_mixture, recipe_of
from rlkit.data.order import Order, RowOrder
from rlkit.data.prompts import check_ids, held_out, make_prompt, rows_of
from rlkit.data.retokenize import Vocabularies
from rlkit.data.teacher import TeacherPrompts, teacher_prompts
from rlkit.interfaces import outputs
from rlkit.interfaces.advantage import Needs
from rlkit.interfaces.loss import TokenLoss
from rlkit.interfaces.task import Curriculum
from rlkit.models.activations import token_limit
from rlkit.models.config import context_length, load_config
from rlkit.models.load import load_processor_of, load_tokenizer, stop_ids
from rlkit.models.processor import image_token_ids
from rlkit.recipe import Model, Recipe
from rlkit.recipe.checks import check_profile
from rlkit.recipe.unscorable import select_scorable, unscorable_training
from rlkit.registry import calling, require
from rlkit.rollout.dialogue import Dialogue
from rlkit.rollout.pictures import PictureReader
from rlkit.rollout.recorded import check_recorded
from rlkit.types import Prompt, Row

if TYPE_CHECKING:
    from rlkit.interfaces.model import ModelConfig

T = TypeVar("T")


@dataclass
class Data:
    """The prompts of a run, and what conversations are made with.

    Args:
        recipe: Checked.
        dialogue: What conversations are made with.
        train: Training rows of the task.
        held_out: All validation prompts of the task, or of the recipe's validation tasks.
        teacher_prompts: Makes the prompts that a teacher reads; None without a teacher.
        vocabularies: Which tokens it shares with the policy; None unless the loss compares other vocabularies.
        show: Whether to show progress.
    """

    recipe: Recipe
    dialogue: Dialogue
    train: Sequence[Row]
    held_out: list[Prompt]
    teacher_prompts: TeacherPrompts | None = None
    vocabularies: Vocabularies | None = None
    show: bool = False
    longest: int = 0
    """Tokens of the longest prompt that the run will use."""
    answers: AnswerSizes | None = None
    """Sizes of the recorded completions that the run will use."""
    overlong: int = 0
    """Number of measured prompts that are too long."""
    unscorable: str = ""
    """Which prompts are left out since the reward cannot score them, in words; empty if there are none."""
    validation: list[Prompt] = field(default_factory=list)
    """Validation prompts that are used: they fit, and can be scored."""
    mixtures: dict[str, Data] = field(default_factory=dict)
    """The data of the recipe's mixtures, by name."""

    def __post_init__(self) -> None:
        self.order = RowOrder(self.recipe, range(self.row_count))
        self.lengths = PromptLengths(self.dialogue, self.teacher_prompts, self.show)

    @property
    def row_count(self) -> int:
        """Number of training rows, at most `train.max_rows`."""
        return min(len(self.train), self.recipe.train.max_rows or len(self.train))

    @cached_property
    def token_limit(self) -> int:
        """Tokens of a micro-batch."""
        return token_limit(self.recipe)

    @property
    def longest_row(self) -> int:
        """Tokens of the longest trajectory that the run can have."""
        longest = self.longest + self.recipe.rollout.sampling.max_tokens
        return min(longest if self.answers is None else self.answers.longest, self.dialogue.context)

    @property
    def largest_group(self) -> int:
        """Trajectories of the largest group that the run can have."""
        return self.recipe.rollout.group_size if self.answers is None else self.answers.most

    def prompts(self, step: int) -> list[tuple[int, Prompt]]:
        """Return the prompts of a step with their indices in it; those postponed by the step before come first."""
        return [(slot, self.prompt(row)) for slot, row in enumerate(self.order.of_step(step))]

    def prompt(self, row: int) -> Prompt:
        """Return the prompt of a training row, shortened if the recipe shortens long prompts."""
        return self.lengths.shortened(self.complete_prompt(row))

    def complete_prompt(self, row: int) -> Prompt:
        """Return the prompt of a training row, however long it is."""
        pictures, sources = self.dialogue.reader is not None, self.recipe.model.vision.sources
        return make_prompt(self.recipe.task, self.train, row, pictures=pictures, sources=sources)

    def spare(self, step: int, attempt: int, group: int) -> Prompt:
        """Return a prompt that replaces a dropped group: any row that fits and can be scored, chosen by the seed."""
        key = f"spare/{self.recipe.train.seed}/{step}/{attempt}/{group}/0"
        first = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")
        rows = self.order.rows
        for offset in range(len(rows)):
            prompt = self.prompt(rows[(first + offset) % len(rows)])
            fits = self.lengths.measure_training([prompt])[0] <= self.lengths.limit
            if fits and not unscorable_training(self.recipe, [prompt]):
                return prompt
        raise RecipeError("no spare prompt is short enough and can be scored; set rollout.filter.max_refills to 0")

    def examples(self, count: int) -> list[Prompt]:
        """Return some prompts to try things on: validation prompts, or the first step's if validation is off."""
        return self.validation[:count] or [prompt for _, prompt in self.prompts(1)][:count]

    def bind_tools(self) -> None:
        """Add the participants of conversations, whose tools must be bound, and check the prompts with them.

        Raises:
            RecipeError: The tools do not fit the model, or a prompt does not fit the context once they are described.
        """
        self.dialogue.bind_tools()
        if self.recipe.tools:
            self.select_prompts()

    def select_prompts(self) -> None:
        """Measure and check all prompts that the run will use, and leave out those that the recipe drops.

        Raises:
            RecipeError: A prompt is too long or cannot be scored, or all prompts are dropped.
        """
        rollout, lengths = self.recipe.rollout, self.lengths
        lengths.teacher_prompts, lengths.show = self.teacher_prompts, self.show
        self.order = RowOrder(self.recipe, range(self.row_count))
        drops = rollout.overlong == "drop"
        by_outcome = self.recipe.curriculum is not None or rollout.oversample > 1
        measures_all = drops or rollout.unscorable == "drop" or by_outcome
        rows = list(self.order.rows) if measures_all else self._used_rows()
        prompts = [self.complete_prompt(row) for row in rows]
        check_ids(self.recipe.task, prompts)
        if len(rows) == self.row_count:
            check_sources(self.recipe, prompts)
        if Needs.REFERENCE_REWARDS in self.recipe.needs:
            for prompt in prompts:
                reference_rewards(prompt)
        scorable = select_scorable(self.recipe, rows, prompts, self.held_out)
        self.unscorable, validation = scorable.summary, scorable.validation
        if rollout.unscorable == "drop":
            rows = [rows[i] for i in scorable.training]
            prompts = [prompts[i] for i in scorable.training]
            self.order.rows = rows
        training_lengths = self._measure_training(prompts, drops)
        if self.recipe.measures_losses_alone:
            try:
                check_recorded(validation, self.recipe.loss)
            except RecipeError as error:
                raise RecipeError(f"validation without a `reward:` measures losses, but {error}") from error
        validation_lengths = lengths.measure(validation)
        measured = [*training_lengths, *validation_lengths]
        self.overlong = sum(length > lengths.limit for length in measured)
        if self.overlong and rollout.overlong == "error":
            lengths.refuse([*prompts, *validation], measured)
        if drops:
            self.order.rows = _within(rows, training_lengths, lengths.limit)
            self.validation = _within(validation, validation_lengths, lengths.limit)
            if not self.order.rows or len(self.validation) < bool(self.held_out):
                raise RecipeError(
                    f"no {'validation' if self.order.rows else 'training'} prompt has at most {lengths.limit} tokens; "
                    "choose shorter prompts, a higher rollout.max_prompt_tokens or a model with a longer context"
                )
            measured = _within(measured, measured, lengths.limit)
        else:
            self.validation = [lengths.shortened(prompt) for prompt in validation]
        self.longest = min(max(measured), lengths.limit)
        if by_outcome:
            self.order.by_outcome = self._order_by_outcome()

    def _measure_training(self, prompts: Sequence[Prompt], drops: bool) -> list[int]:
        """Return the lengths of training prompts; with recorded completions, of rows that exceed the context."""
        lengths = self.lengths.measure_training(prompts)
        if self.recipe.method.samples:
            return lengths
        check_recorded(prompts, self.recipe.loss)
        loss = self.recipe.loss
        answer_loss = None if isinstance(loss, TokenLoss) else type(loss).__name__
        sizes = measure_answers(self.dialogue.template, prompts, self.show, answer_loss)
        rows = [length + max(answers) for length, answers in zip(lengths, sizes, strict=True)]
        context = self.dialogue.context
        lengths = [row if row > context else length for length, row in zip(lengths, rows, strict=True)]
        used = [i for i, length in enumerate(lengths) if length <= self.lengths.limit or not drops]
        self.answers = AnswerSizes.of([sizes[i] for i in used], [rows[i] for i in used])
        return lengths

    def _used_rows(self) -> list[int]:
        """Return the training rows that the steps will use; a filter may use more."""
        train = self.recipe.train
        if train.steps is None:
            return list(self.order.rows)
        used = min(train.steps * train.prompts_per_step, len(self.order.rows))
        steps = range(1, -(-used // train.prompts_per_step) + 1)
        return list(dict.fromkeys(row for step in steps for row in self.order.of_step(step)))

    def _order_by_outcome(self) -> Order:
        """Return the order of the rows that are used under a curriculum, or with over-sampling."""
        curriculum = self.recipe.curriculum
        count, seed = len(self.order.rows), self.recipe.train.order_seed
        if curriculum is None or type(curriculum).difficulty is Curriculum.difficulty:
            return Order(count, seed)
        difficulties = []
        for row in self.order.rows:
            with calling(curriculum, "difficulty"):
                difficulty = curriculum.difficulty(self.complete_prompt(row))
            require(curriculum, "difficulty", outputs.of_difficulty(difficulty))
            difficulties.append(difficulty)
        return Order(count, seed, torch.tensor(difficulties, dtype=torch.float64))


@uncollected()
def load_data(recipe: Recipe) -> Data:
    """Load the tokenizer and the rows, and check every prompt that the run will use; set `train.steps`.

    Raises:
        RecipeError: There are no rows, a row cannot become a prompt, or a prompt does not fit the context.
    """
    config = load_config(recipe.model)
    _check_stop_ids(recipe, config.get_text_config().vocab_size)
    dialogue = make_dialogue(recipe, config)
    train = rows_of(recipe.task, "train")
    check_tokenizers(recipe, dialogue.tokenizer)
    first_rank = os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0"
    validation = held_out(recipe, pictures=dialogue.reader is not None)
    prompts = teacher_prompts(recipe)
    vocabularies = None
    if prompts is not None and prompts.template is not None:
        check_retokenize(dialogue.template, prompts.template)
        if recipe.loss.forward.teacher_top:
            columns = config.get_text_config().vocab_size
            vocabularies = Vocabularies.of(dialogue.template, prompts.template, columns, prompts.columns)
    data = Data(recipe, dialogue, train, validation, prompts, vocabularies, show=first_rank)
    data.select_prompts()
    recipe.train.set_steps(len(data.order.rows))
    for problem in check_profile(recipe):
        raise RecipeError(problem)
    for name, mixture in (recipe.mix or {}).items():
        mixture_recipe = recipe_of(mixture, recipe)
        with naming_mixture(name):
            if mixture.task is not None:
                data.mixtures[name] = load_data(mixture_recipe)
            else:
                data.mixtures[name] = copy(data)
                data.mixtures[name].recipe = mixture_recipe
    return data


def make_dialogue(recipe: Recipe, config: ModelConfig) -> Dialogue:
    """Load the tokenizer and all else that conversations need, before tools are bound; no weights are loaded.

    Args:
        recipe: Checked.
        config: Of the policy.

    Raises:
        RecipeError: The tokenizer or the processor of pictures cannot be loaded.
    """
    tokenizer, reader = load_tokenizer(recipe.model), picture_reader(recipe.model)
    context = context_length(config) - recipe.rollout.engine.reserved
    return Dialogue(recipe, tokenizer, context, stop_ids(recipe.model, tokenizer), reader=reader)


def picture_reader(model: Model) -> PictureReader | None:
    """Return the processor of a model's pictures; None if it reads texts alone."""
    processor = load_processor_of(model)
    if processor is None:
        return None
    return PictureReader(processor, image_token_ids(load_config(model), processor), model.vision)


def _within(values: Sequence[T], lengths: Sequence[int], limit: int) -> list[T]:
    """Return the values whose length is within a limit."""
    return [value for value, length in zip(values, lengths, strict=True) if length <= limit]


def _check_stop_ids(recipe: Recipe, vocabulary: int) -> None:
    validation = None if recipe.validation is None else recipe.validation.sampling
    for key, sampling in (("rollout", recipe.rollout.sampling), ("validation", validation)):
        beyond = [token for token in (sampling.stop_ids if sampling is not None else ()) if token >= vocabulary]
        if beyond:
            raise RecipeError(
                f"{key}.sampling.stop_ids has {beyond[0]}, expected token ids of the model, below {vocabulary}"
            )
