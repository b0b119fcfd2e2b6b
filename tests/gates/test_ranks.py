"""Ranks agree by name: collectives are in `rlkit.distributed`, and no rank comes to one by what it alone knows."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.gates.collectives import Collectives, Source, names_of
from tests.gates.trees import SHIPPED

LOCAL = {"get_rank", "get_world_size", "is_available", "is_initialized"}
"""What `torch.distributed` answers without asking anybody."""

FABRICS = ("barrier", "broadcast", "all_gather", "all_reduce")
COLLECTIVE = re.compile(
    rf"^torch\.distributed\.(?!{'|'.join(LOCAL)})\w+$|fabric\.({'|'.join(FABRICS)})$|\.full_tensor$"
)
CALLED = {*FABRICS, "full_tensor"}

DATA = ("torch.distributed.tensor", "torch.distributed.checkpoint")
"""Modules that define types, beside collectives."""

COLLECTIVE_DATA = {"save", "load", "async_save", "distribute_tensor", "full_tensor"}


def read(path: Path) -> Source:
    relative = path.relative_to(ROOT)
    room = "engines" if relative.parts[0] == "plugins" else relative.parts[1].removesuffix(".py")
    return Source(str(relative), room, path.read_text(encoding="utf-8"))


@cache
def sources() -> list[Source]:
    return [read(path) for path in sorted(SHIPPED)]


def public(room: str, owner: str) -> set[str]:
    """Return the public methods of a class."""
    [found] = [
        node
        for node in ast.walk(ast.parse((ROOT / room).read_text(encoding="utf-8")))
        if getattr(node, "name", "") == owner
    ]
    return {f.name for f in ast.walk(found) if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef)} - {"__init__"}


METHODS = public("rlkit/distributed/ranks.py", "Ranks") | public("rlkit/distributed/ranks.py", "SideGroup")


def of_torch(source: Source) -> list[str]:
    """Return what a file outside of `rlkit.distributed` takes of `torch.distributed`, or of Fabric, to call it."""
    found = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom) and (module := str(node.module)).startswith("torch.distributed"):
            names = {alias.name for alias in node.names}
            found += sorted(names & COLLECTIVE_DATA if module.startswith(DATA) else names - LOCAL)
        elif isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.startswith("torch.distributed")]
        elif isinstance(node, ast.Attribute) and (names_of(node)[:1] == ["torch"] or node.attr in CALLED):
            name = ast.unparse(node)
            found += [name] if COLLECTIVE.search(name) else []
    return found


def test_collectives_are_called_by_name() -> None:
    outside = [source for source in sources() if source.room != "distributed"]
    wrong = [f"{source.path}: {name}" for source in outside for name in of_torch(source)]
    assert not wrong, "call these in rlkit/distributed/, under a name of Ranks or of a function there"


def test_no_rank_comes_to_a_collective_by_what_it_alone_knows() -> None:
    """A guard that all ranks have alike is known by its names, or else says why: `# agreed: REASON`.

    The names are in `AGREED`, of `tests/gates/collectives.py`; what is computed of them alone is agreed too.
    """
    assert not list(Collectives(sources(), METHODS).problems())


@pytest.mark.parametrize(
    "line",
    [
        "import torch.distributed as dist",
        "from torch.distributed import all_reduce",
        "from torch.distributed.checkpoint.state_dict_saver import save",
        "torch.distributed.broadcast(x, 0)",
        "self.fabric.barrier()",
        "path = fabric.broadcast(path)",
        "whole = parameter.full_tensor()",
    ],
)
def test_a_collective_outside_of_its_room_is_found(line: str) -> None:
    assert of_torch(Source("rlkit/train/planted.py", "train", line))


def test_what_asks_nobody_is_allowed() -> None:
    text = "from torch.distributed.tensor import DTensor\ntorch.distributed.get_rank()\nfabric.device"
    assert not of_torch(Source("rlkit/train/planted.py", "train", text))


def planted(body: str, more: str = "") -> list[str]:
    """Return what is found in a function of the trainer."""
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    text = f"from rlkit.recipe import Train\n{more}\ndef planted(context, batch, ranks, train: Train):\n{lines}"
    own = Source("rlkit/train/planted.py", "train", text)
    return list(Collectives([read(ROOT / "rlkit/recipe/train.py"), own], METHODS).problems())


@pytest.mark.parametrize(
    "body",
    [
        "if batch.mask.any():\n    ranks.all_reduce_sum(batch.mask)",
        "if context.ranks.lead:\n    context.ranks.gather_world(1)",
        "if context.ranks.index == 0:\n    context.ranks.any(True)",
        "while not queue.empty():\n    ranks.any(True)",
        "return ranks.same(1) if len(batch) else 1",
        "return len(batch) > 0 and ranks.any(True)",
        "for row in batch.rows:\n    ranks.gather_dp(row)",
        "return [ranks.gather_dp(row) for row in batch.rows]",
        "if len(batch) == 0:\n    return\nranks.any(True)",
        "try:\n    work()\nexcept OSError:\n    ranks.any(True)",
        "size = len(batch)\nif size:\n    ranks.any(True)",
        "if len(batch):\n    count_all(ranks)",  # a function that contains one
        "if len(batch):\n    mean(batch, ranks.all_reduce_sum)",  # one that is handed one
        "if len(batch):  # agreed:\n    ranks.any(True)",  # without a reason
        "size = 0\nfor row in batch.rows:\n    size = size + row\nif size:\n    ranks.any(True)",
        "batch = min(batch, 3)\nif batch:\n    ranks.any(True)",  # a parameter
        "if isinstance(batch.rows, list):\n    ranks.any(True)",
    ],
)
def test_a_guard_that_one_rank_alone_knows_is_found(body: str) -> None:
    more = "def count_all(ranks):\n    return ranks.gather_world(1)\ndef mean(x, reduce):\n    return reduce(x)"
    assert len(planted(body, more)) == 1


@pytest.mark.parametrize(
    "body",
    [
        "if ranks.any(len(batch) > 0):\n    ranks.any(True)",
        "tokens = ranks.all_reduce_sum(batch.mask)\nif int(tokens) == 0:\n    return\nranks.any(True)",
        "if train.epochs > 1 and context.recipe.critic is not None:\n    ranks.any(True)",
        "if ranks.fabric.world_size == 1 or ranks.count == 1:\n    return\nranks.any(True)",
        "for _ in range(train.epochs):\n    ranks.any(True)",
        "count = 0\nfor i in range(train.epochs):\n    count = count + i\nif count > 3:\n    ranks.any(True)",
        "for name, mixture in (context.recipe.mix or {}).items():\n    ranks.any(True)",
        "tensor = batch.mask\nif isinstance(tensor, list):\n    ranks.any(True)",
        "if len(batch):  # agreed: rows were exchanged before, as many for each rank\n    ranks.any(True)",
        "if batch.values is not None:\n    ranks.any(True)",
        "if len(batch):\n    raise ValueError\nranks.any(True)",  # ends the run on all ranks
        "if any(batch.rows):\n    mean(batch)",  # over this rank's rows alone
    ],
)
def test_a_guard_that_all_ranks_know_is_allowed(body: str) -> None:
    more = "def mean(x, reduce=lambda x: x):\n    return reduce(x)"
    assert not planted(body, more)
