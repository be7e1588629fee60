"""Folders that another user of the machine can reach."""

from __future__ import annotations

from pathlib import Path


def open_to_all(folder: Path) -> None:
    """Let every user pass through a folder and all that it lies in, however deep pytest puts it."""
    for one in (folder, *folder.parents):
        if not one.stat().st_mode & 0o001:
            one.chmod(0o755)
