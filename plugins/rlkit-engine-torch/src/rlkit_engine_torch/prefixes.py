"""Keys and values of conversations between their turns: a tree of tokens whose branches share their beginnings."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlkit.media import Media

Tokens = tuple[object, ...]
"""Tokens as the tree compares them: ids, some of them with the pictures of the text that they begin."""


@dataclass(frozen=True)
class Prefix:
    """The first tokens of a prompt, which have been run before.

    Args:
        length: Their number.
        chunks: Their keys and values [L,2,H,n,D], in order.
    """

    length: int
    chunks: list[Tensor]

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


class PrefixCache:
    """Keeps keys and values of the weights in use, those least recently used for the shortest time.

    Tokens themselves are compared, so that turns, forks, groups and agents are served alike, and never wrongly.

    Args:
        max_bytes: The largest size; 0 to keep nothing.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
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
        if not length or (media is not None and media.segments[-1].end > length):
            return None
        return Prefix(length, [node.keys_values for node in path])

    def store(self, tokens: Sequence[int], media: Media | None, keys_values: Callable[[int, int], Tensor]) -> None:
        """Keep what is missing of tokens.

        Args:
            tokens: A conversation's, from its beginning.
            media: Its pictures.
            keys_values: Returns the keys and values [L,2,H,n,D] of `tokens[start:end]`.
        """
        keys = tokens_of(tokens, media)
        path, length = self._walk(keys)
        parent = path[-1] if path else self._root
        if self.max_bytes and length < len(keys):
            shared = length - sum(len(node.tokens) for node in path[:-1])
            if path and shared < len(parent.tokens):
                path[-1] = parent = self._split(parent, shared)
            new = keys_values(length, len(keys))
            self.bytes += new.nbytes
            if path and not parent.children:  # a conversation goes on: few nodes are fast
                parent.tokens += keys[length:]
                parent.keys_values = torch.cat((parent.keys_values, new), 3)
            else:
                parent.children[keys[length]] = _Node(keys[length:], new, parent)
                path.append(parent.children[keys[length]])
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
        self.bytes -= node.keys_values.nbytes


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


def _common(first: Tokens, second: Tokens) -> int:
    """Return the number of tokens with which both begin."""
    if first == second:
        return len(first)
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
