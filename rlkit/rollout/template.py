"""Chat templates: how a conversation is rendered turn by turn, so that no token is ever rendered twice."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlkit.errors import RecipeError
from rlkit.types import Message

USER: Message = {"role": "user", "content": "How many apples are left?"}
SAID = "There are seven."
CALL_ID = "call00001"  # nine letters and digits, as Mistral's template asks for
CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": CALL_ID, "type": "function", "function": {"name": "count", "arguments": {"what": "apples"}}},
    ],
}


KEPT = 1024
"""Rendered starts of conversations that are kept."""


@dataclass
class Proof:
    """What a template was seen to do, and what of it hurts."""

    facts: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


class ChatTemplate:
    """Renders the start of a conversation and, after each of the policy's turns, what comes next, on its own.

    A delta is what the template adds after the end token of an assistant's turn: found by rendering a short stand-in
    conversation with and without the new messages. The policy's own tokens are never rendered.

    Args:
        tokenizer: With a chat template.
        stop_ids: The ids that end the policy's turn.
        tools: JSON schemas that the template shows to the policy.
    """

    def __init__(self, tokenizer: Any, stop_ids: Collection[int], tools: Sequence[dict[str, Any]] = ()) -> None:
        self.tokenizer = tokenizer
        self.stop_ids = frozenset(stop_ids)
        self.tools = list(tools) or None
        self._starts: dict[str, list[int]] = {}

    def start(self, messages: Sequence[Message]) -> list[int]:
        """Give the ids with which a conversation starts, ready for the policy's turn."""
        key = repr(messages)
        if key not in self._starts:  # all samples of a prompt start alike
            if len(self._starts) >= KEPT:
                self._starts.clear()
            self._starts[key] = self._render(messages, generate=True, tools=self.tools)
        return list(self._starts[key])

    def text(self, ids: Sequence[int], special: bool) -> str:
        """Give what the policy said in a turn, without the token that ended it; `special` keeps special tokens."""
        said = ids[:-1] if ids and ids[-1] in self.stop_ids else ids
        text: str = self.tokenizer.decode(said, skip_special_tokens=not special)
        return text

    def delta(self, messages: Sequence[Message]) -> list[int]:
        """Give the ids of new messages after the policy's end token, ready for its next turn.

        Raises:
            RecipeError: The template renders them so that nothing can be told apart from what came before.
        """
        base = self._stand_in(messages)
        try:
            whole = self._render([*base, *messages], generate=True)
        except Exception as error:  # Jinja code may raise anything
            raise RecipeError(
                f"the chat template cannot render {messages[0]['role']!r} after a turn: {error}"
            ) from error
        before = self._render(base, generate=False)
        ends = [i for i, token in enumerate(before) if token in self.stop_ids]
        end = ends[-1] + 1 if ends else len(before)
        if whole[:end] != before[:end]:
            raise RecipeError(
                "the chat template renders earlier turns anew once others follow, so that what is new cannot be told "
                "apart; choose a model whose template only appends"
            )
        return whole[end:]

    def full(self, messages: Sequence[Message]) -> list[int]:
        """Give the template's own rendering of a whole conversation, to compare with."""
        return self._render(messages, generate=False, tools=self.tools)

    def prove(self) -> Proof:
        """Look whether turns are only appended, and whether the policy is trained on the token that ends its own."""
        proof = Proof()
        self._prove_end(proof)
        for what, messages in (("user", [USER]), ("tool", [{"role": "tool", "content": "7", "tool_call_id": CALL_ID}])):
            try:
                self.delta(messages)
                proof.facts.append(f"a {what} turn is appended to what came before")
            except RecipeError as error:
                proof.warnings.append(str(error))
        thought = [USER, {"role": "assistant", "content": f"<think>\nA thought.\n</think>\n\n{SAID}"}]
        alone = self._until_end(self._render(thought, generate=False))
        if self._render([*thought, USER], generate=True)[: len(alone)] != alone:
            proof.warnings.append(
                "the template strips thinking from earlier turns; training keeps it, as the policy saw it"
            )
        return proof

    def _prove_end(self, proof: Proof) -> None:
        opened = self.tokenizer.decode(self._render([USER], generate=True))
        closed = self.tokenizer.decode(self._render([USER, {"role": "assistant", "content": SAID}], generate=False))
        if SAID not in closed:
            proof.warnings.append("the template does not render an assistant's turn as it was written")
            return
        start = closed.rindex(SAID)
        if opened != closed[:start]:
            proof.warnings.append(
                f"the generation prompt ends with {opened[-40:]!r}, but an assistant's turn is rendered after "
                f"{closed[max(0, start - 40) : start]!r}; the policy is trained on the former"
            )
        after = closed[start + len(SAID) :]
        ends = [self.tokenizer.decode([i]) for i in sorted(self.stop_ids)]
        if any(after.startswith(end) for end in ends):
            proof.facts.append(f"an assistant's turn ends with {after.strip()!r}, on which the policy is trained")
        else:
            proof.warnings.append(
                f"the template goes on with {after[:40]!r} after an assistant's turn, but a turn ends with one of "
                f"{ends}; if that is wrong, set eos_token_id in the model's generation_config.json"
            )

    def _until_end(self, ids: Sequence[int]) -> list[int]:
        ends = [i for i, token in enumerate(ids) if token in self.stop_ids]
        return list(ids[: ends[-1] + 1]) if ends else list(ids)

    def _stand_in(self, messages: Sequence[Message]) -> list[Message]:
        called = any(message["role"] in ("tool", "ipython") for message in messages)
        return [USER, CALL if called else {"role": "assistant", "content": SAID}]

    def _render(self, messages: Sequence[Message], generate: bool, tools: Any = None) -> list[int]:
        ids: list[int] = self.tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=generate, tools=tools, return_dict=False
        )
        return ids
