"""It learns, as a script from its README and for a tenant beside others."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from rlkit_tinker import AdamParams, Datum, ModelInput, SamplingParams, Service

README = Path(__file__).parents[1] / "README.md"


def test_the_lines_of_the_readme_run(tmp_path: Path) -> None:
    [script] = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.S)
    assert len(script.splitlines()) <= 16
    command = (sys.executable, "-W", "ignore", "-c", script)
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(" is blue")
    assert (tmp_path / "blue-adapter" / "adapter_config.json").exists()
    assert list((tmp_path / "tinker").glob("*/weights/blue/state.json"))


@pytest.mark.slow
def test_two_tenants_learn_their_own_maps() -> None:
    """From letters to letters, to less than 0.05 nats; each answers by its own map, though prompts are equal."""
    service = Service("tiny", max_adapters=2)
    clients = [service.create_training_client(rank=8, seed=i) for i in range(2)]
    maps = [{i: (i * 7 + shift) % 26 for i in range(26)} for shift in (3, 11)]
    letters = [service.tokenizer.encode(chr(97 + i), add_special_tokens=False)[0] for i in range(26)]
    data = [
        [
            Datum(ModelInput((5, letters[i])), {"target_tokens": [0, letters[own[i]]], "weights": [0.0, 1 / 26]})
            for i in own
        ]
        for own in maps
    ]
    for _ in range(120):
        futures = [client.forward_backward(own, "cross_entropy") for client, own in zip(clients, data, strict=True)]
        steps = [client.optim_step(AdamParams(5e-3)) for client in clients]
        losses = [future.result().metrics["loss:sum"] for future in futures]
        assert all(step.result().metrics["grad_norm:mean"] > 0 for step in steps)
    assert max(losses) < 0.05
    greedy = SamplingParams(max_tokens=1, temperature=0.0)
    for client, own in zip(clients, maps, strict=True):
        sampler = client.save_weights_and_get_sampling_client()
        futures = [sampler.sample(ModelInput((5, letters[i])), 1, greedy) for i in own]
        answers = [future.result().sequences[0].tokens[0] for future in futures]
        assert answers == [letters[own[i]] for i in own]
