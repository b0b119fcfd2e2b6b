"""The model card of an exported policy: what trained it on what, how well, and the commands that repeat it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import yaml
from rlkit_report.files import RunFiles
from rlkit_report.headline import recipe_tree

from rlkit.base.text import safe
from rlkit.models.save import BASE_FIRST, as_code, load_snippet
from rlkit.models.source import ADAPTER, BASE, OVERRIDES, Source
from rlkit.records.folder import AVERAGE
from rlkit.types import JsonObject

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
"""What the hub calls a model or a data set."""
CURVES = ("reward/mean", "validation/accuracy", "rollout/length", "policy/entropy", "policy/loss")
"""The metrics in the table of steps."""
MOST_STEPS = 10
"""Rows in the table of steps."""


def export_card(source: Source, run: Path | None, out: Path) -> str:
    """Return the text of `README.md`: Markdown after a header in YAML, as the hub reads it.

    No value of the run can leave its cell or its block of code.

    Args:
        source: What was exported.
        run: The run folder that it is from; None if it is from no run.
        out: The folder of the exported model or adapter.
    """
    overview = {} if run is None else RunFiles(run, max_bytes=1).overview()
    recipe_text = str(overview.get("recipe", ""))
    is_adapter = os.path.isfile(out / ADAPTER)
    header: dict[str, object] = {"library_name": "peft" if is_adapter else "transformers", "tags": ["rlkit"]}
    header |= {"base_model": source.model} if _is_on_hub(source.model) else {}
    datasets = list(dict.fromkeys(filter(_is_on_hub, _paths(recipe_tree(recipe_text).get("task")))))
    header |= {"datasets": datasets} if datasets else {}
    sections = [
        f"---\n{yaml.safe_dump(header)}---\n\n# Model card\n",
        f"{'A reward model' if source.scores else 'A policy'} that rlkit trained.\n",
        *([BASE_FIRST] if os.path.isfile(out / OVERRIDES) and not os.path.isdir(out / BASE) else []),
        load_snippet(is_adapter, source.scores),
    ]
    if overview:
        sections += _run_sections(overview, source.location, recipe_text)
    return "\n".join(sections)


def _run_sections(overview: JsonObject, location: str, recipe_text: str) -> Iterator[str]:
    headline, environment = overview["headline"], overview["environment"]
    facts = {name: as_code(value) for name, value in headline["facts"].items()}
    steps_done = f"{overview['result'].get('steps', 'unfinished')} of {headline['steps']}"
    facts |= {"status": as_code(headline["status"]), "steps": as_code(steps_done)}
    step, is_average = _step(location), os.path.basename(location.rstrip("/")) == AVERAGE
    facts |= {} if step is None else {"exported": f"the checkpoint of step {step}"}
    facts |= {"exported": "averages of the weights over steps (train.ema)"} if is_average else {}
    yield _table(("training", ""), facts.items())
    changes = headline["changes"]
    if changes and not is_average:
        yield "## Validation\n\nOn held-out prompts, with 95% intervals.\n"
        rows = [(c["name"], _interval(c["before"]), _interval(c["after"]), _number(c["p_value"])) for c in changes]
        yield _table(("metric", "before", "after", "p-value"), rows)
    columns = {name: overview["metrics"][name] for name in CURVES if name in overview["metrics"]}
    steps = overview["steps"]
    if columns and steps:
        stride = -(-len(steps) // MOST_STEPS)
        indices = sorted({*range(0, len(steps), stride), len(steps) - 1})
        yield "## Metrics\n"
        yield _table(("step", *columns), [(str(steps[i]), *(_number(c[i]) for c in columns.values())) for i in indices])
    packages = environment.get("packages")
    versions = {"python": environment.get("python"), **(packages if isinstance(packages, Mapping) else {})}
    versions["commit"] = environment.get("git_sha")
    yield "## Versions\n"
    yield _table(("package", "version"), [(as_code(k), as_code(str(v))) for k, v in versions.items() if v])
    yield "## Repeat\n\nSave the recipe below as `recipe.yaml`:\n"
    yield "```bash\nrlkit fit --recipe recipe.yaml --out run\nrlkit validate --checkpoint run\n```\n"
    yield "".join(f"    {line}\n" for line in safe(recipe_text).splitlines())


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else ""


def _interval(change: Mapping[str, object] | None) -> str:
    """Return a value with its 95% interval; empty if there is no validation."""
    if change is None:
        return ""
    bounds = change["bounds"]
    suffix = f" [{bounds[0]:.3f}, {bounds[1]:.3f}]" if isinstance(bounds, list) else ""
    return f"{_number(change['value'])}{suffix}"


def _step(location: str) -> int | None:
    """Return the step of a checkpoint's folder; None for another folder."""
    name = re.search(r"step-(\d+)/?$", location)
    return None if name is None else int(name[1])


def _is_on_hub(name: str) -> bool:
    return HUB_NAME.fullmatch(name) is not None and not os.path.exists(name)


def _paths(part: object) -> Iterator[str]:
    """Yield the values of `path` in a part and the parts in it."""
    if isinstance(part, list):
        for item in part:
            yield from _paths(item)
    for name, value in part.items() if isinstance(part, dict) else ():
        if name == "path" and isinstance(value, str):
            yield value
        yield from _paths(value)
