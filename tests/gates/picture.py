"""Draws the rooms of the code, floor by floor, with their imports: python -m tests.gates.picture

The picture is `rlkit/docs/architecture.svg`. A box is a package, or the modules of a floor that are in none. An arrow
leads from a box to one that it imports, unless a longer path of imports leads there too.
"""

from __future__ import annotations

from collections import defaultdict
from html import escape
from pathlib import Path

from tests.conftest import ROOT
from tests.gates.test_gates import FLOORS, imports, room

PICTURE = ROOT / "rlkit" / "docs" / "architecture.svg"
WIDTH, BOX_HEIGHT, FLOOR_HEIGHT, MARGIN = 1000, 34, 92, 16
LETTER = 8.0
"""Pixels of a letter."""

Boxes = dict[str, tuple[int, list[str]]]
"""The floor and the rooms of each box, by its label."""


def boxes() -> Boxes:
    """Return what is drawn: a box for each package, and one for all modules of a floor."""
    found: Boxes = {}
    for floor, rooms in enumerate(FLOORS):
        packages = sorted(name for name in rooms if (ROOT / "rlkit" / name / "__init__.py").is_file())
        modules = sorted(name for name in rooms if (ROOT / "rlkit" / f"{name}.py").exists())
        found |= {name: (floor, [name]) for name in packages}
        if modules:
            found[", ".join(modules)] = (floor, modules)
    return found


def arrows(drawn: Boxes) -> set[tuple[str, str]]:
    """Return which box imports which, without those that follow from others."""
    box_of = {name: label for label, (_, rooms) in drawn.items() for name in rooms}
    direct: dict[str, set[str]] = defaultdict(set)
    for path in (ROOT / "rlkit").rglob("*.py"):
        source = box_of.get(room(".".join(path.relative_to(ROOT).with_suffix("").parts)))
        for module in imports(path):
            target = box_of.get(room(module)) if module.startswith("rlkit.") else None
            if source and target and drawn[source][0] > drawn[target][0]:
                direct[source].add(target)

    def reached(start: str) -> set[str]:
        return direct[start].union(*(reached(target) for target in direct[start]))

    longer = {source: set().union(*map(reached, targets)) for source, targets in list(direct.items())}
    return {(source, target) for source, targets in longer.items() for target in direct[source] - targets}


def picture() -> str:
    """Return the picture as SVG."""
    drawn = boxes()
    floors = sorted({floor for floor, _ in drawn.values()}, reverse=True)
    places: dict[str, tuple[float, float, float]] = {}
    parts: list[str] = []
    for level, floor in enumerate(floors):
        labels = [label for label, (own, _) in drawn.items() if own == floor]
        widths = [LETTER * len(label) + 22 for label in labels]
        gap = (WIDTH - 2 * MARGIN - sum(widths)) / (len(labels) + 1)
        x, y = MARGIN + gap, MARGIN + level * FLOOR_HEIGHT
        for label, width in zip(labels, widths, strict=True):
            places[label] = (x, y, width)
            parts.append(
                f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{BOX_HEIGHT}" rx="6"/>'
                f'<text x="{x + width / 2:.0f}" y="{y + 22:.0f}">{escape(label)}</text>'
            )
            x += width + gap
    lines = []
    for source, target in sorted(arrows(drawn)):
        (x1, y1, w1), (x2, y2, w2) = places[source], places[target]
        lines.append(
            f'<line x1="{x1 + w1 / 2:.0f}" y1="{y1 + BOX_HEIGHT:.0f}" x2="{x2 + w2 / 2:.0f}" y2="{y2 - 3:.0f}"/>'
        )
    height = 2 * MARGIN + (len(floors) - 1) * FLOOR_HEIGHT + BOX_HEIGHT
    style = (
        "text{font:13px monospace;text-anchor:middle;fill:#222}rect{fill:#eef3fa;stroke:#5b7db1}"
        "line{stroke:#8a8a8a;stroke-width:1;marker-end:url(#tip)}"
    )
    tip = (
        '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#8a8a8a"/></marker>'
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}">',
            f"<style>{style}</style><defs>{tip}</defs>",
            f'<rect width="{WIDTH}" height="{height}" style="fill:#fff;stroke:none"/>',
            *lines,
            *parts,
            "</svg>",
            "",
        ]
    )


def write(path: Path = PICTURE) -> None:
    """Write the picture."""
    path.write_text(picture(), encoding="utf-8")


if __name__ == "__main__":
    write()
