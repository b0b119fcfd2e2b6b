"""What others wrote or serve is reached through two modules: rlkit.base.files, and the client of rlkit.base.retry."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.conftest import ROOT
from tests.gates.test_gates import SOURCES, imports
from tests.gates.trees import tree_of

CLIENTS = ("urllib.request", "urllib3", "http.client", "httpx", "requests", "aiohttp", "websockets")
HTTP = {
    "rlkit/base/retry.py": "the client",
    "plugins/rlkit-agents/src/rlkit_agents/server.py": "a server",
    "plugins/rlkit-engine-http/src/rlkit_engine_http/__main__.py": "a server",
    "plugins/rlkit-engine-http/src/rlkit_engine_http/server.py": "a server",
    "plugins/rlkit-tinker/src/rlkit_tinker/server/app.py": "a server",
    "plugins/rlkit-tinker/src/rlkit_tinker/server/command.py": "a server",
    "plugins/rlkit-tinker/src/rlkit_tinker/server/routes.py": "a server",
    "plugins/rlkit-env-openenv/src/rlkit_env_openenv/connection.py": "a WebSocket to a server that the user names",
}
"""Modules that may import `CLIENTS`."""

ROOMS = (
    "rlkit/run/",
    "rlkit/cli/",
    "rlkit/records/",
    "plugins/rlkit-authors/src/",
    "plugins/rlkit-inspect/src/",
    "plugins/rlkit-policy/src/",
    "plugins/rlkit-report/src/",
    "rlkit/data/",
    "plugins/rlkit-tasks/src/",
    "rlkit/rewards/",
    "plugins/rlkit-rewards/src/",
    "rlkit/api/",
    "rlkit/recipe/",
    "plugins/rlkit-trackers/src/rlkit_trackers/table.py",
)
"""What reads run folders, task folders, pictures of rows, and what commands leave."""
FILES = {
    "plugins/rlkit-inspect/src/rlkit_inspect/docs.py": "rlkit's own pages",
    "rlkit/recipe/parsing/reader.py": "a recipe that the user names",
    "plugins/rlkit-authors/src/rlkit_authors/conformance.py": "the first line of a plugin's recipe",
    "plugins/rlkit-authors/src/rlkit_authors/plugins.py": "rlkit's own examples",
    "plugins/rlkit-inspect/src/rlkit_inspect/recipe.py": "a recipe that the user names",
    "plugins/rlkit-report/src/rlkit_report/report.py": "the first bytes of the report that --out replaces",
    "plugins/rlkit-authors/src/rlkit_authors/scaffold.py": "rlkit's own templates",
    "rlkit/cli/streams.py": "the null device",
    "plugins/rlkit-report/src/rlkit_report/page.py": "rlkit's own page",
    "plugins/rlkit-trackers/src/rlkit_trackers/table.py": "the columns of the run's own CSV file",
    "plugins/rlkit-policy/src/rlkit_policy/scan.py": "an export that rlkit has just written",
    "rlkit/run/lock.py": "the lock, with O_NOFOLLOW",
    "rlkit/run/peers.py": "/proc",
    "rlkit/run/preflight/memory.py": "/proc and /sys",
    "rlkit/run/profile.py": "a trace that the run has just written",
    "plugins/rlkit-tasks/src/rlkit_tasks/lines.py": "a data file that the user names",
    "plugins/rlkit-tasks/src/rlkit_tasks/text_rows.py": "rlkit's own copy of a data file",
    "rlkit/data/picture_files.py": "an object of a store that the user names",
}
"""Modules of `ROOMS` that may open files themselves, and which."""


def readers(tree: ast.AST) -> Iterator[int]:
    """Yield the lines at which a file is opened by its name, to be read."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        texts = [a.value for a in arguments if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        writes = any(set("wax") & set(text) for text in texts if set(text) <= set("rwaxbt+"))
        of_file = isinstance(node.func, ast.Name) or bool(texts) or ast.unparse(node.func) in ("os.open", "fsspec.open")
        if name in ("read_text", "read_bytes") or (name == "open" and of_file and not writes):
            yield node.lineno


def test_one_module_sends_requests() -> None:
    modules = {str(path.relative_to(ROOT)): set(imports(path)) for path in SOURCES}
    clients = {path for path, names in modules.items() if any(name.startswith(CLIENTS) for name in names)}
    assert clients == set(HTTP), "send requests through HttpClient or fetch of rlkit.base.retry"


def test_foreign_folders_are_read_through_one_module() -> None:
    paths = {str(path.relative_to(ROOT)): path for path in SOURCES}
    opening = {path for path in paths if path.startswith(ROOMS) and list(readers(tree_of(paths[path])))}
    assert opening == set(FILES), "read files through open_inside or read_inside of rlkit.base.files"


def test_the_gate_sees_what_opens_files() -> None:
    code = (
        "open(a)\nopen(a, 'rb')\nPath(a).open('rb')\na.read_text(encoding='utf-8')\na.read_bytes()\n"
        "gzip.open(a, 'rt')\nos.open(a, 0)\nfsspec.open(a)\n"
    )
    assert sorted(readers(ast.parse(code))) == list(range(1, 9))
    assert not list(
        readers(ast.parse("open(a, 'w')\na.open('ab')\nsession.open()\nopen_inside(a, b)\ngzip.open(raw)\n"))
    )
