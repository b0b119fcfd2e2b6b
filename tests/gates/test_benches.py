"""Benches and tests of a GPU, which no suite runs: what they import from this repository is there."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.gates.trees import tree_of

FOLDERS = (ROOT, *ROOT.glob("plugins/*/src"))
OURS = ("rlkit", "tests")


def absent_imports(tree: ast.Module) -> Iterator[str]:
    """Yield what `from … import` statements take from modules of this repository, and these do not have."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or node.module is None or not node.module.startswith(OURS):
            continue
        names = names_of(node.module)
        yield from (f"{node.module}.{alias.name}" for alias in node.names if names is None or alias.name not in names)


class Everything(frozenset[str]):
    """The names of a module that makes them when they are asked for."""

    def __contains__(self, name: object) -> bool:
        return True


def names_of(module: str) -> frozenset[str] | None:
    """Return the names at the top of a module, with its submodules; None if there is no such module."""
    bases = [folder / module.replace(".", "/") for folder in FOLDERS]
    files = [file for base in bases for file in (base.with_suffix(".py"), base / "__init__.py") if file.exists()]
    folders = [base for base in bases if base.is_dir()]
    if not files and not folders:
        return None
    names = {child.stem for folder in folders for child in folder.iterdir()}
    for node in (node for file in files for node in ast.walk(tree_of(file))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in node.names)
    return Everything() if not names.isdisjoint({"__getattr__", "*"}) else frozenset(names)


@pytest.mark.parametrize("folder", ["bench", "gpu"])
def test_what_no_suite_runs_imports_what_is_there(folder: str) -> None:
    absent = {
        str(path.relative_to(ROOT)): names
        for path in Path(ROOT, "tests", folder).rglob("*.py")
        if (names := list(absent_imports(tree_of(path))))
    }
    assert absent == {}


def test_an_import_of_what_is_not_there_is_found() -> None:
    lines = (
        "from rlkit.types import Score, Absent\nfrom rlkit.gone import Score\nfrom rlkit.engines import TorchEngine\n"
    )
    assert list(absent_imports(ast.parse(lines))) == ["rlkit.types.Absent", "rlkit.gone.Score"]
