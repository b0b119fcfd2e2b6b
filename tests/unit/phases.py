"""What the tests of phases share: modules whose log-probs are worked out by hand, and ranks without processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from rlkit.advantages import GRPO
from rlkit.interfaces.callback import TrainingBatch
from rlkit.losses import PolicyGradient
from rlkit.models.packing import PackedPasses
from rlkit.ops.logps import ALL
from rlkit.ops.random import RowNoise
from rlkit.recipe import Model, Recipe, Rollout, Train
from rlkit.rewards import ExactReward
from rlkit.tasks import Arithmetic
from rlkit.testing import FakeEngine
from rlkit.train import logps, update
from rlkit.train.callbacks import Callbacks
from rlkit.train.credit import RewardTransforms
from rlkit.train.metrics import Meter
from rlkit.train.setup import TrainContext
from rlkit.train.update import MiniBatch, Term
from rlkit.types import Batch, PolicyOutput, Reads, RolloutBatch, Sampling, TrainBatch


class Line(nn.Module):
    """A policy with one weight: the log-prob of a token is `weight * token / temperature`, its entropy `weight`."""

    passes = PackedPasses(None)

    def __init__(self, weight: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight))
        self.seen: list[tuple[list[list[int]], float]] = []

    def forward(
        self,
        tokens: Tensor,
        mask: Tensor,
        temperature: float = 1.0,
        reads: Reads = ALL,
        *,
        noise: RowNoise | None = None,
        media: object = None,
    ) -> PolicyOutput:
        self.seen.append((tokens.tolist(), temperature))
        logps = self.weight * tokens * mask / temperature
        squares = 0.25 * self.weight.detach() * mask if reads.squares else None
        return PolicyOutput(logps, self.weight * mask if reads.entropy else None, squares)


class Values(nn.Module):
    """A critic with one weight: the value before a token is `weight * token`; counts the tokens under the mask."""

    passes = PackedPasses(None)

    def __init__(self, weight: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight))
        self.valued = 0

    def forward(self, tokens: Tensor, mask: Tensor, media: object = None) -> Tensor:
        self.valued += int(mask.sum())
        return self.weight * tokens * mask


class Trained:
    """A module with plain gradient descent at a rate of 1, which notes what is done with it."""

    max_grad_norm = 1.0

    def __init__(self, module: Any) -> None:
        self.inner = self.module = module
        self.optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        self.events: list[str] = []

    @contextmanager
    def accumulating(self, more: bool) -> Iterator[None]:
        self.events.append("pass" if more else "last pass")
        yield
        self.events.append("end")

    def backward(self, loss: Tensor) -> None:
        self.events.append("backward")
        loss.backward()  # type: ignore[no-untyped-call]

    def clip_gradients(self) -> Tensor:
        self.events.append("clip")
        return torch.stack([p.grad.norm() for p in self.module.parameters()]).norm()

    def flops(self, lengths: Tensor, chosen: int) -> float | None:
        return 1e12 * (int(lengths.sum()) + 100 * chosen)

    @property
    def weight(self) -> float:
        return float(self.module.weight.detach())


@dataclass
class LocalRanks:
    """The first of `count` ranks, all of which have the same."""

    count: int = 1
    index: int = 0
    lead: bool = True
    sequence_parallel: int = 1
    sequence: None = None

    @property
    def fabric(self) -> Any:
        return SimpleNamespace(autocast=nullcontext, device=torch.device("cpu"), world_size=2 * self.count)

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        return x * self.count

    def all_reduce_max(self, value: float) -> float:
        return value

    def gather_dp(self, value: Any) -> list[Any]:
        return [value] * self.count

    def broadcast_tp(self, value: Any) -> Any:
        return value

    def exchange(self, outgoing: Sequence[list[Any]]) -> list[Any]:
        return outgoing[self.index] * self.count


def recipe(**changes: Any) -> Recipe:
    """Make a recipe of two prompts a step; `train` takes changes by name."""
    train = {"steps": 4, "prompts_per_step": 2, "lr": 0.5, **changes.pop("train", {})}
    sampling = Sampling(temperature=changes.pop("temperature", 1.0), max_tokens=8)
    made = Recipe(
        model=Model("tiny"),
        task=Arithmetic(),
        rollout=Rollout(engine=FakeEngine(), group_size=2, sampling=sampling),
        reward=ExactReward(),
        advantage=GRPO(),
        loss=PolicyGradient(),
        train=Train(**train),
    )
    return replace(made, **changes)


def context(made: Recipe, ranks: LocalRanks | None = None, critic: Any = None, reference: Any = None) -> Any:
    """Make the context of a recipe around a `Line`."""
    policy = Trained(Line())
    models = SimpleNamespace(policy=policy, actor=policy.inner, critic=critic, reference=reference, average=None)
    models.teachers, models.pools = {}, None
    transforms = RewardTransforms(made.shaping, made.kl_reward)
    local: Any = ranks or LocalRanks()
    service: Any = SimpleNamespace(version=1, recipe=made, ranks=local, actor=models.actor)
    limit = made.train.max_tokens_per_micro_batch
    data: Any = SimpleNamespace(recipe=made, token_limit=16384 if limit == "auto" else limit)
    data.vocabularies = data.teacher_prompts = None
    return TrainContext(made, data, local, models, service, transforms, Callbacks([], local, print))


def compute_logps(made: Any, batch: RolloutBatch) -> None:
    """Compute what a run's recipe needs of a batch's log-probs and values."""
    logps.compute_logps(made.data, made.models, made.ranks, batch)


def update_policy(made: Any, mini_batch: MiniBatch, meter: Meter, mixtures: Sequence[Term | None] = ()) -> None:
    """Make an optimizer step of a run's policy."""
    update.update_policy(made.data, made.models.policy, made.service, mini_batch, meter, mixtures=mixtures)


def update_critic(made: Any, batch: TrainBatch, rows: list[int], meter: Meter) -> None:
    """Make an optimizer step of a run's critic on some rows."""
    update.update_critic(made.data, made.models.critic, made.ranks, MiniBatch(batch, rows), meter)


def update_models(made: Any, batch: Batch, step: int, meter: Meter) -> TrainBatch:
    """Update a run's models in a step."""
    return update.update_models(made.data, made.models, made.service, TrainingBatch(step, batch), meter)


TOKENS = ((1, 2, 3, 0), (1, 4, 0, 0), (1, 5, 1, 2), (1, 3, 2, 0))
"""Four answers, the first token of each being the prompt; groups 0, 0, 1, 1."""
LENGTHS = (3, 2, 4, 3)


def scored(**fields: Any) -> Batch:
    """Make a batch of four rows with rewards of 1, 0, 0, 1."""
    tokens = torch.tensor(TOKENS)
    attention = torch.arange(4) < torch.tensor(LENGTHS)[:, None]
    mask = attention & (torch.arange(4) > 0)
    rewards = torch.zeros(4, 4)
    rewards[torch.arange(4), torch.tensor(LENGTHS) - 1] = torch.tensor([1.0, 0.0, 0.0, 1.0])
    return replace(
        Batch(
            tokens=tokens,
            attention=attention,
            mask=mask,
            rollout_logps=-0.5 * mask,
            group=torch.tensor([0, 0, 1, 1]),
            versions=torch.where(mask, 0, -1),
            token_rewards=rewards,
            rewards=rewards.sum(-1),
            components=torch.zeros(4, 0),
        ),
        **fields,
    )


def ready(**fields: Any) -> TrainBatch:
    """Make the same with advantages of 1, -1, 2, -2 for the rows."""
    batch = scored()
    batch.advantages = torch.tensor([1.0, -1.0, 2.0, -2.0])[:, None] * batch.mask
    return replace(TrainBatch.of(batch), **fields)
