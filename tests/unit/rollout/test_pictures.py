"""Pictures in rendered texts: sizes, places, and what may not stand in a text."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from rlkit.base.errors import RecipeError
from rlkit.data.data import picture_reader
from rlkit.data.measure import measure
from rlkit.interfaces.picture import Picture
from rlkit.models.load import load_tokenizer, stop_ids
from rlkit.recipe import Model, Vision
from rlkit.rollout.pictures import resized
from rlkit.rollout.template import ChatTemplate
from rlkit.types import Message, Prompt

MODEL = Model("tiny-vision")


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    tokenizer = load_tokenizer(MODEL)
    return ChatTemplate(tokenizer, stop_ids(MODEL, tokenizer), reader=picture_reader(MODEL))


def picture(width: int = 84, height: int = 56, colour: str = "red") -> Picture:
    return Picture.of(Image.new("RGB", (width, height), colour))


def question(*pictures: Picture, text: str = "What?") -> list[Message]:
    parts = [{"type": "image", "image": each} for each in pictures]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


@pytest.mark.parametrize(
    ("size", "options", "expected"),
    [
        ((100, 50), Vision(), (100, 50)),
        ((100, 50), Vision(max_pixels=1250), (50, 25)),
        ((99, 51), Vision(max_pixels=1000), (44, 22)),
        ((10, 10), Vision(min_pixels=400), (20, 20)),
        ((1, 150), Vision(max_pixels=100), (1, 122)),
    ],
)
def test_sizes_are_bounded_in_their_ratio(size: tuple[int, int], options: Vision, expected: tuple[int, int]) -> None:
    assert resized(Image.new("RGB", size), options).size == expected


def test_lengths_count_pictures_as_the_processor_expands_them(template: ChatTemplate) -> None:
    """28 x 28 pixels are a token: 6 for 84 x 56, 2 for 56 x 28."""
    reader = template.reader
    assert reader is not None
    lengths = measure(template, [Prompt("a", question(picture())), Prompt("b", question(picture(56, 28)))])
    assert lengths[0] - lengths[1] == 4
    rendered = template.render_start(question(picture()))
    assert len(rendered.tokens) == lengths[0]
    assert sum(token in reader.placeholders for token in rendered.tokens) == 6
    assert rendered.media is not None
    assert rendered.media.end == 1 + max(i for i, token in enumerate(rendered.tokens) if token in reader.placeholders)


def test_starts_of_equal_tokens_are_kept_apart_by_their_pictures(template: ChatTemplate) -> None:
    red, blue = (template.render_start(question(picture(colour=colour))) for colour in ("red", "blue"))
    assert red.tokens == blue.tokens
    assert red.media is not None
    assert blue.media is not None
    assert not red.media.tensors["pixel_values"].equal(blue.media.tensors["pixel_values"])
    again = template.render_start(question(picture(colour="red")))
    assert again is red


def test_a_text_may_not_stand_for_a_picture(template: ChatTemplate) -> None:
    for messages in (question(text="<|image_pad|>"), question(picture(), text="a <|image_pad|> b")):
        with pytest.raises(RecipeError, match=r"holds '<\|image_pad\|>', which stands for a picture"):
            template.start(messages)


def test_a_damaged_picture_names_its_prompt(template: ChatTemplate) -> None:
    prompt = Prompt("row 7", question(Picture(picture().data[:-30])))
    with pytest.raises(RecipeError, match=r"prompt 'row 7': the picture is damaged"):
        measure(template, [prompt])


def test_a_reply_begins_after_the_policys_end_token(template: ChatTemplate) -> None:
    start = template.render_start(question(picture()))
    delta = template.render_delta(question(picture(56, 28)))
    turn = [*template.codec.encode("red"), *template.stop_ids][:4]
    flat = template.codec.decode([*start.tokens, *turn, *delta.tokens])
    messages = [*question(picture()), {"role": "assistant", "content": "red"}, *question(picture(56, 28))]
    assert flat == template.rendered(messages) + "<|im_start|>assistant\n"
    assert delta.media is not None
    assert delta.tokens[delta.media.end - 1] in (template.reader.placeholders if template.reader else ())


def test_the_model_of_pictures_ships_whole() -> None:
    folder = Path(__file__).parents[3] / "rlkit/models/tiny_vision"
    assert sum(path.stat().st_size for path in folder.iterdir()) < 2_000_000
