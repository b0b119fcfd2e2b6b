"""What a server samples, from which weights and for which callers; HttpEngine in runs."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import pickle
import re
import signal
import time
from array import array
from collections import Counter
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from aiohttp.test_utils import TestClient, TestServer
from rlkit_authors.models import build_tokenizer
from rlkit_engine_http import HttpApi, HttpEngine
from rlkit_engine_http.engine import SharedFiles
from rlkit_engine_http.server import SamplingServer, ServerRuntime, application, read_request
from rlkit_servers.api import ServerOutput
from rlkit_servers.http import Client, Fault
from safetensors.torch import load_file, save_file

from rlkit.base.errors import RecipeError
from rlkit.engines import TorchEngine
from rlkit.testing import random_model
from rlkit.types import Request, SampleKey, Sampling, Structure
from tests import forks
from tests.conftest import FAST, ROOT, read_jsonl, rlkit, write_plugin
from tests.events import Gate, until

T = TypeVar("T")
SECRET = "not to be guessed"
PROMPTS = [(5, 9, 200, 31), (7, 7, 7, 12, 99, 104, 32, 8, 45, 61, 3), (40,)]


def request(tokens: tuple[int, ...], sample: int = 0, **sampling: Any) -> Request:
    return Request(tokens, Sampling(**{"max_tokens": 24, **sampling}), SampleKey(3, 1, "p", sample), "s")


def torch_engine(policy: Any, tokenizer: Path | None = None) -> TorchEngine:
    engine = TorchEngine()
    engine.bind(ServerRuntime(policy, 512, torch.device("cpu"), tokenizer))  # type: ignore[arg-type]
    return engine


def server(policy: Any, tokenizer: Path | None = None) -> SamplingServer:
    return SamplingServer(torch_engine(policy, tokenizer), policy)


async def calls(
    policy: Any, secret: str = SECRET, tokenizer: Path | None = None
) -> tuple[TestClient[Any, Any], HttpApi]:
    """Return a server, and an api that calls it with a secret."""
    client = TestClient(TestServer(application(server(policy, tokenizer), SECRET)))
    await client.start_server()
    return client, HttpApi(Client(str(client.make_url("")), {"Authorization": f"Bearer {secret}"}))


@pytest.fixture(scope="module")
def policy() -> Any:
    return random_model("qwen2").eval()


@pytest.mark.parametrize("pauses", [0, 5])
def test_samples_are_those_of_torch_engine(
    policy: Any, pauses: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over HTTP, with and without pauses: tokens, stop reasons, candidates and, except for noise, log-probs."""
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    asked = [request(p, i, temperature=0.9, top_k=50, stop_ids=(8, 9)) for i, p in enumerate(PROMPTS * 4)]
    options = {"structure": Structure(regex="([a-d][0-9]){6}"), "stop_ids": (tokenizer.eos_token_id,)}
    asked += [request(p, i, top_k=12, top_p=0.9, **options) for i, p in enumerate(PROMPTS * 4)]

    async def run() -> None:
        client, api = await calls(policy, tokenizer=tmp_path)
        steps = Gate(monkeypatch, step=0).rows
        await api.client.post("/continue", {"label": "run-3"}, 60.0)
        asking = asyncio.gather(*map(api.generate, asked))
        await until(lambda: bool(steps))
        for _ in range(pauses):
            await asyncio.sleep(0.01)
            await api.client.post("/pause", {}, 60.0)
            await api.client.post("/continue", {"label": "run-3"}, 60.0)
        outputs = await asking
        engine = torch_engine(policy, tmp_path)
        plain = await asyncio.gather(*map(engine.generate, asked))
        for answer, completion in zip(outputs, plain, strict=True):
            assert answer.tokens == completion.tokens
            assert answer.logps == pytest.approx(completion.logps, abs=1e-5)
            assert answer.labels == ["run-3"] * len(completion.tokens)
            assert answer.stopped == (completion.stop == "stop")
            assert answer.candidates == completion.candidates
        texts = [tokenizer.decode(answer.tokens[:-1]) for answer in outputs[12:]]
        assert all(re.fullmatch("([a-d][0-9]){6}", text) for text in texts)
        assert len({tuple(answer.tokens) for answer in outputs}) == len(asked)
        api.client.close()
        await client.close()

    asyncio.run(run())


def test_a_pause_splits_a_completion_between_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes during the third decode step: the old weights have then sampled four tokens."""
    old, new = random_model("qwen2", seed=1).eval(), random_model("qwen2", seed=2).eval()
    save_file(dict(new.named_parameters()), tmp_path / "new.safetensors")
    uninterrupted = request(PROMPTS[0], max_tokens=40)

    async def run() -> ServerOutput:
        serving = server(old)
        gate = Gate(monkeypatch, step=3)
        serving.resume("run-0")
        asked = asyncio.create_task(serving.generate(uninterrupted))
        await until(gate.entered.is_set)
        pausing = asyncio.create_task(serving.pause())
        await asyncio.sleep(0)
        gate.opened.set()
        await pausing
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(asked), 0.1)
        serving.load(str(tmp_path / "new.safetensors"))
        serving.resume("run-1")
        return await asked

    answer = asyncio.run(run())
    assert answer.labels == ["run-0"] * 4 + ["run-1"] * 36
    before, *_ = asyncio.run(together(random_model("qwen2", seed=1).eval(), request(PROMPTS[0], max_tokens=4)))
    continued = request((*PROMPTS[0], *before), max_tokens=36)
    after, *_ = asyncio.run(together(new, continued))
    assert answer.tokens == [*before, *after]


async def together(policy: Any, *requests: Request) -> list[list[int]]:
    engine = torch_engine(policy)
    return [completion.tokens for completion in await asyncio.gather(*map(engine.generate, requests))]


def test_probes_are_the_trainers_log_probs(policy: Any) -> None:
    async def run() -> list[ServerOutput]:
        client, api = await calls(policy)
        await api.client.post("/continue", {"label": "run-0"}, 60.0)
        outputs = await api.probe(PROMPTS, 3, 60.0)
        api.client.close()
        await client.close()
        return outputs

    for row, answer in zip(PROMPTS, asyncio.run(run()), strict=True):
        assert answer.tokens[: len(row) - 1] == list(row[1:])
        tokens = torch.tensor([[row[0], *answer.tokens]])
        logps = torch.log_softmax(policy(tokens).logits[0, :-1].float(), -1)
        assert answer.tokens[-3:] == logps[-3:].argmax(-1).tolist()
        expected = logps.gather(-1, tokens[0, 1:, None]).squeeze(-1)
        assert answer.logps == pytest.approx(expected.tolist(), abs=1e-5)


class Touch:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_calls_without_the_secret_and_hostile_ones_are_refused(policy: Any, tmp_path: Path) -> None:
    pickled, ran = tmp_path / "weights.safetensors", tmp_path / "ran"
    pickled.write_bytes(pickle.dumps(Touch(ran)))
    save_file({"lm_head.weight": torch.zeros(2, 2)}, tmp_path / "small.safetensors")
    save_file({"other": torch.zeros(2)}, tmp_path / "other.safetensors")
    good = {
        "key": [0, 1, "p", 0, 0],
        "max_tokens": 4,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "stop_ids": [],
        "structure": None,
        "continues": False,
    }
    refused = [
        ("/generate", {**good, "tokens": [5], "structure": {"pattern": "a"}}, "TypeError"),
        ("/generate", {**good, "tokens": [5], "structure": "a"}, "TypeError"),
        ("/generate", {**good, "tokens": []}, "expected 1 or more"),
        ("/generate", {**good, "tokens": [5], "max_tokens": 0}, "expected 1 or more"),
        ("/generate", {**good, "tokens": [5], "key": "x"}, "ValueError"),
        ("/generate", {}, "KeyError"),
        ("/generate", [], "TypeError"),
        ("/weights", {"file": str(pickled)}, "SafetensorError"),
        ("/weights", {"file": str(tmp_path / "small.safetensors")}, r"expected \[\d+, \d+\]"),
        ("/weights", {"file": str(tmp_path / "other.safetensors")}, "expected none"),
        ("/weights", {"file": str(tmp_path / "absent")}, "FileNotFoundError"),
    ]

    async def run() -> None:
        client, api = await calls(policy)
        for path, body, words in refused:
            with pytest.raises(Fault, match=rf"answered 400: .*{words}"):
                await api.client.post(path, body, 60.0)
        for stranger in (Client(api.client.url), Client(api.client.url, {"Authorization": f"Bearer {SECRET}x"})):
            for path in ("/generate", "/weights", "/pause", "/none"):
                with pytest.raises(Fault, match="answered 403: .*the secret is missing or wrong"):
                    await stranger.post(path, {}, 60.0)
            with pytest.raises(Fault, match="answered 403"):
                await stranger.get("/health", 60.0)
            stranger.close()
        await api.client.post("/continue", {"label": "run-0"}, 60.0)
        with pytest.raises(Fault, match="while the server samples; pause it first"):
            await api.client.post("/weights", {"file": str(tmp_path / "small.safetensors")}, 60.0)
        await api.health(5.0)
        api.client.close()
        await client.close()

    asyncio.run(run())
    assert not ran.exists()


def test_a_request_survives_its_way() -> None:
    asked = request(
        (5, 6), 7, temperature=0.5, top_p=0.9, top_k=3, min_p=0.1, stop_ids=(1, 2), structure=Structure(regex="a+")
    )
    sent: list[Any] = []

    class Recorder:
        async def post(self, path: str, body: Any, deadline: float) -> Any:
            sent.append(json.loads(json.dumps(body)))
            body = {"tokens": [7], "logps": [-0.5], "labels": ["run-0"], "stopped": True}
            return body | {"candidates": [[7, 9]]}

    answer = asyncio.run(HttpApi(Recorder()).generate(asked))  # type: ignore[arg-type]
    assert answer == ServerOutput([7], [-0.5], ["run-0"], True, candidates=[array("i", [7, 9])])
    received = read_request(sent[0])
    assert (received.tokens, received.sampling, received.key) == (asked.tokens, asked.sampling, asked.key)


def test_a_structure_that_cannot_be_followed_is_refused(policy: Any, tmp_path: Path) -> None:
    build_tokenizer().save_pretrained(tmp_path)

    async def run() -> None:
        client, api = await calls(policy, tokenizer=tmp_path)
        await api.client.post("/continue", {"label": "run-0"}, 60.0)
        with pytest.raises(Fault, match="answered 400: .*structure is invalid"):
            await api.generate(request(PROMPTS[0], structure=Structure(regex="(")))
        api.client.close()
        await client.close()

    asyncio.run(run())
    with pytest.raises(RecipeError, match="llguidance cannot follow it"):
        HttpEngine().check_structure(Structure(regex="("))


def test_changes_arrive_exactly_and_those_of_others_are_refused(tmp_path: Path) -> None:
    trained, served = (random_model("qwen2", seed=seed).bfloat16().eval() for seed in (1, 2))
    weights = {name: x.detach() for name, x in trained.named_parameters()}
    transport = SharedFiles()
    assert transport.sent is not None
    sent, sizes = transport.sent, []

    async def push(api: HttpApi, label: str) -> None:
        sent.begin(label, await api.weight_version() == sent.label)
        await api.client.post("/pause", {}, 60.0)
        for item in weights.items():
            await transport.load(api, transport.prepare([item]))
        sent.end()
        await api.client.post("/continue", {"label": label}, 60.0)
        sizes.append(sent.bytes)

    async def run() -> None:
        client, api = await calls(served)
        for number in range(3):
            await push(api, f"run-{number}")
            weights["lm_head.weight"][number, :2] *= -2
        for name, parameter in served.named_parameters():
            weights["lm_head.weight"][2, :2] *= -0.5 if name == "lm_head.weight" else 1
            assert torch.equal(parameter, weights[name])
        sent.begin("run-3", shared=True)
        file = transport.prepare([("lm_head.weight", weights["lm_head.weight"])])
        await api.client.post("/pause", {}, 60.0)
        await transport.load(api, file)
        with pytest.raises(Fault, match=r"answered 400: .*changes to run-3 ended as run-3 without \['model\."):
            await api.client.post("/continue", {"label": "run-3"}, 60.0)
        await api.client.post("/pause", {}, 60.0)
        with pytest.raises(Fault, match="answered 400: .*these are changes of run-2, but the weights are unknown"):
            await transport.load(api, file)
        sent.abandon()
        await push(api, "run-4")
        assert all(torch.equal(parameter, weights[name]) for name, parameter in served.named_parameters())
        api.client.close()
        await client.close()

    asyncio.run(run())
    transport.close()
    full = sum(x.numel() * 2 for x in weights.values())
    assert sizes == [full, 2 * (4 + 2), 2 * (4 + 2), full]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of a folder where HttpEngine is installed."""
    folder = tmp_path_factory.mktemp("site")
    source = "from rlkit_engine_http import *\nfrom rlkit_engine_http import rlkit_register\n"
    write_plugin(folder, "engine_http", source)
    return os.pathsep.join((str(folder), str(ROOT / "plugins" / "rlkit-engine-http" / "src"), str(ROOT)))


def sampled(out: Path) -> list[Any]:
    """Return the tokens, versions and rewards of a run's conversations."""
    files = sorted((out / "rollouts").glob("step-*.jsonl.gz"))
    rows = [json.loads(line) for file in files for line in gzip.decompress(file.read_bytes()).splitlines()]
    return [(row["tokens"], row["versions"], row["reward"]) for row in rows]


@pytest.mark.slow
def test_runs_sample_the_same_tokens_with_either_engine(site: str, tmp_path: Path) -> None:
    for name, options in (("TorchEngine", ()), ("HttpEngine", ("--rollout.engine.servers=2",))):
        words = ("--recipe=quickstart", *FAST, f"--rollout.engine={name}", *options, f"--out={name}")
        process = rlkit("fit", *words, cwd=tmp_path, site=site)
        assert process.returncode == 0, process.stderr
    samples = sampled(tmp_path / "HttpEngine")
    assert len(samples) == 2 * 4 * 4
    assert samples == sampled(tmp_path / "TorchEngine")
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("TorchEngine", "HttpEngine")]
    assert results[0]["validation"] == results[1]["validation"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "gap"),
    [
        (("--model.lora.rank=4", "--train.lr=1e-2"), 1e-3),
        (("--model.dtype=bfloat16",), 0.3),
        (("--fabric.precision=bf16-mixed",), 0.3),
    ],
    ids=["lora", "bfloat16", "bf16-mixed"],
)
def test_a_server_samples_from_the_policy_that_is_trained(
    options: tuple[str, ...], gap: float, site: str, tmp_path: Path
) -> None:
    words = ("--recipe=quickstart", *FAST, "--rollout.engine=HttpEngine", *options, "--out=out")
    process = rlkit("fit", *words, cwd=tmp_path, site=site)
    assert process.returncode == 0, process.stderr
    for row in read_jsonl(tmp_path / "out" / "metrics.jsonl"):
        assert row["mismatch/max"] < gap
        assert row["rollout/failed"] == row["engine/restarts"] == 0


@pytest.mark.slow
def test_ranks_share_servers(site: str, tmp_path: Path) -> None:
    words = ("--recipe=quickstart", *FAST, "--rollout.engine=HttpEngine", "--fabric.devices=2", "--out=out")
    process = rlkit("fit", *words, cwd=tmp_path, site=site)
    assert process.returncode == 0, process.stderr
    for row in read_jsonl(tmp_path / "out" / "metrics.jsonl"):
        assert row["engine/servers"] == 1
        assert row["mismatch/max"] < 1e-3
        assert row["rollout/failed"] == row["engine/retried"] == 0


AHEAD = (
    "--recipe=quick_tool", "--rollout.engine=HttpEngine", "--rollout.max_staleness=2", "--correction.high=2.0",
    "--train.prompts_per_step=4", "--rollout.group_size=4", "--log.rollouts.limit=null", "--validation.before=false",
    "--validation.after=false", "--validation.every=2", "--validation.limit=8", "--validation.samples=1",
)  # fmt: skip


def check_ahead(out: Path, steps: int) -> list[Any]:
    """Check that each prompt was trained on once, no token was too old, versions only grow, and validations have one.

    Returns:
        All conversations.
    """
    files = [sorted(out.glob(f"rollouts/step-{number:05d}*.jsonl.gz")) for number in range(1, steps + 1)]
    rows = [[row for file in of_ranks for row in read_jsonl(file)] for of_ranks in files]
    for number, step in enumerate(rows, 1):
        for row in step:
            versions = [v for v in row["versions"] if v >= 0]
            assert versions == sorted(versions)
            assert number - 1 - 2 <= versions[0] <= versions[-1] <= number - 1
    prompts = Counter(row["prompt"] for step in rows for row in step)
    assert prompts == dict.fromkeys(prompts, 4)
    assert len(prompts) == 4 * steps
    for number in range(2, steps + 1, 2):
        answers = read_jsonl(out / f"rollouts/validation-{number:05d}.jsonl.gz")
        assert {v for row in answers for v in row["versions"] if v >= 0} == {number}
    return [row for step in rows for row in step]


@pytest.mark.slow
def test_sampling_goes_on_while_the_trainer_learns(site: str, tmp_path: Path) -> None:
    """Weights arrive in the middle of conversations, and of turns."""
    words = (*AHEAD, "--train.steps=8", "--rollout.lead=2", "--out=out")
    process = rlkit("fit", *words, cwd=tmp_path, site=site)
    assert process.returncode == 0, process.stderr
    rows = check_ahead(tmp_path / "out", 8)
    assert any(len(set(row["versions"]) - {-1}) > 1 for row in rows)
    for row in read_jsonl(tmp_path / "out" / "metrics.jsonl"):
        assert row["staleness/max"] <= 2
        assert row["rollout/failed"] == row["engine/retried"] == row["engine/stale"] == 0


@pytest.mark.slow
def test_without_a_lead_samples_are_those_of_the_synchronous_run(site: str, tmp_path: Path) -> None:
    """Token for token. Log-probs, and so weights, depend on what else was in a server's batch, as in two synchronous
    runs: which requests arrive together depends on the clock."""
    for name, ahead in (("sync", ("--rollout.max_staleness=0",)), ("ahead", ("--rollout.lead=0",))):
        process = rlkit("fit", *AHEAD, "--train.steps=3", *ahead, f"--out={name}", cwd=tmp_path, site=site)
        assert process.returncode == 0, process.stderr
    assert sampled(tmp_path / "sync") == sampled(tmp_path / "ahead")
    synchronous, ahead_weights = (
        load_file(tmp_path / name / "final" / "model.safetensors") for name in ("sync", "ahead")
    )
    distances = torch.cat([(weight - ahead_weights[name]).abs().flatten() for name, weight in synchronous.items()])
    assert float((distances > 1e-5).float().mean()) < 0.01  # where a gradient is about 0, Adam amplifies its noise


@pytest.mark.slow
@pytest.mark.parametrize("signals", [1, 2])
def test_a_run_interrupted_in_flight_resumes(site: str, tmp_path: Path, signals: int) -> None:
    """After the step in progress, or at once."""
    words = (*AHEAD, "--train.steps=8", "--rollout.lead=2", "--save.every=1", "--out=out")
    run = started(site, tmp_path, *words)
    try:
        server = serving(run.pid)
        for _ in range(signals):
            run.send_signal(signal.SIGINT)
            time.sleep(0.05)
        assert run.wait(60) == 130
    finally:
        run.kill()
    assert not Path(f"/proc/{server}").exists()
    assert json.loads((tmp_path / "out" / "result.json").read_text())["status"] == "interrupted"
    process = rlkit("fit", "--resume=out", cwd=tmp_path, site=site)
    assert process.returncode == 0, process.stderr
    check_ahead(tmp_path / "out", 8)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_a_server_dies_while_groups_run_ahead(site: str, tmp_path: Path, devices: int) -> None:
    """At any point of the run; all ranks sync it together, and its unfinished requests are repeated."""
    words = (*AHEAD, "--train.steps=12", "--rollout.lead=2", f"--fabric.devices={devices}", "--out=out")
    rows = fit_and_hit(site, tmp_path, signal.SIGKILL, *words)
    assert rows[-1]["engine/restarts"] == 1
    assert sum(row["rollout/failed"] for row in rows) == 0
    check_ahead(tmp_path / "out", 12)


def fit_and_hit(site: str, folder: Path, number: signal.Signals, *words: str) -> list[Any]:
    """Run `fit`, send its server a signal after step 3, and return the metrics."""
    run = started(site, folder, *words)
    try:
        os.kill(serving(run.pid), number)
        assert run.wait(200) == 0
    finally:
        run.kill()
    return read_jsonl(folder / "out" / "metrics.jsonl")


def started(site: str, folder: Path, *words: str) -> forks.Started:
    """Start a run, and return it after three steps."""
    run = forks.start(("-m", "rlkit", "fit", *words), folder, site=site)
    metrics = folder / "out" / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 3:
        assert run.poll() is None
        time.sleep(0.02)
    return run


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_run_goes_on_when_its_server_dies_or_hangs(site: str, tmp_path: Path, number: signal.Signals) -> None:
    words = ("--recipe=quickstart", *FAST, "--train.steps=12", "--rollout.engine=HttpEngine", "--out=out")
    rows = fit_and_hit(site, tmp_path, number, *words, "--rollout.engine.retry.hang_seconds=3")
    assert len(rows) == 12
    assert rows[-1]["engine/restarts"] == 1
    assert sum(row["rollout/failed"] for row in rows) == 0
    assert all(row["mismatch/max"] < 1e-3 for row in rows)


@pytest.mark.slow
def test_servers_get_changes_and_replaced_ones_full_weights(site: str, tmp_path: Path) -> None:
    words = ("--recipe=quickstart", *FAST, "--train.steps=6", "--train.lr=1e-6", "--fabric.precision=bf16-mixed")
    rows = fit_and_hit(
        site, tmp_path, signal.SIGKILL, *words, "--rollout.engine=HttpEngine", "--rollout.engine.servers=2", "--out=out"
    )
    assert rows[-1]["engine/restarts"] == 1
    assert (rows[0]["engine/full_syncs"], rows[-1]["engine/full_syncs"]) == (1, 2)
    for row in (*rows[:2], rows[-1]):
        assert 0 < row["engine/changed_share"] < 0.05
        assert row["engine/sync_bytes"] < 100_000
    assert all(row["mismatch/max"] < 0.3 and row["rollout/failed"] == 0 for row in rows)


def children(pid: int) -> list[str]:
    return [child for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()]


def serving(pid: int) -> int:
    """Return the pid of the server among a process's descendants."""
    for child in map(int, children(pid)):
        words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        if b"rlkit_engine_http" in words and not any(word.endswith(b"supervisor.py") for word in words):
            return child
        descendant = serving(child)
        if descendant:
            return descendant
    return 0
