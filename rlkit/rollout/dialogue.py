"""What conversations are made with: the tokenizer, its chat template, the context, and the participants."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from rlkit.base.errors import RecipeError
from rlkit.interfaces.model import Tokenizer
from rlkit.interfaces.parser import ToolParser
from rlkit.parsers.detect import detect
from rlkit.recipe import Recipe
from rlkit.rollout.participants import Participants
from rlkit.rollout.pictures import PictureReader
from rlkit.rollout.template import USER, ChatTemplate


@dataclass
class Dialogue:
    """What conversations are made with.

    Args:
        recipe: Names the tools, the parser, the user and the environment.
        tokenizer: The policy's, with its chat template.
        context: Tokens of the longest conversation that the engine can hold.
        stop_ids: Token ids that end a turn of the policy by the model's files; see `ChatTemplate.stop_ids`.
        participants: The tools, the user and the environment, once they are bound.
        reader: Reads pictures; None for a model of texts alone.
    """

    recipe: Recipe
    tokenizer: Tokenizer
    context: int
    stop_ids: frozenset[int] = frozenset()
    participants: Participants = field(default_factory=Participants)
    reader: PictureReader | None = None

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template, which describes the participants' tools."""
        return ChatTemplate(
            self.tokenizer,
            self.stop_ids,
            self.participants.schemas(),
            self.recipe.model.chat_template_kwargs,
            self.reader,
        )

    def bind_tools(self) -> None:
        """Add the recipe's participants, whose tools must be bound, and check that the chat template renders them.

        Raises:
            RecipeError: No parser is known for the tool calls of this model, or its template cannot continue after a
                turn.
        """
        recipe = self.recipe
        parser = self._parser() if recipe.tools else recipe.parser
        if recipe.agent is not None and parser is None:  # an agent may need none
            detected = detect(str(self.tokenizer.chat_template))
            parser = None if detected is None else detected()
        self.participants = Participants(
            recipe.tools or {}, parser, recipe.interaction, recipe.environment, pictures=self.reader is not None
        )
        if recipe.tools:
            self.__dict__.pop("template", None)  # it does not describe the tools yet
            self.template.delta([{"role": "tool", "content": "7", "name": next(iter(recipe.tools))}])
        if recipe.interaction or recipe.environment or recipe.agent:
            self.template.delta([USER])

    def _parser(self) -> ToolParser:
        """Return the recipe's parser, or the one that fits the chat template."""
        if self.recipe.parser is not None:
            return self.recipe.parser
        parser = detect(str(self.tokenizer.chat_template))
        if parser is None:
            raise RecipeError(
                f"the chat template of {self.recipe.model.path!r} does not show how the model writes tool calls; set "
                "parser: HermesParser, or another"
            )
        return parser()
