"""Processors of vision-language models: token ids and image tensors, joined for one forward pass."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from rlkit.base.errors import RecipeError
from rlkit.models.processor import Processor, image_token_ids, join_media, load_processor, process
from rlkit.testing import save_random_model
from tests.vision_models import VISION_KINDS, save_random_vision_model

WIDE, SQUARE, TALL = (84, 56), (32, 32), (30, 100)
TOKEN_TYPES = {"qwen2_5_vl": "mm_token_type_ids", "qwen3_vl": "mm_token_type_ids", "gemma3": "token_type_ids"}


@dataclass
class Loaded:
    """A random model with its processor."""

    kind: str
    folder: Path
    processor: Processor
    model: Any

    def placeholders(self) -> Tensor:
        return torch.tensor(sorted(image_token_ids(self.model.config, self.processor)))

    def render(self, *contents: object, generate: bool = True) -> str:
        messages: list[dict[str, object]] = [{"role": "user", "content": content} for content in contents]
        options = {"tokenize": False, "add_generation_prompt": generate}
        return str(self.processor.tokenizer.apply_chat_template(messages, **options))

    def logits(self, rows: Sequence[Sequence[int]], media: Mapping[str, Tensor]) -> Tensor:
        """Return the logits of rows, which are padded on the right."""
        longest = max(len(row) for row in rows)
        tokens = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
        lengths = torch.tensor([len(row) for row in rows])
        inputs = {"attention_mask": (torch.arange(longest) < lengths[:, None]).long()}
        if self.kind in TOKEN_TYPES:
            inputs[TOKEN_TYPES[self.kind]] = torch.isin(tokens, self.placeholders()).long()
        with torch.no_grad():
            logits: Tensor = self.model(input_ids=tokens, **inputs, **media).logits
        return logits


@pytest.fixture(scope="module", params=VISION_KINDS)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    from transformers import AutoModelForImageTextToText

    folder = save_random_vision_model(tmp_path_factory.mktemp("model"), request.param)
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    return Loaded(request.param, folder, load_processor(str(folder), trust_remote_code=False), model)


def picture(size: tuple[int, int], seed: int = 0) -> Image.Image:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (size[0] * size[1] * 3,), generator=generator, dtype=torch.uint8)
    return Image.frombytes("RGB", size, bytes(pixels.tolist()))


def content(text: str, images: int) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}, *[{"type": "image"}] * images]


@pytest.mark.parametrize("sizes", [[SQUARE], [WIDE, SQUARE, TALL]])
def test_each_feature_has_a_placeholder(loaded: Loaded, sizes: list[tuple[int, int]]) -> None:
    images = [picture(size, seed) for seed, size in enumerate(sizes)]
    ids, media = process(loaded.processor, loaded.render(content("look", len(sizes))), images)
    assert loaded.logits([ids], media).isfinite().all()
    last = max(index for index, token in enumerate(ids) if token in loaded.placeholders())
    with pytest.raises(ValueError, match="features and image tokens do not match"):
        loaded.logits([ids[:last] + ids[last + 1 :]], media)


def test_inputs_per_token_are_left_out(loaded: Loaded) -> None:
    expected = {"qwen2_5_vl": {"image_grid_thw"}, "qwen3_vl": {"image_grid_thw"}, "smolvlm": {"pixel_attention_mask"}}
    _, media = process(loaded.processor, loaded.render(content("", 2)), [picture(WIDE), picture(SQUARE)])
    assert media.keys() == {"pixel_values", *expected.get(loaded.kind, set())}


def test_another_picture_changes_the_logits(loaded: Loaded) -> None:
    text = loaded.render(content("what is it?", 1))
    ids, media = process(loaded.processor, text, [picture(WIDE, 0)])
    same_ids, other = process(loaded.processor, text, [picture(WIDE, 1)])
    assert same_ids == ids
    difference = (loaded.logits([ids], media) - loaded.logits([ids], other))[0, -1]
    assert difference.abs().max() > 0.5


def test_a_text_without_images_has_the_tokenizers_ids(loaded: Loaded) -> None:
    text = loaded.render("héllo <think> ☃")
    ids, media = process(loaded.processor, text, [])
    assert ids == loaded.processor.tokenizer.encode(text, add_special_tokens=False)
    assert loaded.processor.tokenizer.decode(ids) == text
    assert media == {}
    assert not set(ids) & set(loaded.placeholders().tolist())


def test_more_placeholders_than_images_are_refused(loaded: Loaded) -> None:
    with pytest.raises(ValueError, match="number of .* tokens"):
        process(loaded.processor, loaded.render(content("", 2)), [picture(WIDE)])


def test_joined_rows_have_the_logits_of_each_alone(loaded: Loaded) -> None:
    first = process(loaded.processor, loaded.render(content("one", 1)), [picture(TALL, 0)])
    second = process(loaded.processor, loaded.render(content("and two", 2)), [picture(WIDE, 1), picture(SQUARE, 2)])
    joined = loaded.logits([first[0], second[0]], join_media([first[1], second[1]]))
    for row, (ids, media) in enumerate((first, second)):
        torch.testing.assert_close(joined[row, : len(ids)], loaded.logits([ids], media)[0], rtol=1e-5, atol=1e-5)


def test_a_row_without_images_joins_one_with_images(loaded: Loaded) -> None:
    plain = process(loaded.processor, loaded.render("no picture"), [])
    seen = process(loaded.processor, loaded.render(content("one", 1)), [picture(WIDE)])
    joined = loaded.logits([plain[0], seen[0]], join_media([plain[1], seen[1]]))
    torch.testing.assert_close(joined[0, : len(plain[0])], loaded.logits([plain[0]], {})[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(joined[1, : len(seen[0])], loaded.logits([seen[0]], seen[1])[0], rtol=1e-5, atol=1e-5)


def test_two_calls_joined_equal_one_call_over_all(loaded: Loaded) -> None:
    images = [picture(TALL, 0), picture(WIDE, 1)]
    prompt = loaded.render(content("one", 1), generate=False)
    whole = loaded.render(content("one", 1), content("two", 1))
    assert whole.startswith(prompt)
    start = process(loaded.processor, prompt, images[:1])
    later = process(loaded.processor, whole.removeprefix(prompt), images[1:])
    ids, media = process(loaded.processor, whole, images)
    joined = join_media([start[1], later[1]])
    assert start[0] + later[0] == ids
    assert joined.keys() == media.keys()
    torch.testing.assert_close(loaded.logits([ids], joined), loaded.logits([ids], media), rtol=1e-5, atol=1e-5)


def test_images_of_unequal_size_are_padded_with_their_mask() -> None:
    def part(height: int, width: int) -> dict[str, Tensor]:
        return {
            "pixel_values": torch.ones(1, 1, 3, height, width),
            "pixel_attention_mask": torch.ones(1, 1, height, width),
        }

    joined = join_media([part(2, 3), part(4, 1)])
    assert joined["pixel_values"].shape == (1, 2, 3, 4, 3)
    assert joined["pixel_attention_mask"].tolist() == [
        [
            [[1, 1, 1], [1, 1, 1], [0, 0, 0], [0, 0, 0]],
            [[1, 0, 0], [1, 0, 0], [1, 0, 0], [1, 0, 0]],
        ]
    ]
    assert (joined["pixel_values"][:, :, 0] == joined["pixel_attention_mask"]).all()


def test_tiles_of_llava_next_are_joined_by_image() -> None:
    parts = [
        {"pixel_values": torch.ones(1, tiles, 3, 2, 2), "image_sizes": torch.tensor([[tiles, 2]])} for tiles in (3, 5)
    ]
    joined = join_media(parts)
    assert joined["pixel_values"].shape == (2, 5, 3, 2, 2)
    assert joined["pixel_values"][:, :, 0, 0, 0].tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert joined["image_sizes"].tolist() == [[3, 2], [5, 2]]


def test_joining_nothing_is_empty() -> None:
    assert join_media([]) == {}
    assert join_media([{}, {}]) == {}


def test_parts_of_two_processors_are_not_joined() -> None:
    pixels = torch.ones(1, 3, 2, 2)
    with pytest.raises(ValueError, match=r"inputs \['pixel_values'\], expected .*image_sizes"):
        join_media([{"pixel_values": pixels, "image_sizes": torch.ones(1, 2)}, {"pixel_values": pixels}])


def test_the_class_keeps_its_name_and_its_settings(loaded: Loaded) -> None:
    settings = json.loads((loaded.folder / "processor_config.json").read_text())
    assert type(loaded.processor).__name__ == settings.pop("processor_class")
    assert {name: getattr(loaded.processor, name) for name in settings} == settings
    assert not hasattr(loaded.processor, "video_processor")


def test_an_older_folder_without_processor_config_loads(tmp_path: Path) -> None:
    folder = save_random_vision_model(tmp_path, "qwen3_vl")
    (folder / "processor_config.json").unlink()
    assert type(load_processor(str(folder), trust_remote_code=False)).__name__ == "Qwen3VLProcessor"
    images = json.loads((folder / "preprocessor_config.json").read_text())
    del images["processor_class"]
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    assert type(load_processor(str(folder), trust_remote_code=False)).__name__ == "Qwen3VLProcessor"


def test_a_folder_that_the_processor_saved_loads(loaded: Loaded, tmp_path: Path) -> None:
    shutil.copy(loaded.folder / "config.json", tmp_path)
    loaded.processor.save_pretrained(tmp_path)  # type: ignore[attr-defined]
    images = [picture(WIDE)]
    again = process(load_processor(str(tmp_path), trust_remote_code=False), loaded.render(content("", 1)), images)
    ids, media = process(loaded.processor, loaded.render(content("", 1)), images)
    assert again[0] == ids
    torch.testing.assert_close(again[1], media, rtol=0, atol=0)


def test_a_saved_video_processor_is_ignored(tmp_path: Path) -> None:
    folder = save_random_vision_model(tmp_path, "smolvlm")
    values = json.loads((folder / "processor_config.json").read_text())
    values["video_processor"] = {"video_processor_type": "SmolVLMVideoProcessor"}
    (folder / "processor_config.json").write_text(json.dumps(values))
    assert not hasattr(load_processor(str(folder), trust_remote_code=False), "video_processor")


def test_a_model_without_image_processor_is_refused(tmp_path: Path) -> None:
    folder = save_random_model(tmp_path)
    with pytest.raises(RecipeError, match="has no image processor, but prompts have images; choose a vision-language"):
        load_processor(str(folder), trust_remote_code=False)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "gemma3"])
def test_a_missing_preprocessor_config_is_explained(tmp_path: Path, kind: str) -> None:
    folder = save_random_vision_model(tmp_path, kind)
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(RecipeError, match="whose processor of images cannot be loaded: .* choose another model"):
        load_processor(str(folder), trust_remote_code=False)


def test_loading_hides_the_notice_on_torchvision(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    logger = logging.getLogger("transformers.utils.import_utils")
    load = AutoImageProcessor.from_pretrained

    def noisy(*arguments: object, **options: object) -> object:
        logger.warning("`CLIPImageProcessor` requires torchvision (not installed); falling back")
        return load(*arguments, **options)

    monkeypatch.setattr(AutoImageProcessor, "from_pretrained", noisy)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    level = logger.level
    load_processor(str(loaded.folder), trust_remote_code=False)
    assert caplog.messages == []
    assert logger.level == level


def test_a_conversation_renders_append_only(loaded: Loaded) -> None:
    messages: list[dict[str, object]] = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": content("look", 1)},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "zoom", "arguments": {"x": 1}}}]},
        {"role": "tool", "content": content("zoomed", 1)},
    ]
    options = {"tokenize": False, "tools": [{"type": "function", "function": {"name": "zoom"}}]}
    template = loaded.processor.tokenizer.apply_chat_template
    texts = [str(template(messages[:end], **options)) for end in range(1, 5)]
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    assert '"name": "zoom", "arguments": {"x": 1}' in texts[2]
    _, media = process(loaded.processor, texts[-1], [picture(WIDE), picture(SQUARE)])
    assert media


@pytest.mark.parametrize("kind", VISION_KINDS)
def test_changes_are_of_the_text_model(tmp_path: Path, kind: str) -> None:
    from transformers import AutoModelForImageTextToText

    for tied in (True, False):
        folder = save_random_vision_model(tmp_path, kind, num_hidden_layers=3, tie_word_embeddings=tied)
        model = AutoModelForImageTextToText.from_pretrained(folder)
        assert len(model.get_decoder().layers) == 3
        assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) is tied


def test_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="kind is 'vit', expected one of: qwen2_5_vl"):
        save_random_vision_model(tmp_path, "vit")
