"""A learned reward model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

from rlkit.base.deadlines import in_thread
from rlkit.base.errors import RecipeError
from rlkit.base.files import looks_local
from rlkit.base.names import StopText
from rlkit.base.ranges import Count, PositiveInt, Seconds
from rlkit.base.text import tokens_until
from rlkit.interfaces.reward import OnError, RewardManager
from rlkit.types import Message, Score, Trajectory

if TYPE_CHECKING:
    from torch import Tensor

    from rlkit.interfaces.runtime import Runtime


class ModelReward(RewardManager):
    """The output of a sequence classifier with one label, on the run's device or in a pool (`placement:`).

    The full conversation, including the messages of tools and users, is rendered with the classifier's own tokenizer
    and chat template, which may differ from the policy's; without a template it is plain text. The classifier runs in
    its own thread, one prompt after another; waiting for it counts towards no timeout.

    Args:
        path: A folder or a name on the Hugging Face hub with weights as safetensors, or the folder of a run that
            trained a reward model (`model.head: score`).
        per_turn: Whether to score the conversation at the end of each turn of the policy, as a process reward model
            does. The outputs are the rewards of the turns, and the conversation has no other reward.
        step: A text that ends a step of the policy's turns, such as an empty line; null for none. The conversation is
            scored after each step, and the outputs are the rewards of the steps' last tokens: it has no other reward.
        batch_size: Conversations per forward pass.
        max_length: Maximum tokens, or those that the model and its tokenizer state if these are fewer; longer
            conversations are truncated at their start.
        dtype: Type of the weights.
        timeout: Seconds for the samples of one prompt.
        on_error: What happens to a group with a failed score.
    """

    components = ()

    def __init__(
        self,
        path: str,
        batch_size: Count = 16,
        max_length: PositiveInt = 4096,
        *,
        per_turn: bool = False,
        step: StopText | None = None,
        dtype: Literal["float32", "bfloat16"] = "float32",
        timeout: Seconds = 600.0,
        on_error: OnError = "drop",
    ) -> None:
        if per_turn and step is not None:
            raise RecipeError(f"ModelReward has per_turn: true and step: {step!r}, expected one of them")
        self.path = path
        self.per_turn = per_turn
        self.step = step
        self.dtype = dtype
        self.batch_size = batch_size
        self.max_length = max_length
        self.timeout = timeout
        self.on_error = on_error
        self._thread: ThreadPoolExecutor | None = None

    def files(self) -> list[tuple[str, str]]:
        return [("path", self.path)] if looks_local(self.path) else []

    def effect(self) -> str:
        return f"loads {self.path}"

    def bind(self, runtime: Runtime) -> None:
        from transformers import AutoConfig, AutoTokenizer

        from rlkit.distributed.offload import use_device
        from rlkit.models.config import context_length

        with _loading(self.path) as location:
            self._tokenizer = AutoTokenizer.from_pretrained(location, truncation_side="left")
            config = AutoConfig.from_pretrained(location, trust_remote_code=False)
        self._length = min(self.max_length, context_length(config), self._tokenizer.model_max_length)
        self._runtime = runtime
        self._outputs_of = runtime.placed_classifier(self.path, self.dtype) or self._load(runtime)
        self._thread = ThreadPoolExecutor(1, "rlkit-model-reward", use_device, (runtime.device,))

    def _load(self, runtime: Runtime) -> Callable[[Mapping[str, Tensor]], Tensor]:
        """Load the classifier on the run's device; return the function from its inputs to its outputs [B]."""
        import torch

        classifier = load_classifier(self.path, self.dtype).to(runtime.device)

        def outputs(inputs: Mapping[str, Tensor]) -> Tensor:
            moved = {name: tensor.to(runtime.device) for name, tensor in inputs.items()}
            with torch.no_grad(), runtime.autocast():
                result: Tensor = classifier(**moved).logits[:, 0].float()
            return result

        return outputs

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    async def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        if self._thread is None:
            raise RuntimeError("ModelReward cannot score before `bind` is called")
        return await in_thread(self._thread, partial(self._score, trajectories))

    def _score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """Score conversations, in the model's own thread."""
        if self.step is not None:
            return self._score_steps(trajectories, self.step)
        if not self.per_turn:
            return [Score(reward) for reward in self._outputs([t.messages for t in trajectories])]
        prefixes = [list(_up_to_turns(t)) for t in trajectories]
        rewards = iter(self._outputs([messages for row in prefixes for messages in row]))
        return [Score(0.0, turn_rewards=list(islice(rewards, len(row)))) for row in prefixes]

    def _score_steps(self, trajectories: Sequence[Trajectory], step: str) -> list[Score]:
        steps = [list(self._up_to_steps(trajectory, step)) for trajectory in trajectories]
        outputs = iter(self._outputs([messages for row in steps for messages, _ in row]))
        scores = []
        for trajectory, row in zip(trajectories, steps, strict=True):
            rewards = [0.0] * trajectory.response_length
            for _, end in row:
                rewards[end - 1] = next(outputs)
            scores.append(Score(0.0, token_rewards=rewards))
        return scores

    def _up_to_steps(self, trajectory: Trajectory, step: str) -> Iterator[tuple[list[Message], int]]:
        """Yield the conversation up to each step's end, and the number of the policy's tokens until there."""
        decode = partial(self._runtime.tokenizer.decode, skip_special_tokens=True)
        turns = [turn for turn in trajectory.turns if turn.role == "assistant"]
        before = 0
        for turn, messages in zip(turns, _up_to_turns(trajectory), strict=True):
            tokens = trajectory.tokens[turn.start : turn.end]
            for end in _step_ends(tokens, step, decode):
                cut = {**messages[-1], "content": decode(tokens[:end])}
                yield (messages if end == len(tokens) else [*messages[:-1], cut]), before + end
            before += len(tokens)

    def _outputs(self, conversations: Sequence[Sequence[Message]]) -> list[float]:
        """Return the model's outputs for conversations."""
        texts = [self._render(messages) for messages in conversations]
        rewards: list[float] = []
        for start in range(0, len(texts), self.batch_size):
            batch = self._tokenizer(
                texts[start : start + self.batch_size],
                return_tensors="pt",
                padding=True,
                truncation=True,
                max_length=self._length,
                add_special_tokens=self._tokenizer.chat_template is None,
            )
            rewards += self._outputs_of(batch).tolist()
        return rewards

    def _render(self, messages: Sequence[Message]) -> str:
        if self._tokenizer.chat_template is None:
            return "\n\n".join(str(m["content"]) for m in messages)
        rendered: str = self._tokenizer.apply_chat_template(list(messages), tokenize=False)
        return rendered


@contextmanager
def _loading(path: str) -> Iterator[str]:
    """Yield where a classifier's files are, and explain why they cannot be loaded.

    Raises:
        RecipeError: They cannot be loaded, or are no full model.
    """
    from rlkit.models.source import locate

    source = locate(path)
    if source.base is not None:
        raise RecipeError(
            f"ModelReward has path={path!r}, {source}, expected a full model; write one with rlkit export "
            f"--checkpoint {path} --out DIR" + (" --merge-lora" if source.lora is not None else "")
        )
    try:
        yield source.location
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise RecipeError(f"ModelReward has path={path!r}, which cannot be loaded: {reason}") from error


def load_classifier(path: str, dtype: str) -> Any:
    """Load a sequence classifier with one label.

    Raises:
        RecipeError: It cannot be loaded, or has several labels.
    """
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    with _loading(path) as location:
        model = AutoModelForSequenceClassification.from_pretrained(  # safetensors only: a pickle could run code
            location, dtype=getattr(torch, dtype), use_safetensors=True, trust_remote_code=False
        )
        if model.config.pad_token_id is None:
            model.config.pad_token_id = AutoTokenizer.from_pretrained(location).pad_token_id
    if model.config.num_labels != 1:
        raise RecipeError(f"ModelReward has path={path!r} with {model.config.num_labels} labels, expected 1")
    return model.eval().requires_grad_(False)


def _step_ends(tokens: Sequence[int], step: str, decode: Callable[[Sequence[int]], str]) -> list[int]:
    """Return the number of tokens up to the end of each step; a turn without text after its last step ends with it."""
    ends: list[int] = []
    count: int | None = 0
    while count is not None:
        start = ends[-1] if ends else 0
        count = tokens_until(tokens[start:], [step], decode)
        if count is not None:
            ends.append(start + count)
    if ends and not decode(tokens[ends[-1] :]).strip():
        ends.pop()
    return [*ends, len(tokens)]


def _up_to_turns(trajectory: Trajectory) -> Iterator[list[Message]]:
    """Yield the conversation up to and including each turn of the policy."""
    for i in range(len(trajectory.prompt.messages), len(trajectory.messages)):
        if trajectory.messages[i]["role"] == "assistant":
            yield trajectory.messages[: i + 1]
