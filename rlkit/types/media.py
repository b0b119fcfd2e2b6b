"""The pictures of a conversation as its model reads them: tensors besides the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from rlkit.interfaces.picture import Picture


class MediaSegment:
    """The pictures of one text that the processor rendered: a prompt, or what came after a turn of the policy.

    Args:
        tensors: The model's inputs besides tokens, by name, such as `pixel_values`.
        pictures: The pictures within the bounds of their size, in the order of their placeholders.
        end: Index in the conversation after the last token that stands for a feature.
    """

    __slots__ = ("end", "pictures", "tensors")

    def __init__(self, tensors: dict[str, Tensor], pictures: tuple[Picture, ...], end: int) -> None:
        self.tensors = tensors
        self.pictures = pictures
        self.end = end

    def after(self, tokens: int) -> MediaSegment:
        """Return the same segment behind a number of other tokens."""
        return MediaSegment(self.tensors, self.pictures, self.end + tokens)


class Rendered(NamedTuple):
    """What the policy reads next.

    Args:
        tokens: Token ids.
        media: The pictures that placeholders among the tokens stand for; None without pictures.
    """

    tokens: list[int]
    media: MediaSegment | None = None


class Media:
    """The pictures of one conversation; samples of a prompt share them until a participant adds others.

    Args:
        segments: In the order of the tokens; none is empty.
    """

    __slots__ = ("key", "segments")

    def __init__(self, segments: Sequence[MediaSegment]) -> None:
        self.segments = tuple(segments)
        self.key = tuple(picture.digest for segment in self.segments for picture in segment.pictures)
        """Equal for equal pictures in equal order."""

    @classmethod
    def of(cls, segments: Sequence[MediaSegment]) -> Media | None:
        """Return the pictures of segments; None if there are none."""
        return cls(segments) if segments else None

    def before(self, tokens: int) -> Media | None:
        """Return the pictures whose placeholders are among the first tokens; None if there are none."""
        return Media.of([segment for segment in self.segments if segment.end <= tokens])

    @property
    def pictures(self) -> list[Picture]:
        """All pictures, in order."""
        return [picture for segment in self.segments for picture in segment.pictures]

    def __len__(self) -> int:
        return len(self.key)
