"""Whether routes are replayed, and what they change: old log-probs and updates, not the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from rlkit_engine_vllm import VllmServer
from rlkit_servers.engine import ServerEngine

from rlkit.base.errors import RecipeError
from rlkit.engines import Recorded, SGLangServer, TorchEngine
from rlkit.interfaces.engine import RolloutEngine
from rlkit.interfaces.fields import Field
from rlkit.models.actor import Actor
from rlkit.ops.logps import DEFAULT_READS
from rlkit.ops.routes import ROUTES, Routers
from rlkit.recipe import Fabric, Model, Recipe
from rlkit.run.preflight.plan import replay
from rlkit.testing import FakeEngine, random_model
from rlkit.train.metrics import Meter
from rlkit.train.replay import replay_problem, require_replay, start_replay
from tests.flow.test_architectures import KINDS
from tests.unit.phases import LocalRanks, Trained, compute_logps, context, recipe, scored, update_models


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders with the configurations of a mixture of experts and of a dense model."""
    folder = tmp_path_factory.mktemp("models")
    for kind in ("qwen3_moe", "llama"):
        random_model(kind, **KINDS[kind]).config.save_pretrained(folder / kind)
    return {kind: str(folder / kind) for kind in ("qwen3_moe", "llama")}


def run_of(path: str, engine: RolloutEngine, setting: object = "auto", precision: Any = "32-true") -> Recipe:
    made = recipe(model=Model(path), train={"router_replay": setting}, fabric=Fabric(precision=precision))
    return replace(made, rollout=replace(made.rollout, engine=engine))


def test_auto_replays_what_can_differ(paths: dict[str, str]) -> None:
    mixture = paths["qwen3_moe"]
    cases = (
        (run_of(mixture, SGLangServer()), None),
        (run_of(mixture, SGLangServer(), False), "train.router_replay is false"),
        (run_of(paths["llama"], SGLangServer()), "the model has no experts"),
        (run_of(mixture, FakeEngine()), "FakeEngine does not return them"),
        (run_of(mixture, Recorded(SGLangServer())), "this recipe samples nothing"),
        (run_of(mixture, TorchEngine()), "TorchEngine and the trainer select the same experts in float32"),
        (run_of(mixture, TorchEngine(), "auto", "bf16-mixed"), None),
        (run_of(mixture, TorchEngine(), True), None),
    )
    for made, problem in cases:
        assert replay_problem(made) == problem
        if made.train.router_replay is not True:
            require_replay(made)  # auto and false are never refused
        how = f"not replayed: {problem}" if problem else f"replayed as {type(made.engine).__name__} selects them"
        lines = list(replay(made))
        is_silent = made.model.path == paths["llama"] or isinstance(made.engine, Recorded)
        assert lines == [] if is_silent else lines[0].startswith(f"experts: {how}")


def test_the_device_that_is_planned_for_decides(paths: dict[str, str]) -> None:
    made = run_of(paths["qwen3_moe"], VllmServer(), True)
    assert next(replay(made, on_gpu=True)).startswith("experts: replayed as VllmServer selects them, if the model's")
    assert "needs a GPU" in next(replay(made, on_gpu=False))


@pytest.mark.parametrize(
    ("kind", "engine"), [("llama", SGLangServer()), ("qwen3_moe", FakeEngine()), ("qwen3_moe", Recorded())]
)
def test_replay_that_is_asked_for_and_impossible_is_refused(
    paths: dict[str, str], kind: str, engine: RolloutEngine
) -> None:
    with pytest.raises(RecipeError, match=r"train.router_replay is true, but .*; set it to false or auto"):
        require_replay(run_of(paths[kind], engine, True))


def test_the_engine_declares_what_it_returns(paths: dict[str, str]) -> None:
    engine: ServerEngine = SGLangServer()
    made = run_of(paths["qwen3_moe"], engine)
    notes: list[str] = []
    start_replay(made, Actor(random_model("qwen3_moe", **KINDS["qwen3_moe"])), notes.append)
    assert engine.routers == Routers((0, 1), 2, 4, 2)
    assert made.sampled_fields == {ROUTES: Field(ROUTES, dtype="uint8", shape=(2, 2))}
    off = run_of(paths["qwen3_moe"], SGLangServer(), False)
    start_replay(off, Actor(random_model("qwen3_moe", **KINDS["qwen3_moe"])), notes.append)
    assert off.engine.routers is None
    assert off.sampled_fields == {}
    assert notes == []


def test_routers_without_topk_are_named(paths: dict[str, str]) -> None:
    """Phi-3.5-MoE's router selects one expert after another."""
    other = Actor(random_model("phimoe", num_local_experts=4, num_experts_per_tok=2))
    made, notes = run_of(paths["qwen3_moe"], SGLangServer()), list[str]()
    start_replay(made, other, notes.append)
    assert notes == ["experts: not replayed: PhimoeForCausalLM has no routers that select by topk"]
    assert made.engine.routers is None
    with pytest.raises(RecipeError, match="is true, but PhimoeForCausalLM has no routers that select by topk"):
        start_replay(run_of(paths["qwen3_moe"], SGLangServer(), True), other, notes.append)


def test_old_log_probs_and_updates_follow_the_routes() -> None:
    """Experts 1 and 2 for each token, whatever the router would choose."""
    module = Actor(random_model("qwen3_moe", **KINDS["qwen3_moe"]))
    made = context(recipe(train={"epochs": 2, "steps": 4}))
    made.models.policy, made.models.actor = Trained(module), module
    routes = torch.tensor([1, 2], dtype=torch.uint8).expand(4, 4, 2, 2)
    field = Field(ROUTES, dtype="uint8", shape=(2, 2))
    batch = scored(fields={ROUTES: routes}, declared={ROUTES: field})
    with torch.no_grad():
        replayed = module(batch.tokens, batch.mask, 1.0, DEFAULT_READS._replace(expert_routes=routes)).logps
        live = module(batch.tokens, batch.mask).logps
    compute_logps(made, batch)
    assert batch.old_logps is not None
    torch.testing.assert_close(batch.old_logps, replayed)
    assert (replayed - live).abs().max() > 0.1
    module.passes.take_replayed()
    batch.advantages = torch.tensor([1.0, -1.0, 2.0, -2.0])[:, None] * batch.mask
    meter = Meter()
    update_models(made, batch, 1, meter)
    metrics = meter.result(LocalRanks())  # type: ignore[arg-type]
    assert 0 < metrics["router/differs"] <= 1
