"""What an update tells while it runs, for display.

| event | fields | when |
|---|---|---|
| connecting | engines | at the start |
| failed | engine, error | an engine dropped out; may come at any time |
| preparing | engines | their tables are read; programs are built for those that are new |
| connected | engines, bytes | what is about to be written |
| opened | engines | paused, and ready for bytes |
| moved | bytes, of | often, while bytes travel |
| written | engine, bytes | its last byte arrived |
| ready | engine | it serves the new version |
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

log = logging.getLogger(__name__)

Progress = Callable[[str, Mapping[str, Any]], None]
"""Called with an event's name and its fields, from several threads; if it raises, it is not called any more."""


def harmless(progress: Progress) -> Progress:
    """A display that breaks (a closed pipe) is told nothing more; it never breaks an update."""
    broken = threading.Event()

    def tell(event: str, fields: Mapping[str, Any]) -> None:
        if not broken.is_set():
            try:
                progress(event, fields)
            except Exception as error:  # whatever a caller's display raises
                broken.set()
                log.warning("progress is not shown any more: %s: %s", type(error).__name__, error)

    return tell
