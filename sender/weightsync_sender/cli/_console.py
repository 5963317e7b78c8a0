"""The console that all commands print to."""

from __future__ import annotations

import os

from rich.console import Console

_LOG_WIDTH = 160
"""Columns where there is no terminal to ask: tables in logs must not be folded to pieces."""


class _Console(Console):
    """rich ends the process when its output is closed (``| head``), which would leave engines half written."""

    def on_broken_pipe(self) -> None:
        """Print nothing more; the command goes on, and its exit code says how it ended."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


def make_console(*, stderr: bool = False) -> Console:
    """A console on standard output or error."""
    console = _Console(stderr=stderr, highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, _LOG_WIDTH)
    return console
