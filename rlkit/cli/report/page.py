"""The HTML file: a page, styles and scripts that come with rlkit, and the runs' data as compressed blocks.

All data is gzip in base64 in `<script type="application/octet-stream">`, so that nothing that a model wrote is ever
parsed as HTML; the scripts show texts by `textContent` alone. A Content-Security-Policy lets none but these scripts
run, by their hashes, and forbids the network.
"""

from __future__ import annotations

import gzip
from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

from rlkit.cli.report.pages import Index, as_json, pages
from rlkit.cli.report.runs import RunFiles
from rlkit.cli.report.tokens import texts_of

HERE = Path(__file__).parent
SCRIPTS = ("core", "charts", "curves", "timeline", "conversation", "details", "rollouts", "about", "main")
"""The files of `web/`, in the order in which they are joined into one script."""

MARK = b"<!doctype html>\n<!-- written by rlkit report -->\n"
"""What each report begins with."""


def write_page(path: Path, runs: Sequence[RunFiles]) -> int:
    """Write the report of runs; return how many rollouts it has.

    Raises:
        OSError: It cannot be written; what was there before stays.
    """
    beside = path.with_name(f"{path.name}.partial")
    try:
        with beside.open("wb") as file:
            count = _write(file, runs)
        beside.rename(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
    return count


def _write(file: BinaryIO, runs: Sequence[RunFiles]) -> int:
    style = _read("vendor/uPlot.min.css") + _read("web/report.css")
    vendored = f"/*\n{_read('vendor/LICENSE')}\n*/\n{_read('vendor/uPlot.iife.min.js')}"
    script = "".join(_read(f"web/{name}.js") for name in SCRIPTS)
    script = f'"use strict";\n(() => {{\n{script}}})();\n'
    scripts = (vendored, script)
    file.write(MARK + _head(style, scripts).encode() + _read("web/body.html").encode())
    index, count = Index(), 0
    for number, run in enumerate(runs):
        for page in pages(run.rollouts(), texts_of(run), index, number, count):
            file.write(block(f"page-{count}", page))
            count += 1
    file.write(block("index", as_json(index.content())))
    file.write(block("runs", as_json([run.overview() for run in runs])))
    file.write("".join(f"<script>{text}</script>\n" for text in scripts).encode() + b"</body>\n</html>\n")
    return len(index.excerpts)


def _head(style: str, scripts: Sequence[str]) -> str:
    allowed = " ".join(map(_hash, scripts))
    policy = f"default-src 'none'; script-src {allowed}; style-src {_hash(style)}; base-uri 'none'; form-action 'none'"
    return (
        '<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<title>rlkit report</title>\n'
        f"<style>{style}</style>\n</head>\n"
    )


def block(name: str, content: str) -> bytes:
    """Return JSON as an element whose text is base64 of its gzip."""
    packed = gzip.compress(content.encode("ascii"), compresslevel=6, mtime=0)
    return b'<script type="application/octet-stream" id="%s">%s</script>\n' % (name.encode(), b64encode(packed))


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


def _read(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")
