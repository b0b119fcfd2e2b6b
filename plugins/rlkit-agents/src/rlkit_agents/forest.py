"""The forest of a session: which turn of the policy continues which, and the samples that it is trained on. Pure.

A request continues the deepest turn whose conversation is a prefix of its own. Its prompt is the ids of that turn,
verbatim, and the rendered messages after it, so nothing that the policy sampled is tokenised again. A conversation that
an agent rewrites (compaction, sub-agents, edits) continues no turn, or an earlier one: it forks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rlkit.interfaces.gateway import Sample
from rlkit.types import Completion, Fork, MediaSegment, Message, Rendered, StopReason, Turn
from rlkit_agents.request import canonical, digest


@dataclass(frozen=True)
class Node:
    """A turn of the policy, and what it read since the turn that it continues.

    Args:
        index: Position in the order of commits.
        parent: Index of the turn that it continues; None for the first turn of a conversation.
        messages: Messages since the parent, the policy's last.
        context: Ids of these messages, the policy's left out, and their pictures.
        completion: What the policy sampled.
        history: Digest of the tools and all messages up to this turn's.
        speaker: Number of the role that it is of; 0 without roles.
    """

    index: int
    parent: int | None
    messages: tuple[Message, ...]
    context: Rendered
    completion: Completion
    history: str
    speaker: int = 0

    @property
    def extendable(self) -> bool:
        """Whether the turn ended by itself, so that a conversation can go on after it."""
        return self.completion.stop is StopReason.STOP


class Attachment(NamedTuple):
    """Where a request continues the forest.

    Args:
        parent: The turn that it continues; None for the start of a conversation.
        messages: Number of its messages up to that turn.
    """

    parent: Node | None
    messages: int


@dataclass
class Forest:
    """The turns of a session, in the order in which they were committed."""

    nodes: list[Node] = field(default_factory=list)
    forks: int = 0
    """Turns that continue what another turn continues already, or start another conversation of the same role."""
    _by_history: dict[str, list[int]] = field(default_factory=dict)
    _parents: set[int] = field(default_factory=set)
    """Indices of turns that others continue, and -1 - speaker for each role that has begun a conversation."""

    def attach(self, history: Sequence[str]) -> Attachment:
        """Return the deepest turn whose conversation is a proper prefix of a request's, the latest of several.

        Args:
            history: Digests of the tools and the request's first n messages, for each n: `ChatRequest.history`.
        """
        for length in range(len(history) - 2, 0, -1):
            for index in reversed(self._by_history.get(history[length], ())):
                if self.nodes[index].extendable:
                    return Attachment(self.nodes[index], length)
        return Attachment(None, 0)

    def ids(self, node: Node | None) -> list[int]:
        """Return the ids of a conversation up to a turn's end."""
        return [token for turn in self.path(node) for token in (*turn.context.tokens, *turn.completion.tokens)]

    def media(self, node: Node | None) -> list[MediaSegment]:
        """Return the pictures of a conversation up to a turn's end."""
        return _media(self.path(node))

    def path(self, node: Node | None) -> list[Node]:
        """Return the turns from the first of a conversation to a turn."""
        turns = []
        while node is not None:
            turns.append(node)
            node = None if node.parent is None else self.nodes[node.parent]
        return turns[::-1]

    def rendered_again(self, history: Sequence[str]) -> int:
        """Return the sampled tokens of committed turns among those that a request renders, instead of taking their ids.

        Args:
            history: Digests of the request's conversation after each message that it renders.
        """
        again = [self.nodes[self._by_history[digest][-1]] for digest in history if digest in self._by_history]
        return sum(len(node.completion.tokens) for node in again)

    def commit(
        self,
        parent: Node | None,
        messages: Sequence[Message],
        context: Rendered,
        completion: Completion,
        before: str,
        *,
        speaker: int = 0,
    ) -> Node:
        """Add a turn.

        Args:
            parent: The turn that it continues.
            messages: Messages since the parent, the policy's last.
            context: Ids of these messages, the policy's left out, and their pictures.
            completion: What the policy sampled.
            before: Digest of the conversation without the policy's message.
            speaker: Number of the role; 0 without roles.
        """
        parent_index = None if parent is None else parent.index
        continued = -1 - speaker if parent is None else parent.index
        history = digest(before, canonical(messages[-1]))
        node = Node(len(self.nodes), parent_index, tuple(messages), context, completion, history, speaker)
        self.forks += continued in self._parents
        self._parents.add(continued)
        self.nodes.append(node)
        self._by_history.setdefault(history, []).append(node.index)
        return node

    def leaves(self) -> list[Node]:
        """Return the turns that no turn continues, role by role: its latest first, then its others in their order."""
        by_speaker: dict[int, list[Node]] = {}
        for node in self.nodes:
            if node.index not in self._parents:
                by_speaker.setdefault(node.speaker, []).append(node)
        return [leaf for _, leaves in sorted(by_speaker.items()) for leaf in (leaves[-1], *leaves[:-1])]

    def samples(self) -> list[Sample]:
        """Return a sample for each leaf, in the order of roles; each turn is under the mask of exactly one sample."""
        sample_of: dict[int, int] = {}
        samples = []
        for index, leaf in enumerate(self.leaves()):
            path = self.path(leaf)
            samples.append(_flatten(path, sample_of))
            sample_of = {node.index: index for node in path} | sample_of
        return samples


def _flatten(path: Sequence[Node], sample_of: Mapping[int, int]) -> Sample:
    """Return the sample of a path; `sample_of` has the indices of the samples that train on earlier nodes."""
    last = path[-1]
    positions = [node.index for node in path if node.index not in sample_of]
    shared = [node for node in path if node.index in sample_of]
    tokens = sum(len(node.context.tokens) + len(node.completion.tokens) for node in shared)
    fork = Fork(sample_of[shared[-1].index], tokens) if shared else None
    sample = Sample(
        [], [], [], [], [], [], last.completion.stop, list(last.completion.tokens), fork, positions, _media(path),
        speaker=last.speaker,
    )  # fmt: skip
    for node in path:
        role = "tool" if node.messages[0]["role"] == "tool" else "user"
        _append(sample, node.context.tokens, role)
        _append(sample, node.completion.tokens, "user" if node.index in sample_of else "assistant", node.completion)
        sample.messages.extend(node.messages)
    return sample


def _media(path: Sequence[Node]) -> list[MediaSegment]:
    segments, start = [], 0
    for node in path:
        if node.context.media is not None:
            segments.append(node.context.media.after(start))
        start += len(node.context.tokens) + len(node.completion.tokens)
    return segments


def _append(sample: Sample, tokens: Sequence[int], role: str, completion: Completion | None = None) -> None:
    """Append a span; one that is not the policy's joins the span before it, if that is not the policy's either."""
    start, count = len(sample.tokens), len(tokens)
    sampled = role == "assistant" and completion is not None
    sample.filled.extend(values.after(start) for values in (completion.filled if completion else ()))
    sample.tokens.extend(tokens)
    sample.mask.extend([sampled] * count)
    sample.logps.extend(completion.logps if sampled and completion else [0.0] * count)
    sample.versions.extend(completion.versions if sampled and completion else [-1] * count)
    sample.candidates.extend((completion.candidates if sampled and completion else []) or [()] * count)
    if not sampled and sample.turns and sample.turns[-1].role != "assistant":
        sample.turns[-1] = sample.turns[-1]._replace(end=start + count)
    else:
        sample.turns.append(Turn(role, start, start + count))
