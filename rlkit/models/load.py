"""Loading the policy and its tokenizer."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from rlkit.base.errors import RecipeError, UnavailableError, show
from rlkit.base.installed import extra_command
from rlkit.base.text import counted
from rlkit.models.checkpoints import load_checkpoint_alone, verify
from rlkit.models.config import AutoClass, auto_class_of, experts_of, explained, load_config
from rlkit.models.lora import add_lora, has_lora, load_adapter, merge_adapters, score_head
from rlkit.models.processor import Processor, load_processor
from rlkit.models.source import ADAPTER_WEIGHTS, Source, base_name, classifies, locate, source_of
from rlkit.models.store import Store
from rlkit.models.vision import backbone_of, freeze_vision, language_model, language_targets, reads_pictures
from rlkit.models.weights import trainable
from rlkit.ops.quantization import QuantizedLinear, replace_layers
from rlkit.recipe import Model
from rlkit.recipe.model import Quantization

if TYPE_CHECKING:
    from rlkit.interfaces.model import CausalLM, Tokenizer


PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message.content }}"
    "{{ eos_token if message.role == 'assistant' else '\\n' }}{% endfor %}"
)
"""`model.chat_template: plain`, after what the tokenizer puts before a text: what a base model reads and continues."""


def load_tokenizer(model: Model) -> Tokenizer:
    """Load the tokenizer with the recipe's chat template, or else with its own; a vision model's is its processor's.

    Raises:
        RecipeError: The tokenizer is missing or has no chat template, or the recipe's cannot be read.
    """
    processor = load_processor_of(model)
    tokenizer = _tokenizer(model) if processor is None else processor.tokenizer
    if processor is not None and processor.chat_template is not None:
        tokenizer.chat_template = processor.chat_template
    if model.chat_template is not None:
        tokenizer.chat_template = _read_template(model.chat_template, tokenizer)
    tokenizer.clean_up_tokenization_spaces = False  # Llama 3's files ask to lose the space of `git add .`
    if tokenizer.chat_template is None:
        raise RecipeError(
            f"model.path {model.path!r} has a tokenizer without a chat template, so messages cannot be rendered; "
            "choose an instruction-tuned model, or set model.chat_template: plain"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if model.scores and tokenizer.pad_token_id in stop_ids(model, tokenizer):
        tokenizer.pad_token = _pad_token(model, tokenizer)
    return tokenizer


def _read_template(template: str, tokenizer: Tokenizer) -> str:
    """Return the text of `model.chat_template`; `plain` begins as the tokenizer begins a text, such as with <bos>.

    Raises:
        RecipeError: It names a file that cannot be read.
    """
    if template == "plain":
        text, encoded = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("a")
        begun = next((i for i in range(len(encoded)) if encoded[i : i + len(text)] == text), 0)
        start = tokenizer.decode(encoded[:begun])
        # some tokenizers write a space before what begins a text, but none after the text of a special token
        start += " " * (tokenizer.encode(f"{start} a", add_special_tokens=False) == encoded)
        return f"{{{{ {json.dumps(start)} }}}}{PLAIN_TEMPLATE}" if begun else PLAIN_TEMPLATE
    if "{{" in template or "{%" in template:
        return template
    expected = "expected `plain`, a template in Jinja, or the path of a file that holds one"
    if not os.path.isfile(template):
        raise RecipeError(f"model.chat_template is {show(template)}, {expected}; there is no such file")
    try:
        return Path(template).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise RecipeError(f"model.chat_template is {show(template)}, {expected}; it cannot be read: {error}") from error


def load_processor_of(model: Model) -> Processor | None:
    """Load the processor of a model that reads pictures; return None for a model of texts alone.

    Raises:
        RecipeError: It cannot be loaded.
    """
    if not reads_pictures(load_config(model)):
        return None
    return load_processor(source_of(model).tokenizer, model.trust_remote_code)


def load_vocabulary(model: Model) -> dict[str, int]:
    """Load the ids of all tokens; the tokenizer needs no chat template."""
    return _tokenizer(model).get_vocab()


def _tokenizer(model: Model) -> Tokenizer:
    from transformers import AutoTokenizer

    source = source_of(model)
    folder = source.tokenizer
    if os.path.isdir(folder) and not re.search(r"token|vocab|tekken|\.model\b", " ".join(os.listdir(folder))):
        # transformers would make a tokenizer without tokens
        raise UnavailableError(f"model.path {model.path!r} has no tokenizer; add its tokenizer.json and the like")
    with explained(model, source):
        tokenizer: Tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=model.trust_remote_code)
    return tokenizer


def _pad_token(model: Model, tokenizer: Tokenizer) -> str:
    """Return a padding token that ends no turn, since classifiers of transformers read the last non-padding token.

    Raises:
        RecipeError: The tokenizer has no such token.
    """
    ends = stop_ids(model, tokenizer)
    for token_id, token in sorted(tokenizer.added_tokens_decoder.items()):
        if token_id not in ends and getattr(token, "special", False):
            return str(token)
    raise RecipeError(
        f"model.path is {show(model.path)}, whose tokenizer has no special token besides those that end a turn, and "
        "a reward model needs one to pad with; add one as pad_token to the tokenizer's files"
    )


def load_policy(model: Model, seed: int = 0, empty: bool = False, frozen: bool = False) -> CausalLM:
    """Load a causal language model, or a classifier for `model.head: score`, with adapters if `model.lora` is set.

    Trained weights are float32, frozen weights have `model.dtype`. With `model.lora`, an adapter at `model.path` is
    trained further, and any other model gets new adapters. Without it, an adapter is merged.

    Args:
        model: The recipe's `model:`.
        seed: Seed of new adapters.
        empty: Whether to load no weights, because another rank sends them.
        frozen: Whether the model is not trained at all.

    Raises:
        RecipeError: The model cannot be loaded or has no such head, or an adapter's target names no module.
    """
    from transformers import AutoModelForCausalLM

    source = source_of(model)
    scores = model.scores
    if not scores and is_reward_model(model):
        alternative = "" if frozen else ", or set model.head: score to train it further"
        raise RecipeError(
            f"model.path is {show(model.path)}, a reward model, which predicts no tokens; choose a policy{alternative}"
        )
    loader = _Loader(AutoModelForCausalLM, model, empty)
    dtype = getattr(torch, model.dtype) if frozen or model.lora is not None else torch.float32
    if model.lora is not None and source.lora is not None and source.scores == scores:
        return loader.load(replace(source, lora=model.lora, quantization=model.quantization), dtype)
    policy = loader.load_merged(source, dtype)
    quantizer = getattr(policy, "hf_quantizer", None)
    if not frozen and model.lora is None and quantizer is not None and not quantizer.is_serializable():
        method = getattr(quantizer.quantization_config, "quant_method", "an unknown method")
        raise RecipeError(
            f"model.path is {show(model.path)}, quantized with {method}, which cannot be saved once it is trained; "
            "choose an unquantized model"
        )
    policy = loader.quantized(policy, model.quantization)
    if scores:
        policy = with_score_head(policy)
    if model.lora is not None:
        lora = language_targets(policy, model.lora, model.vision)
        return add_lora(policy, lora, seed, base_name(model.path), task_of(policy))
    return policy if model.vision.train else freeze_vision(policy)


def is_reward_model(model: Model) -> bool:
    """Whether `model.path` is a reward model, by its configuration."""
    return locate(model.path).scores or classifies(load_config(model).architectures)


def with_score_head(policy: CausalLM) -> CausalLM:
    """Return a model as a sequence classifier with one label; an existing head is kept, a new head is 0.

    Raises:
        RecipeError: transformers has no sequence classifier of this model type.
    """
    from transformers import AutoModelForSequenceClassification

    head = score_head(policy)
    if head is not None:
        head.float()
        return policy
    policy.config.num_labels = 1
    try:
        with torch.device("meta"):
            classifier: CausalLM = AutoModelForSequenceClassification.from_config(policy.config).eval()
    except ValueError as error:
        raise RecipeError(
            f"model.head is 'score', but transformers has no sequence classifier of type {policy.config.model_type}; "
            "choose another model"
        ) from error
    width = policy.config.get_text_config().hidden_size
    device = next(policy.parameters()).device
    head = nn.Linear(width, 1, bias=False, device=device)
    nn.init.zeros_(head.weight)
    setattr(classifier, classifier.base_model_prefix, policy.base_model)
    classifier.score = head
    classifier.config = policy.config
    return classifier


def task_of(policy: CausalLM) -> str:
    """Return peft's task type of a model."""
    return "CAUSAL_LM" if score_head(policy) is None else "SEQ_CLS"


def load_backbone(model: Model, seed: int = 0, empty: bool = False) -> tuple[CausalLM, nn.Linear | None]:
    """Load a model without its output layer; adapters of `model.path` are merged, and those of `model.lora` are new.

    Args:
        model: The recipe's `model:`.
        seed: Seed of new adapters.
        empty: Whether to load no weights, because another rank sends them.

    Returns:
        The model, and the head of a reward model.

    Raises:
        RecipeError: The model cannot be loaded, or an adapter's target names no module.
    """
    from transformers import AutoModel, AutoModelForCausalLM

    dtype = torch.float32 if model.lora is None else getattr(torch, model.dtype)
    source = locate(model.path)
    head = None
    plain = replace(model, lora=None)  # adapters at the path are merged, whatever their rank
    if is_reward_model(plain):
        classifier = with_score_head(_Loader(AutoModelForCausalLM, plain, empty).load_merged(source, dtype))
        backbone = backbone_of(classifier)
        head = score_head(classifier)
    elif source.base is None:
        backbone = _Loader(AutoModel, plain, empty).load_merged(source, dtype)
    else:
        backbone = backbone_of(_Loader(AutoModelForCausalLM, plain, empty).load_merged(source, dtype))
    if model.lora is not None:
        lora = language_targets(backbone, model.lora, model.vision)
        return add_lora(backbone, lora, seed, task="FEATURE_EXTRACTION"), head
    return backbone if model.vision.train else freeze_vision(backbone), head


@dataclass
class _Loader:
    """Loads a source and the models that it is based on.

    Args:
        auto_class: The class of models that are no sequence classifiers.
        model: The recipe's `model:`.
        empty: Whether to load no weights.
    """

    auto_class: AutoClass
    model: Model
    empty: bool

    def load(self, source: Source, dtype: torch.dtype) -> CausalLM:
        """Load a model; an adapter or a checkpoint is loaded into its base."""
        if source.base is None:
            return self._pretrained(source, dtype)
        policy = self.quantized(self.load_merged(source.base, dtype), source.quantization)
        if source.scores:
            policy = with_score_head(policy)
        if source.lora is not None:
            lora = language_targets(policy, source.lora, self.model.vision)
            base, task = base_name(source.base.location), task_of(policy)
            policy = add_lora(policy, lora, base=base, task=task, patterns=source.patterns)
        if self.empty:
            return policy
        if source.checkpoint:
            folder, _, name = source.location.rpartition("/")
            store = Store(folder)
            verify(store, name)
            load_checkpoint_alone(store, name, trainable("policy.policy", policy))
        else:
            load_adapter(policy, Path(source.location, ADAPTER_WEIGHTS))
        return policy

    def load_merged(self, source: Source, dtype: torch.dtype) -> CausalLM:
        """Load a model with its adapters merged in float32 and then rounded."""
        if source.base is None:
            return self._pretrained(source, dtype)
        if self.empty:
            return self.load_merged(source.base, dtype)
        policy = self.load(source, torch.float32)
        return cast_weights(merge_adapters(policy) if has_lora(policy) else policy, dtype)

    def quantized(self, policy: CausalLM, quantization: Quantization | None) -> CausalLM:
        """Quantize the linear layers of a text model besides its output layer; a vision tower stays as it is.

        Raises:
            RecipeError: bitsandbytes is not installed, or the model's layers are of another kind.
        """
        if quantization is None:
            return policy
        require_quantizable(policy, quantization)
        try:
            replace_layers(language_model(policy), nn.Linear, QuantizedLinear)
        except ImportError as error:
            remedy = extra_command("4bit")
            raise RecipeError(f"model.quantization is {quantization!r}: {error}: {remedy}") from error
        return policy

    def _pretrained(self, source: Source, dtype: torch.dtype) -> CausalLM:
        from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
        from transformers.utils import logging

        logging.disable_progress_bar()
        config = load_config(self.model)
        auto_class = self.auto_class
        if classifies(config.architectures):
            auto_class = AutoModelForSequenceClassification
            if config.num_labels != 1:
                raise RecipeError(
                    f"model.path is {show(self.model.path)}, a classifier with {config.num_labels} labels; a reward "
                    "model has 1"
                )
        elif auto_class is AutoModelForCausalLM:
            auto_class = auto_class_of(config)
        options: dict[str, object] = {"dtype": dtype, "trust_remote_code": self.model.trust_remote_code}
        if self.model.attention != "auto":
            options["attn_implementation"] = self.model.attention
        with explained(self.model, source):
            if self.empty:
                with torch.device("meta"):
                    return auto_class.from_config(config, **options).eval()
            # safetensors only: a pickle could run code
            options |= {"config": config, "use_safetensors": True, "output_loading_info": True}
            policy, report = auto_class.from_pretrained(source.location, **options)
        missing = sorted(report["missing_keys"])
        if missing:
            raise RecipeError(
                f"model.path is {show(self.model.path)}, whose files lack {counted(len(missing), 'weight')} of its "
                f"configuration, such as {missing[0]}, which would be random; correct its config.json, or add the files"
            )
        return policy.eval()


def cast_weights(policy: CausalLM, dtype: torch.dtype) -> CausalLM:
    """Round the weights but not the buffers: the rotary frequencies stay float32."""
    for parameter in policy.parameters():
        parameter.data = parameter.data.to(dtype)
    policy.config.dtype = dtype
    return policy


def require_quantizable(policy: CausalLM, quantization: Quantization | None) -> None:
    """Refuse a model, perhaps on the meta device, of which most weights would not be quantized.

    Raises:
        RecipeError: The model is one.
    """
    experts = experts_of(policy.config)
    if quantization is not None and (experts or getattr(policy, "hf_quantizer", None) is not None):
        problem = "experts, which would stay as they are" if experts else "files that are quantized already"
        raise RecipeError(f"model.quantization is {quantization!r}, but the model has {problem}; set it to null")


def stop_ids(model: Model, tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids that end a turn: those of the generation configuration, and the tokenizer's end token."""
    from transformers import GenerationConfig

    try:
        ids = GenerationConfig.from_pretrained(source_of(model).model).eos_token_id
    except OSError:  # a model without a generation configuration
        ids = load_config(model).get_text_config().eos_token_id
    end_ids = ids if isinstance(ids, list) else [ids]
    return frozenset(i for i in (*end_ids, tokenizer.eos_token_id) if i is not None)
