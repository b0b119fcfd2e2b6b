"""It learns, as a script from its README and for a tenant beside others."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from rlkit_tinker import AdamParams, Datum, ModelInput, SamplingParams, Service

README = Path(__file__).parents[1] / "README.md"


def test_the_lines_of_the_readme_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    [script] = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.S)
    assert len(script.splitlines()) <= 16
    (tmp_path / "script.py").write_text(script, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    runpy.run_path("script.py")
    assert capsys.readouterr().out.startswith(" is blue")
    assert (tmp_path / "blue-adapter" / "adapter_config.json").exists()
    assert list((tmp_path / "tinker").glob("*/weights/blue/state.json"))


@pytest.mark.slow
def test_two_tenants_learn_their_own_sentences() -> None:
    """Each token of a sentence to less than 0.05 nats on average; the same beginning goes on in two ways."""
    service = Service("tiny", max_adapters=2)
    clients = [service.create_training_client(rank=8, seed=i) for i in range(2)]
    sentences = [service.tokenizer.encode(text, add_special_tokens=False) for text in ("it is blue", "it is deep")]
    data = [
        Datum(ModelInput((0, *tokens[:-1])), {"target_tokens": tokens, "weights": [1 / len(tokens)] * len(tokens)})
        for tokens in sentences
    ]
    for step in range(150):
        rate = 5e-3 * (1 - step / 150)
        futures = [client.forward_backward([own], "cross_entropy") for client, own in zip(clients, data, strict=True)]
        for future in [client.optim_step(AdamParams(rate)) for client in clients]:
            assert future.result().metrics["grad_norm:mean"] > 0
        losses = [future.result().metrics["loss:sum"] for future in futures]
    assert max(losses) < 0.05
    samplers = [client.save_weights_and_get_sampling_client() for client in clients]
    beginning, greedy = ModelInput((0, *sentences[0][:6])), SamplingParams(max_tokens=4, temperature=0.0)
    answers = [sampler.sample(beginning, 1, greedy) for sampler in samplers]
    assert [answer.result().sequences[0].tokens for answer in answers] == [tokens[6:] for tokens in sentences]
