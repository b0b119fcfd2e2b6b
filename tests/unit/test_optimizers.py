"""Optimizers and schedules: steps by hand, what they refuse, and a resumed run that goes on bit for bit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import pytest
import torch
from rlkit_authors.models import random_model
from rlkit_inspect.footprint import optimizer_bytes
from rlkit_inspect.optimizer_state import state_bytes
from rlkit_optimizers.combined import Combined
from torch import nn

from rlkit.base.errors import PartError, RecipeError
from rlkit.interfaces.optimizer import Optimizer, Schedule, WeightGroup, WeightKind
from rlkit.models.lora import add_lora
from rlkit.models.size import size_of
from rlkit.optimizers import AdamW, Muon, TorchOptimizer
from rlkit.recipe import FSDP2, Fabric, Lora, Save, Train, check
from rlkit.run.checkpoint.state import tensors
from rlkit.schedules import Constant, Cosine, CosineRestarts, Linear, Polynomial, WarmupStableDecay
from rlkit.train.models import TrainableModule
from rlkit.train.optim import learning_rate, make_optimizer, set_learning_rate, weight_groups
from tests.unit.phases import recipe


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        (Constant(), [1 / 3, 2 / 3, 1, 1, 1, 1]),
        (Linear(), [1 / 3, 2 / 3, 1, 0.75, 0.5, 0.25]),
        (Linear(0.2), [1 / 3, 2 / 3, 1, 0.8, 0.6, 0.4]),  # 0.2 + 0.8 (1 - k/4)
        (Cosine(), [1 / 3, 2 / 3, 1, 0.853553, 0.5, 0.146447]),  # (1 + cos(pi k/4)) / 2
        (Cosine(0.5), [1 / 3, 2 / 3, 1, 0.926777, 0.75, 0.573223]),  # half of that, and 0.5
        (Cosine(num_cycles=1), [1 / 3, 2 / 3, 1, 0.5, 0, 0.5]),  # (1 + cos(2 pi k/4)) / 2
        (CosineRestarts(num_cycles=2), [1 / 3, 2 / 3, 1, 0.5, 1, 0.5]),  # two decays of two steps
        (Polynomial(), [1 / 3, 2 / 3, 1, 0.5625, 0.25, 0.0625]),  # (1 - k/4)^2
        (WarmupStableDecay(0.5, min_lr_ratio=0.2), [1 / 3, 2 / 3, 1, 1, 1, 0.6]),  # half of the last two steps
        (WarmupStableDecay(1.0, "1-sqrt"), [1 / 3, 2 / 3, 1, 0.5, 1 - 0.5**0.5, 1 - 0.75**0.5]),
    ],
)
def test_learning_rates_by_hand(schedule: Schedule, rates: list[float]) -> None:
    for warmup in ({"warmup_steps": 2}, {"warmup_ratio": 0.3}):  # ceil(0.3 * 6) = 2
        train = Train(steps=6, lr=1.0, schedule=schedule, **warmup)
        assert [learning_rate(train, step, 6) for step in range(1, 7)] == pytest.approx(rates, rel=1e-5)


@pytest.mark.parametrize("factor", [-0.1, float("nan"), "1", None])
def test_a_schedule_that_returns_no_factor_is_named(factor: Any) -> None:
    class Odd(Schedule):
        def factor(self, progress: float) -> float:
            return factor  # type: ignore[no-any-return]

    with pytest.raises(PartError, match=r"Odd of tests: `factor` returned .*, expected a finite number of 0 or more"):
        learning_rate(Train(steps=2, schedule=Odd()), 2, 2)


def test_adamw_by_hand() -> None:
    """The first update is lr * sign(g): 1 * (1 - 0.1 * 0.1) - 0.1 = 0.89 with decay, and 0.9 without."""
    matrix, vector = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    groups = [WeightGroup(WeightKind.MATRIX, [matrix], 0.1), WeightGroup(WeightKind.VECTOR, [vector], 0.0)]
    made = AdamW().make(groups, 0.1)
    matrix.grad, vector.grad = torch.full((2, 2), 0.5), torch.full((2,), -0.5)
    made.step()
    assert matrix.tolist() == [[pytest.approx(0.89)] * 2] * 2
    assert vector.tolist() == [pytest.approx(1.1)] * 2


def test_muon_makes_updates_orthogonal_at_the_size_of_adamw() -> None:
    """Newton-Schulz brings singular values to about 1 (0.7 to 1.2); the update is that times 0.2 sqrt(8) lr."""
    torch.manual_seed(0)
    matrix, vector = nn.Parameter(torch.zeros(8, 4)), nn.Parameter(torch.zeros(3))
    groups = [WeightGroup(WeightKind.MATRIX, [matrix], 0.0), WeightGroup(WeightKind.VECTOR, [vector], 0.0)]
    made = Muon().make(groups, 0.1)
    matrix.grad, vector.grad = torch.randn(8, 4), torch.tensor([1.0, -2.0, 3.0])
    made.step()
    sizes = torch.linalg.svdvals(matrix.detach()) / (0.1 * 0.2 * 8**0.5)
    assert ((sizes > 0.6) & (sizes < 1.3)).all()
    assert vector.tolist() == pytest.approx([-0.1, 0.1, -0.1], rel=1e-4)
    set_learning_rate(made, 0.0)
    before = matrix.detach().clone(), vector.detach().clone()
    made.step()
    assert torch.equal(matrix, before[0])
    assert torch.equal(vector, before[1])


def test_embeddings_and_heads_are_no_matrices_of_blocks() -> None:
    model = random_model("qwen2", tie_word_embeddings=False)
    groups = {group.kind: group for group in weight_groups(model, 0.1)}
    assert {kind: group.weight_decay for kind, group in groups.items()} == {
        WeightKind.MATRIX: 0.1, WeightKind.EMBEDDING: 0.1, WeightKind.VECTOR: 0.0
    }  # fmt: skip
    names = {id(weight): name for name, weight in model.named_parameters()}
    embeddings = {names[id(weight)] for weight in groups[WeightKind.EMBEDDING].weights}
    assert embeddings == {"model.embed_tokens.weight", "lm_head.weight"}
    assert all(".layers." in names[id(weight)] for weight in groups[WeightKind.MATRIX].weights)
    assert sum(len(group.weights) for group in groups.values()) == len(names)
    kinds = {type(one).__name__: len(one.param_groups) for one in make(model, Muon()).optimizers}  # type: ignore[attr-defined]
    assert kinds == {"Muon": 1, "AdamW": 2}


def make(model: nn.Module, optimizer: Optimizer) -> torch.optim.Optimizer:
    return make_optimizer(model, Train(steps=1, lr=0.01, weight_decay=0.1, optimizer=optimizer))


def run_of(model: nn.Module, made: torch.optim.Optimizer) -> Any:
    """Return what a checkpoint needs of a run."""
    fabric: Any = None  # nothing is computed
    policy = TrainableModule(model, model, SimpleNamespace(optimizer=made), 1.0, fabric, 1)
    models = SimpleNamespace(trained={"policy": policy}, critic=None, average=None, reference=None)
    return SimpleNamespace(
        models=models,
        recipe=SimpleNamespace(reference=None, save=Save()),
        data=SimpleNamespace(order=SimpleNamespace(by_outcome=None)),
    )


def steps(model: nn.Module, made: torch.optim.Optimizer, numbers: range) -> None:
    tokens = torch.arange(12).view(1, -1)
    for number in numbers:
        set_learning_rate(made, 0.01 / number)
        torch.nn.functional.cross_entropy(model(tokens).logits[0], tokens[0]).backward()
        made.step()
        made.zero_grad()


NAMES = get_args(get_type_hints(TorchOptimizer.__init__)["name"])
OPTIMIZERS = [
    AdamW(), Muon(), *map(TorchOptimizer, NAMES), TorchOptimizer("SGD", {"momentum": 0.9, "nesterov": True}),
    TorchOptimizer("RMSprop", {"momentum": 0.5, "centered": True}), TorchOptimizer("Adam", {"amsgrad": True}),
]  # fmt: skip


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=Optimizer.explain)
def test_a_checkpoint_brings_an_optimizer_back_bit_for_bit(optimizer: Optimizer) -> None:
    whole, other = random_model("qwen2", num_hidden_layers=1), random_model("qwen2", seed=1, num_hidden_layers=1)
    made, again = make(whole, optimizer), make(other, optimizer)
    steps(whole, made, range(1, 3))
    kept = {name: tensor.clone() for name, tensor in tensors(run_of(whole, made)).items()}
    for name, tensor in tensors(run_of(other, again), kept).items():
        tensor.copy_(kept[name])
    assert set(tensors(run_of(other, again))) == set(kept)
    steps(whole, made, range(3, 5))
    steps(other, again, range(3, 5))
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), other.parameters(), strict=True))
    assert any(not torch.equal(kept[f"policy.{name}"], tensor) for name, tensor in whole.named_parameters())


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=Optimizer.explain)
def test_the_memory_of_its_state_is_estimated_to_the_byte(optimizer: Optimizer) -> None:
    for lora in (None, Lora(rank=4)):
        model: Any = random_model("qwen2", num_hidden_layers=1, tie_word_embeddings=False)
        size = size_of(model.config, lora)
        model = model if lora is None else add_lora(model, lora)
        made = make(model, optimizer)
        steps(model, made, range(1, 2))
        assert optimizer_bytes(optimizer, size) == sum(state_bytes(state) for state in made.state.values())
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        assert sum(size.shapes.values()) == len(weights)
        if isinstance(optimizer, AdamW):  # two moments, and the number of steps
            assert optimizer_bytes(optimizer, size) == 4 * (2 * size.trained + len(weights))


def test_torch_optimizers_refuse_what_they_cannot_use() -> None:
    with pytest.raises(RecipeError, match=r"torch.optim.SGD refuses \{'betas': 1\}: .*unexpected keyword argument"):
        TorchOptimizer("SGD", {"betas": 1})
    with pytest.raises(RecipeError, match="refuses .*: Invalid momentum value: -1"):
        TorchOptimizer("SGD", {"momentum": -1.0})
    with pytest.raises(RecipeError, match="has the option 'lr', which is not its own; set train.lr"):
        TorchOptimizer("SGD", {"lr": 1.0})
    with pytest.raises(RecipeError, match="found no trainable matrix in a transformer block; choose AdamW"):
        Muon().make([WeightGroup(WeightKind.VECTOR, [torch.ones(1)], 0.0)], 0.1)


@pytest.mark.parametrize("strategy", ["fsdp2", FSDP2(tensor_parallel=2)])
def test_an_optimizer_of_full_weights_is_refused_with_shards(strategy: Any) -> None:
    whole, sharded = TorchOptimizer("Adafactor"), Fabric(strategy=strategy)
    with pytest.raises(RecipeError, match=r"^train.optimizer TorchOptimizer Adafactor\(\) needs full weights, .* ddp$"):
        check(recipe(train={"optimizer": whole}, fabric=sharded))
    check(recipe(train={"optimizer": whole}, fabric=Fabric(strategy="ddp")))
    check(recipe(train={"optimizer": Muon()}, fabric=sharded))


class Partial(Optimizer):
    def make(self, groups: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups[0].weights, lr)


class Counting(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight]["count"] = self.state[weight].get("count", 0) + 1


class Counts(Optimizer):
    def make(self, groups: Any, lr: float) -> torch.optim.Optimizer:
        return Counting([group.options() for group in groups], lr)


class Nothing(Optimizer):
    def make(self, groups: Any, lr: float) -> torch.optim.Optimizer:
        return None  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("optimizer", "problem"),
    [
        (Partial(), "`make` returned an optimizer of 1 weights, expected the 3 of all groups, each once"),
        (Counts(), "`make` returned an optimizer whose state has count=1, expected tensors, as a checkpoint holds"),
        (Nothing(), "`make` returned None, expected a torch.optim.Optimizer"),
    ],
)
def test_an_optimizer_that_cannot_be_trained_with_is_named(optimizer: Optimizer, problem: str) -> None:
    with pytest.raises(PartError) as error:
        make(nn.Linear(2, 2), optimizer)
    assert str(error.value).startswith(f"{type(optimizer).__name__} of tests: {problem} ({__file__}, line ")


def test_a_closure_is_refused() -> None:
    with pytest.raises(ValueError, match="takes no closure"):
        Combined([torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)]).step(lambda: 0)
