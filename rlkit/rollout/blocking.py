"""Finds code of plugins that blocks the event loop on which all rollouts run."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType

from rlkit.base.errors import is_foreign, locate_frame
from rlkit.base.text import redact, safe, source_of

LOOK_SECONDS = 0.25
"""How often the loop's thread is looked at."""
BLOCK_LOOKS = 4
"""Looks in a row at which a plugin's code runs and the loop does nothing else, after which a warning names it."""


def warn_on_stderr(text: str) -> None:
    """Show a warning where no reporter of a run does."""
    print(safe(redact(text)), file=sys.stderr)


class BlockWatch:
    """Looks at an event loop from a thread of its own, and warns once of each function that blocks it.

    Args:
        iterations: Returns how often the loop has looked for events.
        warn: Shows a warning; called from the thread.
    """

    def __init__(self, iterations: Callable[[], int], warn: Callable[[str], None]) -> None:
        self._iterations, self._warn = iterations, warn
        self._ended = threading.Event()
        self._loop_thread = threading.get_ident()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="rlkit-block-watch")
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        iteration, looks, warned = -1, 0, set()
        while not self._ended.wait(LOOK_SECONDS):
            frame = _plugin_frame(sys._current_frames().get(self._loop_thread))
            before, iteration = iteration, self._iterations()
            looks = looks + 1 if frame is not None and iteration == before else 0
            if frame is not None and looks == BLOCK_LOOKS and frame.f_code not in warned:
                warned.add(frame.f_code)
                self._warn(
                    f"warning: {frame.f_code.co_qualname}{source_of(frame.f_globals.get('__name__', ''))} has blocked "
                    f"all rollouts for {BLOCK_LOOKS * LOOK_SECONDS:g} s{locate_frame(frame)}; await what takes time, "
                    "such as asyncio.sleep, or call it by `await asyncio.to_thread(...)`"
                )


def _plugin_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of the plugin, or of the user's file, that the loop has called; None without one."""
    frames: list[FrameType] = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    called = next((f for f in reversed(frames) if _is_of_a_plugin(f)), None)
    return None if called is None else next(f for f in frames if _package(f) == _package(called))


def _is_of_a_plugin(frame: FrameType) -> bool:
    """Whether a frame is of a plugin, or of a file that is in no installed package."""
    is_installed = "site-packages" in frame.f_code.co_filename
    return is_foreign(frame) and (not is_installed or source_of(_package(frame)).startswith(" of plugin "))


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
