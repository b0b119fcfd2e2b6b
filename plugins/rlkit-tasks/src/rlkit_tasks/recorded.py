"""Recorded answers in a row's columns, under the names that data sets of TRL, the peers and the hub have."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from typing import NamedTuple

from rlkit.base.errors import RecipeError, show
from rlkit.base.ranges import LARGEST_FLOAT
from rlkit.interfaces.reward import as_number
from rlkit.interfaces.rows import label_of
from rlkit.types import Message, RecordedAnswer, Row
from rlkit_tasks.chat import ChatRow, context

TIE = 1e-6
"""By how much the score of a chosen answer is above an equal one, as a share of it: rewards are float32."""


class Recording(NamedTuple):
    """What a row records: the messages before the policy's first turn, None for those of the prompt's column."""

    prompt: list[Message] | None
    answers: list[RecordedAnswer]


def recording(chat: ChatRow, prompt: Sequence[Message] | None) -> Recording:
    """Return the answers that a row records, the better ones first; none where it has no such columns.

    | columns | answers |
    |---|---|
    | `completion` | one; its reward is `reward`, or 1 and 0 for a `label` that is true or 1 and false or 0, also as a |
    | | text; `turn_rewards` are those of its turns, true and false or numbers |
    | `completions`, `rewards` | several, with their rewards |
    | `chosen`, `rejected` | two, with the rewards 1 and 0, or those of `score_chosen` and `score_rejected`; where |
    | | these are equal, the second is lower by a millionth, so that the pair is trained without a margin |
    | `messages` | what follows the messages before the first of an assistant; `turn_rewards` as above |
    | `text` | all of it, without a chat template |

    Args:
        chat: The row.
        prompt: The messages of the row's own prompt; `chosen` and `rejected` may begin with them. None if the row has
            none: then the prompt of `chosen` and `rejected` is what they have in common, or `conversations`.

    Raises:
        RecipeError: Messages are malformed, or none of an answer's turns is trained; a reward is infinite, or could
            overflow float32, or not each turn has one; the chosen answer has the lower score.
    """
    recorded = _recorded(chat, prompt)
    for answer in recorded.answers:
        if all(turn.get("trained") is False for turn in answer.messages if turn["role"] == "assistant"):
            raise RecipeError(
                f"{chat.location}: flags leave all turns of an answer out of the loss, expected one that is trained; "
                "remove the row, or a flag"
            )
    return recorded


def _recorded(chat: ChatRow, prompt: Sequence[Message] | None) -> Recording:
    row, location = chat.row, chat.location
    if row.get("chosen") is not None and row.get("rejected") is not None:
        return _pair(chat, prompt)
    prompted = prompt is not None
    turns = chat.answer(row.get("completion"), "completion") if prompted else []
    if turns:
        label = label_of(row.get("label"))
        if label is not None:
            reward = label
        elif _is_reward(row.get("reward")):
            reward = _number(row.get("reward"), f"{location}: 'reward'") or 0.0
        else:
            return Recording(None, [])
        return Recording(None, [RecordedAnswer(turns, reward, _of_turns(row, turns, location))])
    steps = isinstance(row.get("labels"), list)  # of one answer, which TRL labels and rlkit does not read
    completions = chat.answers("completions") if prompted and not steps else None
    if completions is not None:
        return Recording(None, _several(completions, row.get("rewards"), f"{location}: 'rewards'"))
    turns = [] if prompted else chat.conversation()
    if turns:
        return _from_first_turn(turns, row, location)
    text = row.get("text")
    if not prompted and isinstance(text, str) and text:
        return Recording([], [RecordedAnswer([{"role": "assistant", "content": text}])])
    return Recording(None, [])


def _pair(chat: ChatRow, prompt: Sequence[Message] | None) -> Recording:
    row, location = chat.row, chat.location
    chosen, rejected = (chat.answer(row[column], column) for column in ("chosen", "rejected"))
    shared: list[Message] | None = None
    if prompt is None:
        asked = chat.conversation()
        common = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), 0)
        shared, chosen, rejected = chosen[:common], chosen[common:], rejected[common:]
        if not shared and asked and asked[-1]["role"] != "assistant":
            shared = asked
    else:
        chosen, rejected = (_without_prompt(turns, list(prompt)) for turns in (chosen, rejected))
    if not chosen or not rejected or shared == []:
        return Recording(None, [])
    better, worse = (_number(row.get(name), f"{location}: {name!r}") for name in ("score_chosen", "score_rejected"))
    if not _is_reward(row.get("score_chosen")) or not _is_reward(row.get("score_rejected")):
        return Recording(None, [])
    if better is None or worse is None:
        better, worse = 1.0, 0.0
    if better < worse:
        raise RecipeError(
            f"{chat.location}: score_chosen is {better:g} and score_rejected {worse:g}, but the chosen answer is the "
            "better one; remove the row, or both columns"
        )
    worse = min(worse, better - TIE * max(abs(better), 1.0))
    answers = [RecordedAnswer(chosen, better), RecordedAnswer(rejected, worse)]
    return Recording(shared and context(shared), answers)


def _without_prompt(turns: list[Message], prompt: list[Message]) -> list[Message]:
    """Return the turns of an answer without the prompt's last messages, if it begins with them in any words."""
    for start in range(len(prompt)):
        count = len(prompt) - start
        if len(turns) >= count and all(map(_repeats, turns, prompt[start:])):
            return turns[count:]
    first = next((i for i, message in enumerate(turns) if message["role"] == "assistant"), 0)
    return turns[first:]


def _repeats(turn: Message, message: Message) -> bool:
    """Whether a turn repeats a message: one of the assistant in the same words, any other in any words."""
    texts = [str(m.get("content") or "").strip() for m in (turn, message)]
    return turn["role"] == message["role"] and (turn["role"] != "assistant" or texts[0] == texts[1])


def _several(completions: list[list[Message]], rewards: object, what: str) -> list[RecordedAnswer]:
    if not isinstance(rewards, list | None):
        return []
    values = [0.0] * len(completions) if rewards is None else [_number(x, what) for x in rewards]
    pairs = zip(completions, values, strict=False)
    answers = [RecordedAnswer(turns, reward) for turns, reward in pairs if turns and reward is not None]
    if len(answers) < len(completions) or len(values) != len(completions):
        return []
    return sorted(answers, key=lambda answer: -answer.reward)


def _from_first_turn(messages: list[Message], row: Row, location: str) -> Recording:
    first = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), 0)
    if not first:
        return Recording(None, [])
    last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
    turns = messages[first : last + 1]
    return Recording(context(messages[:first]), [RecordedAnswer(turns, 0.0, _of_turns(row, turns, location))])


def _of_turns(row: Row, messages: list[Message], location: str) -> list[float]:
    """Return the rewards of the turns of an answer; none where the row has none.

    Raises:
        RecipeError: They are not a number for each turn.
    """
    rewards = row.get("turn_rewards")
    if rewards is None:
        return []
    what, turns = f"{location}: 'turn_rewards'", sum(message["role"] == "assistant" for message in messages)
    numbers = (
        [_number(float(x) if isinstance(x, bool) else x, what) for x in rewards] if isinstance(rewards, list) else []
    )
    finite = [x for x in numbers if x is not None]
    if len(finite) != turns or len(numbers) != turns:
        raise RecipeError(f"{what} is {show(rewards)}, expected a number for each of {turns} turns of the assistant")
    return finite


def _is_reward(value: object) -> bool:
    """Whether a column has a number, or nothing: a row with anything else there records no answer."""
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _number(value: object, what: str) -> float | None:
    """Return a number; None where there is none, or NaN, which stands for that in tables.

    Raises:
        RecipeError: It is infinite, or could overflow float32; the message begins with `what`.
    """
    if not isinstance(value, int | float) or isinstance(value, bool) or (isinstance(value, float) and isnan(value)):
        return None
    try:
        return as_number(value)
    except (OverflowError, ValueError) as error:
        raise RecipeError(f"{what} is {show(value)}, expected a finite number up to {LARGEST_FLOAT:g}") from error
