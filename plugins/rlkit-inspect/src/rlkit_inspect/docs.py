"""`rlkit docs [TOPIC]`: the pages that come with rlkit; as Markdown, unless a terminal shows them; or a notebook."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.resources import files

from rich.console import Console
from rich.markdown import Markdown

from rlkit.base.errors import RecipeError, show
from rlkit_inspect.new_file import new_file

USAGE = """usage: rlkit docs            the topics
       rlkit docs TOPIC      a page; the beginning of its name is enough
       rlkit docs WORD       the pages that mention a word, such as num_generations
       rlkit docs TOPIC --notebook FILE
                             the page `python` as a new notebook (.ipynb), for
                             Jupyter and Colab
"""
NOTEBOOK = "--notebook"
ORDER = (
    "first-run", "tutorial", "faq", "data-and-rewards", "chat-rows", "system-prompts", "pictures",
    "json-and-format-rewards", "judges", "programs", "my-first-gpu-run", "why-it-does-not-learn", "out-of-memory",
    "recipes", "commands", "algorithms", "supervised", "distillation", "looking-at-a-run", "metrics", "evaluation",
    "checkpoints", "use-your-model", "tested-models", "lora", "mixtures", "several-gpus", "placement", "clusters",
    "scaling", "servers", "bare-images", "asynchronous", "tools-and-environments", "agents", "self-play", "plugins",
    "verbs", "fields", "data-types", "python", "tinker", "the-loop", "architecture", "developing", "from-trl",
    "from-verl",
)  # fmt: skip
"""The topics, as a newcomer reads them."""
PLUGINS = "plugins/"
"""Where the pages on each kind of plugin lie."""


def run(argv: Sequence[str]) -> int:
    """List the topics, or show a page; return the exit status."""
    if argv and argv[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    if not argv:
        width = max(map(len, ORDER))
        for topic in ORDER:
            print(f"{topic:<{width}}  {title(page(topic))}")
        kinds = ", ".join(topic.removeprefix(PLUGINS) for topic in topics()[len(ORDER) :])
        print(f"{PLUGINS + 'KIND':<{width}}  {kinds}")
        return 0
    if NOTEBOOK in argv:
        return _write_notebook(argv)
    if len(argv) > 1:
        raise RecipeError(f"rlkit docs takes one topic, not {len(argv)}: {show(' '.join(argv), 80)}")
    text, console = page(find(argv[0])), Console()
    if console.is_terminal and os.environ.get("PAGER") == "cat":
        console.print(Markdown(text))
    elif console.is_terminal:
        styles = "R" in os.environ.setdefault("LESS", "FRX").upper()  # as git: less shows codes of colours otherwise
        with console.pager(styles=styles):
            console.print(Markdown(text))
    else:
        print(text, end="")
    return 0


def _write_notebook(argv: Sequence[str]) -> int:
    if len(argv) != 3 or argv[1] != NOTEBOOK or find(argv[0]) != "python":
        raise RecipeError("the page `python` alone is a notebook: rlkit docs python --notebook rlkit.ipynb")
    with new_file(argv[2]) as file:
        json.dump(notebook(page("python")), file, indent=1, ensure_ascii=False)
    return 0


def notebook(text: str) -> dict[str, object]:
    """Return a page as a notebook (nbformat 4.4), after a cell that installs rlkit; code blocks are cells."""
    cells = [_cell("code", "%pip install -q -e .  # in a checkout of rlkit")]
    prose, *blocks = re.split(r"^```(?=\w)", text, flags=re.M)
    cells.append(_cell("markdown", prose))
    for block in blocks:
        code, _, prose = block.partition("\n```\n")
        language, _, code = code.partition("\n")
        cells.append(_cell("code", code if language == "python" else f"%%{language}\n{code}"))
        cells.append(_cell("markdown", prose))
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    shown = [cell for cell in cells if cell["source"]]
    return {"nbformat": 4, "nbformat_minor": 4, "metadata": {"kernelspec": kernel}, "cells": shown}


def _cell(kind: str, text: str) -> dict[str, object]:
    cell: dict[str, object] = {"cell_type": kind, "metadata": {}, "source": text.strip()}
    return cell | {"execution_count": None, "outputs": []} if kind == "code" else cell


def topics() -> list[str]:
    """Return the names of all pages, those on each kind of plugin at the end."""
    pages = files("rlkit").joinpath("docs", PLUGINS).iterdir()
    return [*ORDER, *sorted(f"{PLUGINS}{path.name.removesuffix('.md')}" for path in pages)]


def find(topic_name: str) -> str:
    """Return the topic that is meant.

    Raises:
        RecipeError: There is none, or more than one.
    """
    word, names = topic_name.lower().removesuffix(".md"), topics()
    kind = PLUGINS + word.removeprefix(PLUGINS)
    tries = [[name] for name in (word, kind) if name in names]
    prefixes = ((ORDER, word), (names, kind))
    tries += [[topic for topic in candidates if topic.startswith(prefix)] for candidates, prefix in prefixes]
    tries.append([topic for topic in ORDER if word in topic.split("-")])
    matches = next(filter(None, tries), []) if word else []
    if len(matches) == 1:
        return matches[0]
    pages = [] if matches or not word else _mentioning(word)
    near = matches or get_close_matches(word, names, 3, 0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"topics: {', '.join(ORDER)}"
    if pages:
        hint = f"pages that mention it, in the title first: {', '.join(pages)}"
    raise RecipeError(f"{show(topic_name, 60)} is no topic of the documentation; {hint}")


def _mentioning(word: str) -> list[str]:
    """Return the three topics whose pages have a word in their title, then most often; of fewer, all."""
    pattern = re.compile(rf"(?<![a-z0-9]){re.escape(word)}", re.IGNORECASE)

    def mentions(topic: str) -> tuple[int, int]:
        text = page(topic)
        return len(pattern.findall(title(text))), len(pattern.findall(text))

    counts = {topic: mentions(topic) for topic in topics()}
    return sorted((topic for topic in counts if any(counts[topic])), key=counts.__getitem__, reverse=True)[:3]


def page(topic: str) -> str:
    """Return a page's Markdown."""
    return files("rlkit").joinpath("docs", f"{topic}.md").read_text(encoding="utf-8")


def title(text: str) -> str:
    """Return a page's heading."""
    return text.partition("\n")[0].lstrip("# ")
