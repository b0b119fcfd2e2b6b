"""The types of Hugging Face objects that rlkit and its parts use: tokenizer, configuration, model and LoRA layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

from rlkit.types import JsonObject

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


class AddedToken(Protocol):
    """A token that was added to a tokenizer's vocabulary; as a string, its text."""

    special: bool


class Tokenizer(Protocol):
    """A tokenizer of transformers, with its chat template."""

    chat_template: str | None
    bos_token: str | None
    eos_token: str
    eos_token_id: int
    pad_token: str | None
    pad_token_id: int | None
    clean_up_tokenization_spaces: bool

    @property
    def added_tokens_decoder(self) -> Mapping[int, AddedToken]:
        """Added tokens by id."""

    def encode(self, text: str, *, add_special_tokens: bool = True, verbose: bool = True) -> list[int]:
        """Return the token ids of a text; if `verbose`, one that exceeds the context logs a warning."""

    def decode(self, token_ids: Sequence[int] | int, *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids."""

    def apply_chat_template(self, conversation: Sequence[Mapping[str, object]], **options: object) -> object:
        """Return the rendered conversation, a text with `tokenize=False`."""

    def get_vocab(self) -> dict[str, int]:
        """Return the ids of all tokens, added ones too, by token."""

    def save_pretrained(self, folder: Path) -> object:
        """Write the tokenizer's files."""


class ModelConfig(Protocol):
    """A model's configuration."""

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    tie_word_embeddings: bool
    eos_token_id: int | list[int] | None
    pad_token_id: int | None
    num_labels: int
    architectures: list[str] | None
    dtype: torch.dtype
    _attn_implementation: str

    def get_text_config(self) -> ModelConfig:
        """Return the configuration of the text model, for most models the same."""

    def to_dict(self) -> JsonObject:
        """Return its values as JSON data, with those of its sections."""

    @classmethod
    def from_dict(cls, values: JsonObject) -> Self:
        """Return the configuration with the values of a `config.json`, which may be changed by this."""

    def save_pretrained(self, folder: Path) -> None:
        """Write `config.json`."""


if TYPE_CHECKING:

    class AdapterSettings(Protocol):
        """The settings of an adapter in peft."""

        r: int
        lora_alpha: float
        use_dora: bool
        base_model_name_or_path: str | None

    class CausalLM(nn.Module):
        """A model of transformers, or one of peft around it, which alone has `peft_config`."""

        config: ModelConfig
        base_model_prefix: str
        name_or_path: str
        generation_config: object
        peft_config: dict[str, AdapterSettings]
        active_adapter: str

        def get_decoder(self) -> CausalLM: ...

        def get_input_embeddings(self) -> nn.Module: ...

        def get_output_embeddings(self) -> nn.Linear: ...

        def get_base_model(self) -> CausalLM: ...

        def disable_adapter(self) -> AbstractContextManager[None]: ...

        def unload(self) -> CausalLM: ...

        def eval(self) -> CausalLM: ...

        def requires_grad_(self, requires_grad: bool = True) -> CausalLM: ...

        def save_pretrained(self, folder: Path, **options: object) -> None: ...

    class Magnitudes(nn.Module):
        """The magnitudes of a layer's outputs, which DoRA trains, of peft."""

        weight: Tensor
        fan_in_fan_out: bool

    class AdapterLayer(nn.Module):
        """A layer with LoRA adapters, of peft."""

        active_adapters: Sequence[str]
        lora_A: Mapping[str, nn.Linear]
        lora_B: Mapping[str, nn.Linear]
        lora_magnitude_vector: Mapping[str, Magnitudes]
        scaling: Mapping[str, float]
        fan_in_fan_out: bool

        def get_delta_weight(self, adapter: str) -> Tensor: ...

        def get_base_layer(self) -> nn.Linear: ...


class LayerFusion(ABC):
    """Makes the layers of a model faster; no recipe names it."""

    @abstractmethod
    def fuse(self, model: nn.Module) -> None:
        """Replace the forward passes of known layers; the results stay the same, but for rounding."""
