"""What agents begin with: the files of their task. Those that come with rlkit are in packages of the shelf."""

from __future__ import annotations

from rlkit.base.folders import check_files, write_files
from rlkit.interfaces.agent import AgentTask
from rlkit.registry.shelf import attribute_of

__all__: list[str] = []

__getattr__ = attribute_of("agents")


def write_task(task: AgentTask) -> None:
    """Write the files of its row, and the task's text and pictures, into its folder.

    Raises:
        ValueError: A path leads out of the folder, or a file is no text.
    """
    write_files(task.folder, {**check_files(task.prompt.meta.get("files"), "files"), "TASK.md": task.text})
    for number, picture in enumerate(task.pictures, 1):
        (task.folder / f"picture-{number}{picture.suffix}").write_bytes(picture.data)
