"""Files that are about to be published: what in them seems to be a credential, by file, line and kind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rlkit_policy.scan import suspicions
from safetensors.torch import save_file

GITHUB = "ghp_abcDEF0123456789"


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("README.md", f"a\n{GITHUB}", "README.md, line 2: a key or token (GitHub)"),
        ("README.md", "http://me:pw@host/x", "README.md, line 1: a login in a URL"),
        ("README.md", "http://host/x?sig=abc", "README.md, line 1: the query of a URL"),
        ("README.md", "DB_PASSWORD=hunter2hunter2", "README.md, line 1: a variable or option"),
        ("a/config.json", '{"api_key": "hunter2hunter2"}', "a/config.json, line 1: a field"),
        ("tokenizer.json", f'{{"{GITHUB}": 1}}', "tokenizer.json, line 1: a key or token (GitHub)"),
        ("modeling.py", 'API_KEY = "hunter2hunter2"', "modeling.py, line 1: a variable or option"),
        ("weights.bin", f"\0\1{GITHUB}", "weights.bin, line 1: a key or token (GitHub)"),
        ("config.json", '{"x": "of my environment"}', "config.json, line 1: the value of the variable MY_TOKEN"),
    ],
)
def test_credentials_are_named(
    name: str, text: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "of my environment")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
    assert list(suspicions(tmp_path)) == [expected]


def test_metadata_of_tensors_are_scanned(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(1)}, tmp_path / "model.safetensors", metadata={"source": f"x {GITHUB}"})
    (tmp_path / "empty.safetensors").touch()
    assert list(suspicions(tmp_path)) == ["model.safetensors (metadata): a key or token (GitHub)"]


def test_what_exports_hold_is_no_credential(tmp_path: Path) -> None:
    tokens = {"eos_token": "<|im_end|>", "pad_token": "[PAD]", "bos_token": None, "unk_token": "unknown"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(tokens))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"//a:b@": 1, "password=abcdefgh": 2}))
    (tmp_path / "tokenization.py").write_text("def f(bos_token=bos_token, token=None): pass  # http://h/?page=2")
    (tmp_path / "README.md").write_text("url: http://${RLKIT_URL_LOGIN}@h/?${RLKIT_URL_QUERY} or http://***@h/?***")
    assert list(suspicions(tmp_path)) == []


def test_a_file_that_is_too_large_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlkit_policy.scan.MAX_BYTES", 2**20)
    (tmp_path / "model.bin").write_bytes(bytes(2**20 + 1))
    assert list(suspicions(tmp_path)) == ["model.bin: more than 1 MiB, which are not scanned"]
