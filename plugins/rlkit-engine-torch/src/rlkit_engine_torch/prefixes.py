"""What layers keep of conversations between their turns: a tree of tokens whose branches share their beginnings."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlkit.types import Media

if TYPE_CHECKING:
    from rlkit.models.recurrent import StateLayer

Tokens = tuple[object, ...]
"""Tokens as the tree compares them: ids, some of them with the pictures of the text that they begin."""


@dataclass(frozen=True)
class Prefix:
    """The first tokens of a prompt, which have been run before.

    Args:
        length: Their number.
        chunks: Their keys and values [L,2,H,n,D], in order.
        states: Those [1,...] of each layer after the last of them; empty if layers have none.
    """

    length: int
    chunks: list[Tensor]
    states: Sequence[StateLayer] = ()

    def write(self, target: Tensor, layers: int | slice = slice(None)) -> None:
        """Copy keys and values of one layer to a tensor [2,H,n,D], or of all to [L,2,H,n,D], as many as it holds."""
        start, room = 0, min(self.length, target.shape[-2])
        for chunk in self.chunks:
            end = min(start + chunk.shape[3], room)
            target[..., start:end, :] = chunk[layers, :, :, : end - start]
            start = end


@dataclass(eq=False)
class _Node:
    """Tokens after those of the parent, with their keys and values [L,2,H,n,D]."""

    tokens: Tokens
    keys_values: Tensor
    parent: _Node | None = None
    children: dict[object, _Node] = field(default_factory=dict)
    """By their first tokens."""
    states: Sequence[StateLayer] = ()
    """Those after the last token."""

    @property
    def nbytes(self) -> int:
        kinds = (states for layer in self.states for states in (layer.conv_states, layer.recurrent_states))
        return sum((x.nbytes for states in kinds for x in states.values() if x is not None), self.keys_values.nbytes)


class PrefixCache:
    """Keeps keys and values of the weights in use, those least recently used for the shortest time.

    Tokens themselves are compared, so that turns, forks, groups and agents are served alike, and never wrongly.

    Args:
        max_bytes: The largest size; 0 to keep nothing.
        recurrent: Whether layers have states, which are kept after the last token of a turn alone. A prompt that does
            not go on from there has no prefix.
    """

    def __init__(self, max_bytes: int, recurrent: bool = False) -> None:
        self.max_bytes = max_bytes
        self.recurrent = recurrent
        self.bytes = 0
        self._root = _Node((), torch.empty(0))
        self._nodes: OrderedDict[_Node, None] = OrderedDict()
        """From the least recently used; a parent comes after its children, so that the first node is a leaf."""

    def find(self, tokens: Sequence[int], media: Media | None = None, most: int | None = None) -> Prefix | None:
        """Return the longest prefix, of `most` tokens or fewer, that leaves a token to run, and no picture; or None."""
        if not self._nodes:
            return None
        path, length = self._walk(tokens_of(tokens, media))
        self._touch(path)
        length = min(length, len(tokens) - 1 if most is None else most)
        if self.recurrent:
            path, length = _up_to_states(path, length)
        if not length or (media is not None and media.segments[-1].end > length):
            return None
        return Prefix(length, [node.keys_values for node in path], path[-1].states)

    def store(
        self,
        tokens: Sequence[int],
        media: Media | None,
        keys_values: Callable[[int, int], Tensor],
        states: Callable[[], Sequence[StateLayer]] = tuple,
    ) -> None:
        """Keep what is missing of tokens.

        Args:
            tokens: A conversation's, from its beginning.
            media: Its pictures.
            keys_values: Returns the keys and values [L,2,H,n,D] of `tokens[start:end]`.
            states: Returns those [1,...] of each layer after the last token.
        """
        keys = tokens_of(tokens, media)
        path, length = self._walk(keys)
        if self.max_bytes and (self.recurrent or length < len(keys)):
            new, last_states = keys_values(length, len(keys)), states()
            shared = length - sum(len(node.tokens) for node in path[:-1])
            if path and shared < len(path[-1].tokens):
                path[-1] = self._split(path[-1], shared)
            if length < len(keys):
                self._append(path, keys[length:], new)
            self.bytes -= path[-1].nbytes
            path[-1].states = last_states
            self.bytes += path[-1].nbytes
        self._touch(path)
        while self.bytes > self.max_bytes:
            self._evict()

    def clear(self) -> None:
        """Drop everything: the weights have changed, or nothing is decoded for now."""
        self.bytes = 0
        self._root.children.clear()
        self._nodes.clear()

    def _walk(self, keys: Tokens) -> tuple[list[_Node], int]:
        """Return the nodes that tokens begin with, the last of them perhaps in part, and the number of tokens."""
        path: list[_Node] = []
        node, length = self._root, 0
        while length < len(keys) and keys[length] in node.children:
            node = node.children[keys[length]]
            path.append(node)
            common = _common(node.tokens, keys[length : length + len(node.tokens)])
            length += common
            if common < len(node.tokens):
                break
        return path, length

    def _append(self, path: list[_Node], tokens: Tokens, keys_values: Tensor) -> None:
        """Let a path go on: in its last node, unless that has children."""
        parent = path[-1] if path else self._root
        if path and not parent.children:  # a conversation goes on: few nodes are fast
            parent.keys_values = torch.cat((parent.keys_values, keys_values), 3)
            parent.tokens += tokens
        else:
            parent.children[tokens[0]] = _Node(tokens, keys_values, parent)
            path.append(parent.children[tokens[0]])
        self.bytes += keys_values.nbytes

    def _split(self, node: _Node, count: int) -> _Node:
        """Let the first tokens of a node have a node of their own; return it."""
        assert node.parent is not None
        first, last = (part.clone() for part in node.keys_values.tensor_split([count], 3))  # each is freed by itself
        head = _Node(node.tokens[:count], first, node.parent, {node.tokens[count]: node})
        node.parent.children[node.tokens[0]] = head
        node.tokens, node.keys_values, node.parent = node.tokens[count:], last, head
        return head

    def _touch(self, path: Sequence[_Node]) -> None:
        """Note that nodes were used, parents after their children."""
        for node in reversed(path):
            self._nodes[node] = None
            self._nodes.move_to_end(node)

    def _evict(self) -> None:
        node, _ = self._nodes.popitem(last=False)
        assert node.parent is not None
        del node.parent.children[node.tokens[0]]
        self.bytes -= node.nbytes


def tokens_of(tokens: Sequence[int], media: Media | None) -> Tokens:
    """Return tokens that are equal for equal pictures only: the first of a text that has some comes with them."""
    if media is None:
        return tuple(tokens)
    keys: list[object] = list(tokens)
    start = 0
    for segment in media.segments:
        keys[start] = (tokens[start], *segment.pictures)
        start = segment.end
    return tuple(keys)


def _up_to_states(path: list[_Node], limit: int) -> tuple[list[_Node], int]:
    """Return the nodes up to the last whose states come after `limit` tokens or fewer, and the number of tokens."""
    length = sum(len(node.tokens) for node in path)
    while path and (length > limit or not path[-1].states):
        length -= len(path.pop().tokens)
    return path, length


def _common(first: Tokens, second: Tokens) -> int:
    """Return the number of tokens with which both begin."""
    if first == second:
        return len(first)
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
