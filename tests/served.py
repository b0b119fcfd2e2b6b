"""What tests of real servers share, whatever the product: a trainer that stands still, and engines on one server."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Coroutine, Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import jsonschema
import pytest
import torch
from rlkit_authors.models import build_tokenizer
from rlkit_engine_torch.sampling import Truncation, truncate
from rlkit_inspect.docs import page
from rlkit_servers.api import ServerOutput
from rlkit_servers.engine import ServerEngine
from rlkit_servers.retry import ServerRetryPolicy
from rlkit_servers.server import InferenceServer
from rlkit_servers.states import ServerState
from rlkit_servers.transports import Transport
from rlkit_servers.update import finish, load, prepare
from torch import nn

from rlkit.base.errors import EngineError, RolloutError
from rlkit.interfaces import outputs
from rlkit.interfaces.engine import RolloutEngine
from rlkit.models.lora import add_lora, base_model
from rlkit.models.weights import PolicyWeights
from rlkit.ops.quantization import QuantizedLinear, replace_layers
from rlkit.recipe import Lora
from rlkit.testing import random_model
from rlkit.types import Completion, Request, SampleKey, Sampling, StopReason, Structure
from tests.candidates import logps_over_candidates
from tests.conftest import FAST, read_jsonl, rlkit_in_process

T = TypeVar("T")
RETRY = ServerRetryPolicy(request_seconds=300.0, start_seconds=300.0, hang_seconds=10.0)
CONTEXT = 510
"""The model's 512 tokens without the two that SGLang reserves."""
PROMPTS = [(5, 9, 200, 31), (7, 7, 7, 12, 99, 104, 32, 8, 45, 61, 3), (5, 9, 200, 31), (40,), tuple(range(3, 23))]


DISTILL = ("--recipe=quick_distill", *FAST, "--validation=null", "--reward=null", "--teacher.path=teacher")


class Trainer:
    """A policy, the runtime around it, and an event loop for the engine that serves it.

    Args:
        policy: The policy.
        sizes: Configuration values of the weights that `learn` replaces the policy's by.
    """

    def __init__(self, policy: Any, **sizes: int) -> None:
        self.policy = policy
        self.sizes = sizes
        self.version = 0
        self.runner = asyncio.Runner()
        self.runtime: Any = SimpleNamespace(
            policy=base_model(policy),
            tokenizer=build_tokenizer(),
            device=torch.device("cpu"),
            context=CONTEXT,
            stop_ids=frozenset({build_tokenizer().eos_token_id}),
            autocast=nullcontext,
            unsharded=nullcontext,
            tensor_parallel=1,
            reduce=lambda x: x,
            gather=lambda x: x,
            gather_world=lambda x: [x],
            broadcast_tp=lambda x: x,
            host_server=lambda command: None,
            logits=lambda tokens: self.runtime.policy(input_ids=tokens, use_cache=False).logits,
        )

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    def learn(self, seed: int) -> None:
        """Replace the weights."""
        weights = random_model("qwen2", seed=seed, **self.sizes).state_dict()
        self.policy.load_state_dict(weights)

    def publish(self, engine: RolloutEngine, bucket_bytes: int = 8192) -> None:
        self.version += 1
        self.wait(engine.sync(PolicyWeights(self.policy, bucket_bytes), self.version))

    def ask(self, engine: RolloutEngine, requests: list[Request]) -> list[Completion]:
        async def all_of_them() -> list[Completion]:
            return list(await asyncio.gather(*(engine.generate(r) for r in requests)))

        return self.wait(all_of_them())

    def greedy(self, prompt: tuple[int, ...], count: int) -> list[int]:
        """Return the tokens of transformers' own `generate`."""
        tokens = torch.tensor([prompt])
        attention = torch.ones_like(tokens)
        out = self.policy.generate(tokens, attention_mask=attention, max_new_tokens=count, do_sample=False)
        return out[0, len(prompt) :].tolist()

    def is_served_by(self, engine: RolloutEngine) -> bool:
        """Whether greedy completions equal those of transformers token for token, and have the current version."""
        answers = self.ask(engine, [request(p, temperature=0.0) for p in PROMPTS])
        assert all(v == self.version for a in answers for v in a.versions)
        return [a.tokens for a in answers] == [self.greedy(p, 24) for p in PROMPTS]


def adapted_policy(in_four_bits: bool, **sizes: int) -> Any:
    """Return a random model with adapters, over a base as it is or in 4 bits."""
    policy: Any = random_model("qwen2", **sizes)
    if in_four_bits:
        replace_layers(policy.model, nn.Linear, QuantizedLinear)
    return add_lora(policy, Lora(rank=4, alpha=8))


def documented_architectures(product: str = "") -> set[str]:
    """Return the classes of the architectures in the tables of tested models: those that a product has code for."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    lines = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in page("tested-models").splitlines()]
    [names] = [cells for cells in lines if "SGLang" in cells]
    rows = [dict(zip(names, cells, strict=True)) for cells in lines if len(cells) == len(names)]
    listed = [row for row in rows if row["architecture"] in CLASSES]
    return {CLASSES[row["architecture"]] for row in listed if not product or row[product] == "yes"}


def request(tokens: tuple[int, ...], sample: int = 0, session: str = "s", **sampling: Any) -> Request:
    return Request(tokens, Sampling(**{"max_tokens": 24, **sampling}), SampleKey(0, 1, "p", sample), session)


def children(pid: int) -> list[int]:
    """Return the ids of a process's children; its threads come and go meanwhile."""
    pids: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError):
            pids += map(int, file.read_text().split())
    return pids


def server_pid(engine: ServerEngine) -> int:
    """Return the process of the first server that an engine has started."""
    process = engine.fleet.owned[0].process
    assert process is not None
    assert process.supervised.supervisor is not None
    [pid] = children(process.supervised.supervisor.pid)
    return pid


def save_teacher(policy: Any, folder: Path, name: str = "teacher") -> None:
    """Save a policy, by default as the teacher of `DISTILL`."""
    policy.save_pretrained(folder / name)
    build_tokenizer().save_pretrained(folder / name)


def fit_structured_at(trainer: Trainer, engine: ServerEngine, folder: Path) -> None:
    """Run `fit` on structured answers of an engine's running server."""
    server = (f"--rollout.engine={type(engine).__name__}", f"--rollout.engine.urls=[{engine.fleet.owned[0].url}]")
    try:
        fit_structured(trainer.policy, folder, *server, "--rollout.engine.launch.structures=true")
    finally:
        trainer.publish(engine)


def fit_structured(policy: Any, folder: Path, *engine: str) -> None:
    """Run `fit`; its structured and truncated answers are valid, and the trainer agrees about their log-probs."""
    save_teacher(policy, folder, "policy")
    (folder / "reward.py").write_text("import zlib\n\ndef score(text):\n    return zlib.crc32(text.encode()) % 8 / 8\n")
    sampling = {"max_tokens": 60, "top_p": 0.9, "top_k": 6, "structure": {"json_schema": SCHEMA}}
    words = ("--recipe=quickstart", "--model.path=policy", *FAST, "--validation=null")
    reward = ("--reward=PythonReward", "--reward.function=reward.py:score", "--reward.allow_code=true")
    options = (f"--rollout.sampling={json.dumps(sampling)}", "--out=out")
    process = rlkit_in_process("fit", *words, *engine, *options, *reward, cwd=folder)
    assert process.returncode == 0, process.stderr
    rows = read_jsonl(folder / "out" / "metrics.jsonl")
    assert all(row["mismatch/mean"] < 1e-5 and row["mismatch/max"] < 1e-4 for row in rows), rows
    assert all(row["rollout/failed"] == row["engine/restarts"] == 0 for row in rows)
    assert any(row["grad_norm"] > 0 for row in rows)
    answers = [row for file in sorted((folder / "out" / "rollouts").glob("step-*")) for row in read_jsonl(file)]
    assert len(answers) == 2 * 16
    for row in answers:
        jsonschema.validate(json.loads(row["text"]), SCHEMA)
        counts = {len(ids) for ids, chosen in zip(row["candidates"], row["mask"], strict=True) if chosen}
        assert min(counts) == 1
        assert 1 < max(counts) <= 6


def served_as_loaded(folder: Path, url: str, loss: str, *words: str) -> list[dict[str, Any]]:
    """Check that a served teacher teaches as the saved one that a run loads; return the metrics of the served run."""
    runs = []
    for name, options in (("loaded", ()), ("served", (f'--teacher.urls=["{url}"]', *words))):
        process = rlkit_in_process("fit", *DISTILL, f"--loss={loss}", *options, f"--out={name}", cwd=folder)
        assert process.returncode == 0, process.stderr
        runs.append(read_jsonl(folder / name / "metrics.jsonl"))
    compared = {"teacher/kl", "advantage/abs_mean", "policy/loss", "policy/teacher_mass", "grad_norm"}
    for loaded, served in zip(*runs, strict=True):
        assert loaded["teacher/kl" if loss == "PolicyGradient" else "policy/divergence"] > 0.1
        assert loaded.keys() == served.keys()
        for metric in compared & loaded.keys():
            assert served[metric] == pytest.approx(loaded[metric], rel=1e-4), metric
    return runs[1]


@pytest.fixture
def second(trainer: Trainer, engine: Any) -> Iterator[Any]:
    """Return more engines on the same server, as if they had not started it."""
    engines: list[ServerEngine] = []

    def make(**options: Any) -> ServerEngine:
        server_engine: ServerEngine = type(engine)(urls=[engine.fleet.owned[0].url], retry=RETRY, **options)
        engines.append(server_engine)
        server_engine.bind(trainer.runtime)
        return server_engine

    yield make
    for server_engine in engines:
        server_engine.close()
    trainer.publish(engine)


def assert_restart_is_warned_of(run: Path) -> None:
    """Check that the restart of a server is one of a run's warnings."""
    warnings = json.loads((run / "result.json").read_text())["warnings"]
    assert [text for text in warnings if re.match("warning: .*could not answer.*; restarting it", text)], warnings


def candidate_counts(probs: torch.Tensor, sampling: Any, top_p_error: float) -> list[int]:
    """Return of how many tokens truncation leaves a probability, for each row of `probs` [N,V]."""
    limit = Truncation(torch.tensor([sampling.top_p + top_p_error]), torch.tensor([sampling.top_k]), torch.zeros(1))
    counts: list[int] = truncate(probs, limit).count_nonzero(-1).tolist()
    return counts


def changes_arrive_or_are_healed(
    trainer: Trainer, engine: ServerEngine, stray: Transport[Any], tolerance: float
) -> None:
    """Check that changes make servers compute the trainer's log-probs, and that full weights follow refused changes.

    Args:
        trainer: The trainer.
        engine: An engine that sends changes to one server; it is closed at the end.
        stray: A transport of the same kind, by which the server loses its version.
        tolerance: The largest accepted difference of log-probs, in nats.
    """
    try:
        engine.bind(trainer.runtime)
        trainer.learn(15)
        trainer.publish(engine)
        for number in range(3):
            change(trainer, number)
            trainer.publish(engine)
            assert trainer.is_served_by(engine)
            health = engine.health()
            assert (health["weight_gap"] < tolerance, health["full_syncs"]) == (True, 1)
            assert 0 < health["changed_share"] < 0.05
        [server] = engine.fleet.owned
        label = engine.weights.label(trainer.version)
        trainer.wait(prepare(server, stray, base=True))
        trainer.wait(load(server, stray, stray.prepare([])))
        trainer.wait(finish(server, stray, label, None))
        server.state = ServerState.READY
        change(trainer, 3)
        with pytest.warns(UserWarning, match="could not load a bucket"):
            trainer.publish(engine)
        assert trainer.is_served_by(engine)
        health = engine.health()
        assert (health["weight_gap"] < tolerance, health["restarts"], health["full_syncs"]) == (True, 1, 2)
    finally:
        engine.close()
        trainer.learn(16)


@torch.no_grad()
def change(trainer: Trainer, number: int) -> None:
    """Change a fiftieth of each tensor's elements."""
    for parameter in trainer.policy.parameters():
        parameter.view(-1)[number::50] += 0.3


def check_candidates(trainer: Trainer, engine: RolloutEngine, tolerance: float) -> None:
    """Check that truncated completions have the trainer's log-probs over the candidates that they return."""
    limits = [{"top_k": 5}, {"top_k": 40, "top_p": 0.9}, {"top_k": 40, "top_p": 0.5, "temperature": 0.7}]
    requests = [request(p, i, **options) for options in limits for i, p in enumerate(PROMPTS)]
    for asked, answer in zip(requests, trainer.ask(engine, requests), strict=True):
        assert outputs.of_engine(answer, asked, trainer.version, trainer.runtime.stop_ids) is None
        tokens = torch.tensor([[*asked.tokens, *answer.tokens]])
        logits = trainer.policy(input_ids=tokens).logits[0, len(asked.tokens) - 1 : -1]
        probs = (logits.double() / asked.sampling.temperature).softmax(-1)
        fewest, most = (candidate_counts(probs, asked.sampling, error) for error in (-1e-6, 1e-6))
        for row, ids in enumerate(answer.candidates):  # the likeliest tokens, up to the engine's rounding of 1e-6
            others = probs[row].clone().index_fill_(0, torch.tensor(ids), 0.0)
            assert probs[row, ids].min() >= others.max() - 1e-6
            assert len(set(ids)) == len(ids)
            assert fewest[row] <= len(ids) <= most[row]
        logps = logps_over_candidates(trainer.policy, asked, answer)
        assert (logps - torch.tensor(answer.logps)).abs().max() < tolerance


SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "integer", "minimum": 0, "maximum": 9999}, "unit": {"enum": ["m", "s", None]}},
    "required": ["answer", "unit"],
    "additionalProperties": False,
}


def check_structures(trainer: Trainer, engine: RolloutEngine) -> None:
    """Check that structured completions are valid, end, and have the trainer's log-probs over their candidates."""
    tokenizer, yes_no = trainer.runtime.tokenizer, Structure(regex="(yes|no)!?")
    asked = [
        request(PROMPTS[i % 5], i, str(i), structure=Structure(json_schema=SCHEMA), top_k=(300, 300, 4)[i % 3],
                temperature=(1.0, 0.7)[i % 2], top_p=(1.0, 0.9)[i // 60], max_tokens=60)
        for i in range(80)
    ]  # fmt: skip
    asked += [request(PROMPTS[i % 5], i, str(i), structure=yes_no, top_k=9) for i in range(20)]
    for r, answer in zip(asked, trainer.ask(engine, asked), strict=True):
        text = tokenizer.decode(answer.tokens[:-1])
        assert answer.stop is StopReason.STOP
        assert outputs.of_engine(answer, r, trainer.version, trainer.runtime.stop_ids) is None
        if r.sampling.structure == yes_no:
            assert re.fullmatch("(yes|no)!?", text)
            assert set(answer.candidates[0]) == set(tokenizer.encode("yn", add_special_tokens=False))
        else:
            value = json.loads(text)
            assert text == json.dumps(value)
            jsonschema.validate(value, SCHEMA)
        logps = logps_over_candidates(trainer.policy, r, answer)
        assert (logps - torch.tensor(answer.logps)).abs().max() < 1e-4
    [greedy] = trainer.ask(engine, [request(PROMPTS[0], temperature=0.0, structure=yes_no)])
    logits = trainer.policy(input_ids=torch.tensor([PROMPTS[0]])).logits[0, -1]
    first = logits[tokenizer.encode("yn", add_special_tokens=False)]
    assert tokenizer.decode(greedy.tokens)[0] == "yn"[int(first.argmax())]
    assert greedy.logps[0] == pytest.approx(first.log_softmax(-1).max().item(), abs=1e-4)
    with pytest.raises(RolloutError, match="answered 400: .*(unclosed group|regex parse error)"):
        trainer.ask(engine, [request(PROMPTS[0], structure=Structure(regex="("))])
    with pytest.raises(EngineError, match="has stop texts and a structure"):
        trainer.ask(engine, [replace(request(PROMPTS[0], structure=yes_no), resumed=2)])


@pytest.fixture
def killing(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Kill the server of a request in the second step of 64 sessions of three turns; return how many it had."""
    ask, in_flight = InferenceServer.ask, []
    asked = 0

    async def deadly(server: InferenceServer, request: Request) -> ServerOutput:
        nonlocal asked
        asked += 1
        if asked != 3 * 64 + 100:
            return await ask(server, request)
        assert server.process is not None
        [pid] = children(server.process.supervised.supervisor.pid)
        os.kill(pid, signal.SIGSTOP)
        answer = asyncio.ensure_future(ask(server, request))
        await asyncio.sleep(0.2)  # the request is at the server, which cannot answer it
        in_flight.append(server.assigned)
        os.kill(pid, signal.SIGKILL)
        return await answer

    monkeypatch.setattr(InferenceServer, "ask", deadly)
    return in_flight
