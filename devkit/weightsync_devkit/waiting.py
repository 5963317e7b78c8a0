"""Waiting for what happens elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def eventually(what: Callable[[], Any], seconds: float = 20.0, why: Callable[[], str] = lambda: "", pause: float = 0.05) -> Any:
    """Wait until ``what`` returns something true, and return it.

    Raises:
        AssertionError: it did not within ``seconds``; with what was seen last and, from ``why``, what explains it.
    """
    until = time.monotonic() + seconds
    while True:
        seen = what()
        if seen:
            return seen
        if time.monotonic() > until:
            raise AssertionError(f"not within {seconds:g} s: {seen!r} {why()}")
        time.sleep(pause)
