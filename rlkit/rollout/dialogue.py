"""What conversations are made with: the tokenizer, its chat template, the context, and the participants."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from rlkit.base.errors import RecipeError
from rlkit.interfaces import outputs
from rlkit.interfaces.model import Tokenizer
from rlkit.interfaces.parser import ToolParser
from rlkit.parsers.detect import detect
from rlkit.recipe import Recipe
from rlkit.registry import require
from rlkit.rollout.participants import Participants
from rlkit.rollout.pictures import PictureReader
from rlkit.rollout.template import USER, ChatTemplate
from rlkit.rollout.template_check import misreading, missing_parser


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
        warnings: What does not fit together in the recipe.
    """

    recipe: Recipe
    tokenizer: Tokenizer
    context: int
    stop_ids: frozenset[int] = frozenset()
    participants: Participants = field(default_factory=Participants)
    reader: PictureReader | None = None
    warnings: list[str] = field(default_factory=list)

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
            PartError: A tool has no JSON schema.
            RecipeError: No parser is known for the tool calls of this model, or it does not read those that the chat
                template writes, or the template cannot continue after a turn.
        """
        recipe = self.recipe
        for tool in (recipe.tools or {}).values():
            require(tool, "parameters", outputs.of_tool(getattr(tool, "parameters", None)))
        parser = self.parser
        self.participants = Participants(
            recipe.tools or {}, parser, recipe.interaction, recipe.environment, pictures=self.reader is not None
        )
        if recipe.tools:
            self.__dict__.pop("template", None)  # it does not describe the tools yet
        if recipe.tools and parser is None:
            raise RecipeError(self.missing_parser)
        if parser is not None:
            problem = misreading(parser, self.template, recipe.model.path)
            if problem is not None and recipe.parser is None and recipe.tools:
                raise RecipeError(problem)
            if problem is not None:  # the recipe's own parser may read other calls
                self.warnings.append(problem)
        if recipe.tools:
            self.template.delta([{"role": "tool", "content": "7", "name": next(iter(recipe.tools))}])
        if recipe.interaction or recipe.environment or recipe.agent:
            self.template.delta([USER])

    @cached_property
    def parser(self) -> ToolParser | None:
        """The recipe's parser of calls or, for tools or an agent, that of the chat template; None without one."""
        if self.recipe.parser is not None or not (self.recipe.tools or self.recipe.agent):
            return self.recipe.parser
        detected = detect(str(self.tokenizer.chat_template))
        return None if detected is None else detected()

    @cached_property
    def missing_parser(self) -> str:
        """What to do where no parser is detected."""
        return missing_parser(self.template, self.recipe.model.path)
