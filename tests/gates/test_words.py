"""The words of the code: the field's own, in names, docstrings and types."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import ROOT
from tests.gates.picture import PICTURE, picture

SOURCES = [*(ROOT / "rlkit").rglob("*.py"), *(ROOT / "plugins").glob("*/src/**/*.py")]

NAMES = {
    "Run": "Models, PartRuntime or RolloutService",
    "Made": "StepResult",
    "Trained": "TrainableModule",
    "Found": "CheckpointRef",
    "Resting": "HostOffload",
    "Partners": "Participants",
    "Meeting": "ParticipantSession",
    "Gauge": "BusyTimer",
    "Patience": "RetryPolicy",
    "meet": "open_session, bind_tools or wait_ready",
    "settle": "await_scores",
    "played": "sampled",
    "learnt": "train_on",
    "routes": "dispatch",
    "judge": "compute_logps",
    "descend": "accumulate_and_step",
    "take": "select_rows",
    "rounds": "aligned_micro_batches",
    "piecewise": "forward_in_micro_batches",
    "shape_of": "shape_rewards",
    "note_credit": "attach_advantages",
    "_give": "sync_weights",
    "share_out": "shard_for_rank",
    "largest": "all_reduce_max",
    "objects": "gather_dp",
    "everyone": "gather_world",
    "share": "broadcast_tp",
    "troubles": "checkpoint_metrics",
    "revive": "restart",
    "tries": "max_refills",
    "micro_tokens": "max_tokens_per_micro_batch",
    "max_norm": "max_grad_norm",
    "infer_tp": "tensor_parallel",
    "parts": "components",
}
"""Words of our own that were names of functions, classes and options, and the field's names for these."""

ELSEWHERE = {
    ("Objective", "share"),  # a micro-batch's part of the loss, not an exchange of ranks
    ("Retry", "tries"),  # the policy's attempts, not a filter's refills
    ("Registry", "parts"), ("Choice", "parts"), ("Recipe", "parts"),  # plugin classes, not a reward's components
}  # fmt: skip
"""Classes in which a name of the table means something else."""

FIRST_WORDS = re.compile(r"(Give|Gave|Say|Tell|Talk|Meet|Hear|Settle|Rest|Wake|Prove|Judge)\b")
WORDS = re.compile(
    r"\b(gave|talk(s|ed|ing)?|meets?|hears?|heard|tells|settle[sd]?|proves?|proved|processors?|anew|mend(s|ed)?)\b",
    re.IGNORECASE,
)
"""Metaphors of people, and old words, in docstrings."""


def definitions(tree: ast.AST, owner: str = "") -> Iterator[tuple[str, str]]:
    """Yield (class, name) for each class, function, constructor argument and field."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield owner, node.name
            yield from definitions(node, node.name)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield owner, node.name
            if node.name == "__init__":
                yield from ((owner, argument.arg) for argument in (*node.args.args, *node.args.kwonlyargs))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and owner:
            yield owner, node.target.id


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the docstrings of modules, classes, functions and attributes, each with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def test_names_are_the_fields() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {owner}.{name}, expected {NAMES[name]}"
        for path in SOURCES
        for owner, name in definitions(ast.parse(path.read_text(encoding="utf-8")))
        if name in NAMES and (owner, name) not in ELSEWHERE
    ]
    assert not wrong


def test_docstrings_have_no_metaphors_of_people() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {found[0]!r} in {text.splitlines()[0]!r}"
        for path in SOURCES
        for line, text in docstrings(ast.parse(path.read_text(encoding="utf-8")))
        if (found := FIRST_WORDS.match(text) or WORDS.search(text))
    ]
    assert not wrong


def count_any(tree: ast.AST) -> int:
    """Return how often a file's code, beside its imports, has the type `Any`."""
    return sum(isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(tree))


def test_any_stands_in_few_lines() -> None:
    """At most 6 in 1,000 lines: what is not read is an `object`, what is has a type or a Protocol."""
    texts = {path: path.read_text(encoding="utf-8") for path in (ROOT / "rlkit").rglob("*.py")}
    counts = Counter({str(path): count_any(ast.parse(text)) for path, text in texts.items()})
    lines = sum(text.count("\n") for text in texts.values())
    assert counts.total() <= 6 * lines / 1000, counts.most_common(10)


def test_a_room_has_at_most_20_files() -> None:
    rooms = Counter(path.parent for path in (ROOT / "rlkit").rglob("*.py") if path.name != "__init__.py")
    assert {str(room.relative_to(ROOT)): count for room, count in rooms.items() if count > 20} == {}


def test_the_picture_of_the_rooms_is_current() -> None:
    assert PICTURE.read_text(encoding="utf-8") == picture(), "run: python -m tests.gates.picture"


def test_type_checkers_may_read_the_types_everywhere() -> None:
    assert (ROOT / "rlkit" / "py.typed").exists()
    assert not [path for path in SOURCES if re.search(r"# (mypy|type): ignore(?!\[)", path.read_text(encoding="utf-8"))]


def test_the_gates_find_what_they_look_for() -> None:
    tree = ast.parse('class Run:\n    """Gives what it was told."""\n    tries: Any\n    def meet(self) -> Any: ...\n')
    assert list(definitions(tree)) == [("", "Run"), ("Run", "tries"), ("Run", "meet")]
    assert count_any(tree) == 2
    assert WORDS.search("It gave.")
    assert FIRST_WORDS.match("Give the folder.")
    assert not FIRST_WORDS.match("Given a folder, return it.")
    assert Path(__file__).name == "test_words.py"
