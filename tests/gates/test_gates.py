"""What keeps the code as it was meant to be: floors, sizes, and options that somebody reads."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

import pytest
from annotated_types import Ge, Gt, Le, Lt

from rlkit.base.ranges import NUMBER
from rlkit.hooks import KINDS
from rlkit.recipe import Recipe
from rlkit.registry import load_plugins
from tests.conftest import ROOT
from tests.gates.trees import CORE, SHELF, SHIPPED, tree_of

SOURCES = list((ROOT / "rlkit").rglob("*.py")) + list((ROOT / "plugins").glob("*/src/**/*.py"))

FLOORS = [
    {"base", "types"},
    {"interfaces", "ops"},
    {"hooks", "optimizers", "schedules", "registry", "recipe"},
    {"distributed"},
    {"models"},
    {"records"},
    {
        "advantages",
        "curricula",
        "losses",
        "rewards",
        "tasks",
        "tools",
        "parsers",
        "interactions",
        "filters",
        "engines",
        "loggers",
        "launchers",
    },
    {"agents"},
    {"rollout"},
    {"data"},
    {"train"},
    {"run"},
    {"commands"},
    {"cli"},
    {"api"},
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
OWNERS = {
    "sglang": set(),
    "lightning": {"distributed", "train", "run"},
    "peft": {"models"},
    "wandb": set(),
}


PUBLIC = {
    "__version__", "agents", "api", "base", "commands", "distributed", "hooks", "interfaces", "models", "ops",
    "parsers", "recipe", "records", "registry", "tools", "types",
}  # fmt: skip
"""Rooms from which the shelf may import; `rlkit docs plugins` names what an outsider is promised of them."""
PRIVATE = "rlkit.recipe.parsing"
"""What only the core may import of a public room: `rlkit.commands` and `rlkit.api` have what it does."""
SERVED = {f"rlkit.{kind}" for kind in KINDS}
"""Modules that serve parts of the shelf by their names, to recipes and scripts."""
MOST_CORE_LINES = 24_451
"""It may only fall."""


def code_lines(path: Path) -> int:
    """Count the lines of a file that are no blanks, comments or strings that stand alone."""
    strings = {
        line
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    return sum(
        bool(line.strip()) and not line.strip().startswith("#") and number not in strings for number, line in lines
    )


@cache
def imports(path: Path) -> tuple[str, ...]:
    """Return the modules that a file imports, wherever in it, but not those for type checkers only."""
    return tuple(_imports(tree_of(path)))


def _imports(tree: ast.AST) -> Iterator[str]:
    nodes = [tree]
    while nodes:
        node = nodes.pop()
        if not (isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            nodes += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            if node.module == "rlkit":
                yield from (f"rlkit.{alias.name}" for alias in node.names)


def room(module: str) -> str:
    return module.removeprefix("rlkit.").partition(".")[0]


def test_a_floor_imports_only_lower_floors() -> None:
    wrong = []
    for path in (ROOT / "rlkit").rglob("*.py"):
        own = room(".".join(path.relative_to(ROOT).with_suffix("").parts))
        for module in imports(path):
            other = room(module)
            if not module.startswith("rlkit.") or other == own or {own, other} - set(FLOOR):
                continue
            if FLOOR[other] >= FLOOR[own]:
                if FLOOR[other] == FLOOR[own] and FLOOR[own] in (0, 1, 2):
                    continue  # the rooms of the ground floors know one another
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert not wrong


def test_the_core_imports_nothing_of_the_shelf() -> None:
    """Not by the paths that parts of the shelf have for recipes and scripts, either."""
    wrong = []
    for path in set(CORE) - {ROOT / "rlkit" / "testing.py"}:  # a path for plugins, which the core does not import
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ImportFrom) and node.module in SERVED:
                own = vars(import_module(node.module)).keys()
                served = [alias.name for alias in node.names if alias.name not in own]
                wrong += [f"{path.relative_to(ROOT)} imports {node.module}.{name}" for name in served]
        wrong += [
            f"{path.relative_to(ROOT)} imports {module}"
            for module in imports(path)
            if module.partition(".")[0] in SHELF or module == "rlkit.testing"
        ]
    assert not wrong


def test_the_shelf_imports_public_rooms_alone() -> None:
    """Packages with verbs, too: what these need is in `rlkit.commands` and `rlkit.api`."""
    wrong = []
    for path in set(SHIPPED) - set(CORE):
        ours = {module for module in imports(path) if module.startswith("rlkit.") and module not in SERVED}
        closed = [module for module in ours if room(module) not in PUBLIC or module.startswith(PRIVATE)]
        wrong += [f"{path.relative_to(ROOT)} imports {module}" for module in closed]
    assert not wrong


def test_the_page_on_verbs_names_all_that_they_may_import() -> None:
    text = (ROOT / "rlkit" / "docs" / "verbs.md").read_text(encoding="utf-8")
    for path in (ROOT / "rlkit" / "api").glob("*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        names = getattr(import_module(module), "__all__", ())
        assert not [name for name in names if f"`{name}`" not in text], module


def test_what_the_page_on_verbs_names_is_there() -> None:
    text = (ROOT / "rlkit" / "docs" / "verbs.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`rlkit.*?) \| (.*) \|$", text, re.M)
    assert len(rows) > 5
    for owners, description in rows:
        modules = [import_module(name) for name in re.findall(r"`([\w.]+)`", owners) if name != "rlkit.fit"]
        names = [name.partition(".")[0] for name in re.findall(r"`([\w.]+)`", description)]
        assert not [name for name in names if not any(hasattr(module, name) for module in modules)], owners


def test_the_core_grows_no_more() -> None:
    """Lines without blanks, comments and docstrings; a new capability is a package in `plugins/`."""
    assert sum(code_lines(path) for path in CORE) <= MOST_CORE_LINES


def test_a_phase_of_a_step_takes_what_it_uses() -> None:
    """Only the steps themselves take a run's whole context."""
    takers = [
        node.name
        for path in (ROOT / "rlkit" / "train").rglob("*.py")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef)
        and any(isinstance(a.annotation, ast.Name) and a.annotation.id == "TrainContext" for a in node.args.args)
    ]
    assert sorted(takers) == ["rl_step", "supervised_step"]


def test_parts_do_not_import_their_siblings() -> None:
    wrong = []
    no_parts = ("rlkit.parsers.text", "rlkit.parsers.detect")  # what parsers share, and what chooses one of them
    shared = ("rlkit.parsers.text",)
    for part in ("advantages", "losses", "rewards", "engines", "parsers"):
        for path in (ROOT / "rlkit" / part).glob("*.py"):
            if path.stem != "__init__" and f"rlkit.{part}.{path.stem}" not in no_parts:
                siblings = {m for m in imports(path) if m.startswith(f"rlkit.{part}") and not m.startswith(shared)}
                own = f"rlkit.{part}.{path.stem.partition('_')[0]}_"  # a part in several files
                wrong += [f"{path.name}: {m}" for m in siblings if not m.startswith(own)]
    assert not wrong


def test_the_kit_for_servers_knows_no_product() -> None:
    """So that an engine for any product can be a plugin: see plugins/rlkit-engine-http."""
    named = re.compile(r"sglang|vllm", re.I)
    kit = (ROOT / "plugins" / "rlkit-servers" / "src" / "rlkit_servers").glob("*.py")
    assert not [
        f"{path.name}: {found[0]}"
        for path in kit
        if path.stem != "plugin"
        for found in named.finditer(path.read_text(encoding="utf-8"))
    ]


def test_heavy_libraries_are_imported_by_their_owners_only() -> None:
    wrong = []
    for path in (ROOT / "rlkit").rglob("*.py"):
        own = room(".".join(path.relative_to(ROOT).with_suffix("").parts))
        for module in imports(path):
            library = module.partition(".")[0]
            if library in OWNERS and own not in OWNERS[library]:
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
            if library == "peft" and path.name != "lora.py":
                wrong.append(f"{path.relative_to(ROOT)} imports peft")
    assert not wrong


def test_functions_and_files_are_small() -> None:
    large = []
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        if text.count("\n") > 450:
            large.append(f"{path.name}: {text.count(chr(10))} lines")
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                if length > 60:
                    large.append(f"{path.name} {node.name}: {length} lines")
    assert not large


def test_public_things_have_docstrings() -> None:
    bare = []
    for path in SOURCES:
        tree = tree_of(path)
        if path.name != "__init__.py" and not ast.get_docstring(tree):
            bare.append(path.name)
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith(("_", "rlkit_register")):
                bare += [f"{path.name} {node.name}"] * (not ast.get_docstring(node))
    assert not bare


def sections(section: type = Recipe) -> Iterator[type]:
    for hint in get_type_hints(section).values():
        for inner in types_in(hint):
            if isinstance(inner, type) and is_dataclass(inner):
                yield inner
                yield from sections(inner)


def types_in(hint: object) -> Iterator[object]:
    yield hint
    for inner in get_args(hint):
        yield from types_in(inner)


def test_every_option_is_read_by_some_code() -> None:
    code = "\n".join(path.read_text(encoding="utf-8") for path in SOURCES)
    unread = [f"{s.__name__}.{f.name}" for s in sections() for f in fields(s) if not re.search(rf"\.{f.name}\b", code)]
    for parts in load_plugins(entry_points=False).parts.values():
        for part in parts.values():
            source = "\n".join(inspect.getsource(cls) for cls in part.cls.__mro__ if cls.__module__.startswith("rlkit"))
            for reader in ("rollout/scoring.py", "rollout/service.py", "train/sampling.py"):
                source += (ROOT / "rlkit" / reader).read_text(encoding="utf-8")
            for name in inspect.signature(part.cls).parameters:
                if not re.search(rf"\.{name}\b(?! = )", source):
                    unread.append(f"{part.name}.{name}")
    assert not unread


def bare_numbers(hint: object) -> bool:
    """Whether a type holds numbers without bounds on both sides and `NUMBER` after them."""
    if get_origin(hint) is Literal:
        return False
    if get_origin(hint) is Annotated and get_args(hint)[0] in (int, float):
        *bounds, last = get_args(hint)[1:]
        below = any(isinstance(bound, Ge | Gt) for bound in bounds)
        return not (below and any(isinstance(bound, Le | Lt) for bound in bounds) and last is NUMBER)
    return hint in (int, float) or any(map(bare_numbers, get_args(hint)))


def sections_of(cls: type) -> Iterator[type]:
    for hint in get_type_hints(cls.__init__).values():
        yield from (inner for inner in (hint, *get_args(hint)) if isinstance(inner, type) and is_dataclass(inner))


def test_every_number_states_its_range() -> None:
    plugins = [path.parent.name.replace("-", "_") for path in (ROOT / "plugins").glob("*/pyproject.toml")]
    registry = load_plugins([(name, import_module(name)) for name in plugins], entry_points=False)
    registry.require_healthy()
    parts = [part.cls for parts in registry.parts.values() for part in parts.values()]
    bare = [
        f"{cls.__name__}.{name}"
        for cls in {*parts, *(s for part in parts for s in sections_of(part)), *sections()}
        for name, hint in get_type_hints(cls.__init__, include_extras=True).items()
        if bare_numbers(hint)
    ]
    assert not bare
    assert bare_numbers(dict[str, int] | None)
    assert bare_numbers(Annotated[int, Ge(0), NUMBER])


def test_every_option_is_documented() -> None:
    classes = [p.cls for parts in load_plugins(entry_points=False).parts.values() for p in parts.values()]
    missing = []
    for cls in [*classes, *(s for s in sections() if s is not Recipe)]:
        for name in inspect.signature(cls).parameters:
            if not re.search(rf"^\s+{name}: ", cls.__doc__ or "", re.M):
                missing.append(f"{cls.__name__}.{name}")
    assert not missing


def help_then(script: str) -> str:
    """Run `rlkit --help` and then a script, in a process of its own; give the last line printed."""
    whole = f"from rlkit.cli.main import main; main(['--help']); {script}"
    done = subprocess.run((sys.executable, "-c", whole), capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1]


def test_help_needs_nothing_heavy() -> None:
    heavy = ("torch", "lightning", "transformers", "rich", "yaml")
    assert help_then(f"import sys; print([m for m in {heavy} if m in sys.modules])") == "[]"


def test_workers_that_score_need_nothing_heavy() -> None:
    heavy = ("torch", "lightning", "transformers", "rich", "yaml")
    modules = "rlkit_math.reward, rlkit.rewards.python, rlkit.types, rlkit.rollout.worker"
    assert help_then(f"import {modules}, sys; print([m for m in {heavy} if m in sys.modules])") == "[]"


def test_help_takes_less_than_half_a_second_of_cpu() -> None:
    assert min(float(help_then("import time; print(time.process_time())")) for _ in range(3)) < 0.5


@pytest.mark.parametrize("name", ["README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml"])
def test_the_top_level_holds_what_it_should_and_nothing_else(name: str) -> None:
    assert (ROOT / name).stat().st_size > 0
    listed = subprocess.run(("git", "ls-files"), cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    top = {path.partition("/")[0] for path in listed}
    allowed = {"README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml", "rlkit", "plugins", "recipes", "tests"}
    assert {entry for entry in top if not entry.startswith(".")} <= allowed


def test_rlkit_is_installed_from_a_checkout_only() -> None:
    """On the package index `rlkit` is another project's, and none of ours is there; `-e rlkit-words` is a folder."""
    wrong = re.compile(r"pip install (?:-[^e]\S* )*['\"]?rlkit(?!/)|['\"]rlkit ?[\[<>=~!]|its extra `")
    listed = subprocess.run(("git", "ls-files"), cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    kinds = {".md", ".py", ".toml", ".tmpl", ".yaml", ".yml", ".txt"}
    texts = [ROOT / path for path in listed if Path(path).suffix in kinds and ROOT / path != Path(__file__)]
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in texts
        for match in wrong.finditer(path.read_text(encoding="utf-8"))
    ]
    assert not found
    assert wrong.search("pip install -U " + "rlkit")
    assert wrong.search("'" + "rlkit[wandb]'")
    assert wrong.search("pip install '" + "rlkit-fabric[wandb]'")
    assert wrong.search("pip install " + "rlkit-tool-search")
    assert not wrong.search("pip install -e rlkit-words")
    assert not wrong.search("pip install './plugins/rlkit-engine-vllm[vllm]' ./rlkit/plugin")


def test_text_files_are_read_and_written_in_a_stated_encoding() -> None:
    """Without one, `open` and its kin use the locale's, and a file from another machine reads differently."""
    unstated = []
    for path in SOURCES:
        for call in ast.walk(tree_of(path)):
            if not isinstance(call, ast.Call) or "encoding" in {keyword.arg for keyword in call.keywords}:
                continue
            binary = any(isinstance(mode, ast.Constant) and "b" in str(mode.value) for mode in call.args[1:])
            if getattr(call.func, "attr", None) in ("read_text", "write_text") or (
                getattr(call.func, "id", None) == "open" and not binary
            ):
                unstated.append(f"{path.relative_to(ROOT)}:{call.lineno}")
    assert not unstated


def test_whether_a_path_is_there_is_asked_by_os_path() -> None:
    """`Path.exists` and its kin raise for a name that the system refuses; `os.path` answers False."""
    asked = re.compile(r"\.(exists|is_file|is_dir|expanduser)\(\)")
    assert not [
        f"{path.relative_to(ROOT)}: {m[0]}" for path in SOURCES for m in asked.finditer(path.read_text("utf-8"))
    ]


def test_a_text_option_becomes_a_path_only_by_a_type_for_names() -> None:
    """A part that joins an option to the run folder (`run.folder / self.file`) declares the option a `FileName`.

    It sees this spelling alone: no `joinpath`, no other name of the folder.
    """
    for path in SOURCES:
        text = path.read_text("utf-8")
        options = re.findall(r"run\.folder / self\.(\w+)", text)
        assert not [option for option in options if f"{option}: FileName" not in text], path
