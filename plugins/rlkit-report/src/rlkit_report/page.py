"""The HTML file: a page, styles and scripts that come with rlkit, and the runs' data as compressed blocks.

All data is gzip in base64 in `<script type="application/octet-stream">`, so that nothing that a model wrote is ever
parsed as HTML; the scripts show texts by `textContent` alone. A Content-Security-Policy lets none but these scripts
run, by their hashes, and forbids the network; a page that is served may ask its server alone.
"""

from __future__ import annotations

import gzip
from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import IO

from rlkit_report.files import RunFiles
from rlkit_report.pages import PageIndex, as_json, pages
from rlkit_report.pictures import RunPictures
from rlkit_report.tokens import texts_of

HERE = Path(__file__).parent
SCRIPTS = ("core", "address", "charts", "headline", "answers", "difference", "curves", "timeline", "conversation",
           "session", "details", "rollouts", "about", "main")  # fmt: skip
"""The files of `web/`, in the order in which they are joined into one script."""

WATCH = "watch"
"""The script that a page has besides if it is served: it asks for a newer one."""

MARK = b"<!doctype html>\n<!-- written by rlkit report -->\n"
"""What each report begins with."""


LOCALE = """try { new Intl.NumberFormat(navigator.language); } catch {
  Object.defineProperty(navigator, "language", { value: "en" });
}
"""
"""Replaces a language that is none, such as `en-US@posix`, in which uPlot would format numbers."""


def write_page(path: Path, runs: Sequence[RunFiles]) -> int:
    """Write the report of runs; return how many rollouts it has.

    Raises:
        OSError: It cannot be written; what was there before stays.
    """
    beside = path.with_name(f"{path.name}.partial")
    try:
        with beside.open("wb") as file:
            count = write(file, runs)
        beside.rename(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
    return count


def write(file: IO[bytes], runs: Sequence[RunFiles], version: str | None = None) -> int:
    """Write the report of runs; return how many rollouts it has.

    Args:
        file: Where it is written to.
        runs: What it shows.
        version: Of a page that is served, which asks the server for a newer one; None in a file.

    Raises:
        OSError: It cannot be written.
    """
    style = _read("vendor/uPlot.min.css") + _read("web/report.css")
    vendored = f"{LOCALE}/*\n{_read('vendor/LICENSE')}\n*/\n{_read('vendor/uPlot.iife.min.js')}"
    names = SCRIPTS if version is None else (*SCRIPTS[:-1], WATCH, SCRIPTS[-1])
    script = "".join(_read(f"web/{name}.js") for name in names)
    script = f'"use strict";\n(() => {{\n{script}}})();\n'
    scripts = (vendored, script)
    head = _head(style, scripts, "'none'" if version is None else "'self'")
    file.write(MARK + head.encode() + _read("web/body.html").encode())
    index, count = PageIndex(), 0
    for number, run in enumerate(runs):
        pictures = RunPictures(run.path / "rollouts")
        for page in pages(run.rollouts(), texts_of(run), pictures, index, run=number, first=count):
            file.write(block(f"page-{count}", page))
            count += 1
    file.write(block("index", as_json(index.content())))
    file.write(block("runs", as_json([run.overview() for run in runs])))
    if version is not None:
        file.write(block("version", as_json(version)))
    file.write("".join(f"<script>{text}</script>\n" for text in scripts).encode() + b"</body>\n</html>\n")
    return len(index.excerpts)


def _head(style: str, scripts: Sequence[str], network: str) -> str:
    allowed = f"script-src {' '.join(map(_hash, scripts))}; style-src {_hash(style)}; connect-src {network}"
    policy = f"default-src 'none'; img-src data:; {allowed}; base-uri 'none'; form-action 'none'"
    return (
        '<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<title>rlkit report</title>\n'
        f"<style>{style}</style>\n</head>\n"
    )


def block(name: str, content: str) -> bytes:
    """Return JSON as an element whose text is base64 of its gzip."""
    packed = gzip.compress(content.encode("utf-8"), compresslevel=5, mtime=0)
    return b'<script type="application/octet-stream" id="%s">%s</script>\n' % (name.encode(), b64encode(packed))


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


def _read(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")
