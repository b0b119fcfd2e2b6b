"""The words of the code: the field's own, in names, docstrings and types."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.conftest import ROOT
from tests.gates.picture import PICTURE, picture
from tests.gates.trees import SHIPPED, tree_of

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
    "meet": "bind_tools or wait_ready",
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

FIRST_WORDS = re.compile(
    r"(Give|Gave|Say|Tell|Talk|Meet|Hear|Settle|Rest|Wake|Prove|Judge|Return (what|how|which|whether|why|where|when))\b"
)
WORDS = re.compile(
    r"\b(gave|talk(s|ed|ing)?|meets?|hears?|heard|tells|settle[sd]?|proves?|proved|anew|mend(s|ed)?)\b",
    re.IGNORECASE,
)
"""Metaphors of people, old words, and questions instead of nouns ("Return what came of a job"), in docstrings."""


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


PLACEHOLDERS = {
    "found", "known", "given", "whole", "place", "places", "figures", "figure", "one", "ones", "inner", "outer", "some",
    "many", "much", "rest", "least", "most", "other", "others", "thing", "things", "stuff", "mine", "everyone",
    "everything", "made", "done", "tried", "wanted", "shown", "kept", "left", "right_one", "first_one", "held", "taken",
    "said", "told", "seen", "read_", "written", "of_all", "both", "either", "each", "every", "nothing", "something",
}  # fmt: skip
"""Names that do not say what they hold."""
MAX_PLACEHOLDERS, MAX_WALRUSES = 3, 40
"""Placeholders in 1,000 names that are bound, and assignment expressions in all of the code."""
MAX_PARAMETERS = 6
DEFINED_TWICE = {"Recipe"}  # that of Python (`rlkit.Recipe`) and that of a file, with objects in it


def bound_names(tree: ast.AST) -> Iterator[str]:
    """Yield the names that are bound: by assignments, loops and parameters, and those of functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name.lstrip("_")


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the docstrings of modules, classes, functions and attributes, each with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def test_names_are_the_fields() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {owner}.{name}, expected {NAMES[name]}"
        for path in SOURCES
        for owner, name in definitions(tree_of(path))
        if name in NAMES and (owner, name) not in ELSEWHERE
    ]
    assert not wrong


def test_docstrings_have_no_metaphors_of_people() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {found[0]!r} in {text.splitlines()[0]!r}"
        for path in SOURCES
        for line, text in docstrings(tree_of(path))
        if (found := FIRST_WORDS.match(text) or WORDS.search(text))
    ]
    assert not wrong


def test_names_say_what_they_hold() -> None:
    trees = {path: tree_of(path) for path in SHIPPED}
    names = [name for tree in trees.values() for name in bound_names(tree)]
    counts = {str(path): sum(name in PLACEHOLDERS for name in bound_names(tree)) for path, tree in trees.items()}
    assert sum(counts.values()) <= MAX_PLACEHOLDERS * len(names) / 1000, Counter(counts).most_common(10)
    walruses = sum(isinstance(node, ast.NamedExpr) for tree in trees.values() for node in ast.walk(tree))
    assert walruses <= MAX_WALRUSES


def too_many(tree: ast.AST) -> Iterator[str]:
    """Yield the functions with too many parameters.

    The options of a part, its constructor's parameters, are no parameters in this sense: a recipe names them.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name != "__init__":
            arguments = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            count = len(arguments) - (arguments[:1] in (["self"], ["cls"]))
            of_autograd = arguments[:1] == ["ctx"]  # those of the function that it differentiates
            if count > MAX_PARAMETERS and not of_autograd:
                yield f"{node.name} has {count} parameters"


def test_functions_have_few_parameters() -> None:
    wrong = {str(path.relative_to(ROOT)): list(too_many(tree_of(path))) for path in (ROOT / "rlkit").rglob("*.py")}
    assert {path: problems for path, problems in wrong.items() if problems} == {}


def public_classes(trees: Mapping[str, ast.AST]) -> dict[str, list[str]]:
    """Return the files that define each public class."""
    files: dict[str, list[str]] = {}
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files.setdefault(node.name, []).append(path)
    return files


def test_a_public_class_name_has_one_meaning() -> None:
    trees = {str(path.relative_to(ROOT)): tree_of(path) for path in SOURCES if "examples" not in path.parts}
    duplicates = {name: paths for name, paths in public_classes(trees).items() if len(paths) > 1}
    assert {name: paths for name, paths in duplicates.items() if name not in DEFINED_TWICE} == {}


def count_any(tree: ast.AST) -> int:
    """Return how often a file's code, beside its imports, has the type `Any`."""
    return sum(isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(tree))


def test_any_stands_in_few_lines() -> None:
    """At most 2.5 in 1,000 lines: what is not read is an `object`, what is has a type or a Protocol."""
    texts = {path: path.read_text(encoding="utf-8") for path in SHIPPED}
    counts = Counter({str(path): count_any(tree_of(path)) for path in texts})
    lines = sum(text.count("\n") for text in texts.values())
    assert counts.total() <= 2.5 * lines / 1000, counts.most_common(10)


def rooms() -> dict[str, list[Path]]:
    """Return the folders with modules, and their modules; not the examples that `rlkit plugins show` prints."""
    modules: dict[str, list[Path]] = defaultdict(list)
    for path in sorted((ROOT / "rlkit").rglob("*.py")):
        if "examples" not in path.parts:
            modules[str(path.parent.relative_to(ROOT)).replace("/", ".")].append(path)
    return dict(modules)


def test_rooms_are_few_and_of_a_size_that_means_something() -> None:
    sizes = {room: sum(not path.stem.startswith("__") for path in modules) for room, modules in rooms().items()}
    assert len(sizes) <= 29
    assert {room: size for room, size in sizes.items() if size and size < 3} == {}


def test_a_room_says_what_belongs_there_and_what_does_not() -> None:
    texts = {
        room: ast.get_docstring(ast.parse((modules[0].parent / "__init__.py").read_text(encoding="utf-8"))) or ""
        for room, modules in rooms().items()
        if room != "rlkit"
    }
    assert [room for room, text in texts.items() if len(text.splitlines()) < 3] == []


def test_the_picture_of_the_rooms_is_current() -> None:
    assert PICTURE.read_text(encoding="utf-8") == picture(), "run: python -m tests.gates.picture"


def test_type_checkers_may_read_the_types_everywhere() -> None:
    assert (ROOT / "rlkit" / "py.typed").exists()
    assert not [path for path in SOURCES if re.search(r"# (mypy|type): ignore(?!\[)", path.read_text(encoding="utf-8"))]


def test_the_gates_find_what_they_look_for() -> None:
    tree = ast.parse('class Run:\n    """Gives what it was told."""\n    tries: Any\n    def meet(self) -> Any: ...\n')
    assert list(definitions(tree)) == [("", "Run"), ("Run", "tries"), ("Run", "meet")]
    assert count_any(tree) == 2
    assert list(too_many(ast.parse("def f(a, b, c, d, e, *, f, g): ..."))) == ["f has 7 parameters"]
    assert public_classes({"a.py": tree, "b.py": tree}) == {"Run": ["a.py", "b.py"]}
    bindings = ast.parse("for found, x in y: z = lambda known: (kept := 1)")
    assert sorted(bound_names(bindings)) == ["found", "kept", "known", "x", "z"]
    assert WORDS.search("It gave.")
    assert FIRST_WORDS.match("Give the folder.")
    assert not FIRST_WORDS.match("Given a folder, return it.")
    assert Path(__file__).name == "test_words.py"
