"""Which of the tested models SGLang implements: what the page on them says."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

from tests.served import documented_architectures


def test_sglang_has_code_for_the_listed_models() -> None:
    """Its modules are read, since some of them cannot be imported without a GPU."""
    package = find_spec("sglang")
    assert package is not None
    assert package.submodule_search_locations is not None
    implemented = set()
    for path in Path(package.submodule_search_locations[0], "srt", "models").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EntryClass":
                implemented.update(name.id for name in ast.walk(node.value) if isinstance(name, ast.Name))
    assert len(documented_architectures()) >= 24
    assert documented_architectures() & implemented == documented_architectures("SGLang")
