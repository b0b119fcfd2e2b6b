"""The prompts that a teacher reads: the policy's, or what `teacher.context` makes of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Literal, NamedTuple

from rlkit.base.errors import RecipeError, show
from rlkit.base.ranges import LARGEST
from rlkit.data.measure import Side, measure, shorten
from rlkit.interfaces.rows import TextTemplate
from rlkit.models.config import context_length, load_config, naming
from rlkit.models.load import load_tokenizer, stop_ids
from rlkit.recipe import Attempts, Recipe
from rlkit.rollout.template import ChatTemplate
from rlkit.types import Message, Prompt, Rendered, Trajectory

PROMPT = "prompt"
"""The name of the policy's own text in `teacher.context`."""


class AttemptTexts(NamedTuple):
    """What the step's samples tell a teacher of a sample: `teacher.attempts`.

    Args:
        solution: The text of the best other sample; None if none is a solution.
        feedback: What the reward says of this sample; None for nothing.
    """

    solution: str | None = None
    feedback: str | None = None


NO_TEXTS = AttemptTexts()


def attempt_texts(attempts: Attempts, trajectories: Sequence[Trajectory]) -> list[AttemptTexts]:
    """Return the attempts of each trajectory, as the teacher reads them.

    Args:
        attempts: The recipe's.
        trajectories: Of complete groups, scored. Branches are samples of their agent's rollout.
    """
    rollout_of = {id(branch): t for t in trajectories for branch in t.span.branches}
    solutions: dict[int, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        is_solution = trajectory.reward is not None and trajectory.reward >= attempts.success
        if attempts.solution is not None and is_solution and id(trajectory) not in rollout_of:
            solutions[trajectory.group].append(trajectory)
    texts = []
    for trajectory in trajectories:
        rollout = rollout_of.get(id(trajectory), trajectory)
        others = [solution for solution in solutions[rollout.group] if solution is not rollout]
        best = max(others, key=lambda solution: solution.reward or 0.0, default=None)
        feedback = None if attempts.feedback is None or rollout.score is None else rollout.score.feedback
        texts.append(AttemptTexts(None if best is None else best.text, feedback))
    return texts


class TeacherPrompts:
    """Makes the prompts that a teacher reads.

    Args:
        context: Tokens that it can read.
        text: `teacher.context`; None for the policy's prompts.
        overlong: What becomes of a prompt that leaves no room in its context.
        columns: How many its output layer and the policy's have in common.
        attempts: What it reads of the step's samples; None for nothing.
        template: Its own chat template, with its tokenizer; None for the policy's.

    Raises:
        RecipeError: `text` is no such template, or the policy's own text or the attempts are not in it.
    """

    def __init__(
        self,
        context: int,
        text: str | None,
        overlong: Literal["error", "drop"] | Side = "error",
        columns: int = LARGEST,
        attempts: Attempts | None = None,
        *,
        template: ChatTemplate | None = None,
    ) -> None:
        self.context = context
        self.template = template
        self.columns = columns
        self.overlong = overlong
        self.attempts = attempts
        self._text = None if text is None else TextTemplate(text, "teacher.context")
        texts = {} if attempts is None else {"solution": attempts.solution, "feedback": attempts.feedback}
        self._parts = {name: TextTemplate(t, f"teacher.attempts.{name}") for name, t in texts.items() if t is not None}
        for name, part in self._parts.items():
            if set(part.names) != {"text"} or (self._text is not None and name not in self._text.names):
                raise RecipeError(
                    f"teacher.attempts.{name} is {show(texts[name])} and teacher.context {show(text)}, expected only "
                    f"{{text}} in the first, and {{{name}}} in the second; or set teacher.attempts.{name} to null"
                )
        if self._text is not None and PROMPT not in self._text.names:
            raise RecipeError(f"teacher.context is {show(text)}, expected {{{PROMPT}}} in it: what the policy reads")

    @property
    def changed(self) -> bool:
        """Whether the teacher reads other prompts, or other tokens, than the policy."""
        return self._text is not None or self.template is not None

    def prompt(self, prompt: Prompt, attempts: AttemptTexts = NO_TEXTS) -> Prompt:
        """Return a prompt as the teacher reads it, whatever its length; pictures of the message come before its text.

        Raises:
            RecipeError: It has no text of a user, or its row lacks a column.
        """
        if self._text is None:
            return prompt
        messages = list(prompt.messages)
        users = [i for i, m in enumerate(messages) if m["role"] == "user" and _text_of(m)]
        if not users:
            raise RecipeError(f"prompt {prompt.id!r} has no text of a user that teacher.context could stand in for")
        last = messages[users[-1]]
        texts = attempts._asdict() if self.attempts is not None else {}
        filled = {  # empty where there is no text
            name: "" if text is None else self._parts[name].fill({"text": text}, "a sample")
            for name, text in texts.items()
        }
        row = {**prompt.meta, "answer": prompt.answer, PROMPT: _text_of(last), **filled}
        text = self._text.fill(row, f"prompt {prompt.id!r}")
        pictures = [part for part in last["content"] if part["type"] == "image"] if _is_typed(last) else []
        messages[users[-1]] = {**last, "content": [*pictures, {"type": "text", "text": text}] if pictures else text}
        return replace(prompt, messages=messages)

    def fits(self, template: ChatTemplate, prompts: Sequence[Prompt], lengths: Sequence[int]) -> list[bool]:
        """Select the prompts that leave the teacher room for an answer, or shorten them until they do.

        Args:
            template: The policy's, which renders them unless the teacher has its own.
            prompts: The policy's.
            lengths: Theirs, in tokens.

        Raises:
            RecipeError: One leaves none, and `rollout.overlong` is error; or one cannot be made.
        """
        if self.changed:
            lengths = measure(self.template or template, [self.prompt(prompt) for prompt in prompts])
        if self.overlong == "error" and max(lengths) >= self.context:
            longest = max(range(len(prompts)), key=lengths.__getitem__)
            raise RecipeError(
                f"prompt {prompts[longest].id!r} has {lengths[longest]} tokens as the teacher reads it, but the "
                f"teacher's context is {self.context} and an answer needs room; shorten teacher.context or what it "
                "names, choose a teacher with a longer context, or set rollout.overlong to drop, left, right or middle"
            )
        return [self.overlong != "drop" or length < self.context for length in lengths]

    def start(self, template: ChatTemplate, trajectory: Trajectory, attempts: AttemptTexts = NO_TEXTS) -> Rendered:
        """Return the ids, and the pictures, that the teacher reads before the policy's first token.

        What an environment said first follows the prompt, as in the policy's conversation.
        """
        template, prompt = self.template or template, self.prompt(trajectory.prompt, attempts)
        if self.overlong != "error" and self.overlong != "drop":  # noqa: PLR1714 (mypy narrows this form alone)
            prompt = shorten(template, prompt, self.context - 1, self.overlong)
        replies = trajectory.messages[len(trajectory.prompt.messages) :]
        opening = takewhile(lambda message: message["role"] != "assistant", replies)
        return template.render_start([*prompt.messages, *opening], prompt.tools)


def _is_typed(message: Message) -> bool:
    """Whether the content of a message is a list of typed parts."""
    return isinstance(message.get("content"), list)


def _text_of(message: Message) -> str:
    """Return the text of a message, without its pictures; empty if it has none."""
    if _is_typed(message):
        return "".join(part["text"] for part in message["content"] if part["type"] == "text")
    content = message.get("content")
    return content if isinstance(content, str) else ""


def teacher_prompts(recipe: Recipe) -> TeacherPrompts | None:
    """Return the builder of the teachers' prompts, for the shortest of their contexts; None without teachers.

    Raises:
        RecipeError: A model's configuration cannot be had, or `teacher.context` is no template.
    """
    section = recipe.teacher
    if section is None:
        return None
    contexts, columns, template = [], [], None
    readers = {} if section.retokenize else {"model.path": None}
    for option, path in (readers | section.paths()).items():
        with naming(option):
            config = load_config(recipe.model.at(path))
            if section.retokenize:
                model = recipe.model.at(path)
                tokenizer = load_tokenizer(model)
                template = ChatTemplate(tokenizer, stop_ids(model, tokenizer), kwargs=recipe.model.chat_template_kwargs)
        contexts.append(context_length(config))
        columns.append(config.get_text_config().vocab_size)
    return TeacherPrompts(
        min(contexts),
        section.template,
        recipe.rollout.overlong,
        min(columns),
        section.attempts,
        template=template,
    )
