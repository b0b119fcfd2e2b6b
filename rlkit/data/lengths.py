"""The lengths of prompts under the chat template, and the limit that they must keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlkit.base.errors import RecipeError
from rlkit.data.measure import measure, shorten
from rlkit.data.teacher import TeacherPrompts
from rlkit.rollout.dialogue import Dialogue
from rlkit.types import Prompt


@dataclass
class PromptLengths:
    """Measures prompts as rollouts will render them, and shortens those that are too long.

    Args:
        dialogue: Renders the prompts; its recipe sets the limit and what becomes of longer prompts.
        teacher_prompts: Makes the prompts that a teacher reads; None without a teacher.
        show: Whether to show progress.
    """

    dialogue: Dialogue
    teacher_prompts: TeacherPrompts | None = None
    show: bool = False

    @property
    def limit(self) -> int:
        """Most tokens of a prompt: one token of the context is left for the completion."""
        context = self.dialogue.context
        return min(context - 1, self.dialogue.recipe.rollout.max_prompt_tokens or context)

    def measure(self, prompts: Sequence[Prompt]) -> list[int]:
        """Return the lengths of prompts in tokens.

        Raises:
            RecipeError: The chat template refuses a prompt, or a prompt has a tool that the recipe does not have.
        """
        for prompt in prompts:
            self._check_tools(prompt)
        return measure(self.dialogue.template, prompts, self.show)

    def _check_tools(self, prompt: Prompt) -> None:
        """Check that the recipe has a prompt's tools; schemas need none where completions are recorded.

        Raises:
            RecipeError: It has not.
        """
        recipe = self.dialogue.recipe
        tools = recipe.tools or {}
        shown = not recipe.method.samples or recipe.agent is not None
        for tool, name in zip(prompt.tools or (), prompt.tool_names or (), strict=True):
            if name in tools or (shown and not isinstance(tool, str)):
                continue
            listed = ", ".join(tools) or "none"
            if isinstance(tool, str):
                raise RecipeError(f"prompt {prompt.id!r} names the tool {name!r}, but the recipe's tools are: {listed}")
            raise RecipeError(
                f"prompt {prompt.id!r} has a schema of the tool {name!r} in its column `tools`, but the recipe's tools "
                f"are: {listed}; add one that runs the calls (tools: {{{name}: ...}}), or remove the schema"
            )

    def measure_training(self, prompts: Sequence[Prompt]) -> list[int]:
        """Return the lengths of prompts in tokens; above the limit for those that do not fit a teacher's context."""
        lengths = self.measure(prompts)
        if self.teacher_prompts is None:
            return lengths
        fits = self.teacher_prompts.fits(self.dialogue.template, prompts, lengths)
        return [n if fit else max(n, self.limit + 1) for n, fit in zip(lengths, fits, strict=True)]

    def shortened(self, prompt: Prompt) -> Prompt:
        """Return a prompt within the limit, if the recipe shortens long ones."""
        side = self.dialogue.recipe.rollout.overlong
        if side == "error" or side == "drop":  # noqa: PLR1714 (mypy narrows this form alone)
            return prompt
        return shorten(self.dialogue.template, prompt, self.limit, side)

    def refuse(self, prompts: Sequence[Prompt], lengths: Sequence[int]) -> None:
        """Raise an error that names the longest of some prompts.

        Raises:
            RecipeError: Always.
        """
        longest = max(range(len(prompts)), key=lengths.__getitem__)
        if lengths[longest] >= self.dialogue.context:
            limit = (
                f"the context of model.path {self.dialogue.recipe.model.path!r} is {self.dialogue.context} and an "
                "answer needs room; choose a model with a longer context, shorten the prompt"
            )
        else:
            limit = f"rollout.max_prompt_tokens is {self.limit}; set it higher, shorten the prompt"
        too_long = sum(length > self.limit for length in lengths)
        count = f" ({too_long} prompts are too long)" if too_long > 1 else ""
        raise RecipeError(
            f"prompt {prompts[longest].id!r} has {lengths[longest]} tokens, but {limit}, or set rollout.overlong to "
            f"drop, left, right or middle{count}"
        )
