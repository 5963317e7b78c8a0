"""Calls that run beside the caller, each in a daemon thread of its own.

Unlike an executor's, these threads do not keep the process from ending: an engine that does not answer would otherwise hold up
a program that was told to stop.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class Background:
    """Starts calls and knows which are under way."""

    def __init__(self, name: str) -> None:
        """Args: name: of the threads."""
        self._name = name
        self._threads: list[threading.Thread] = []

    def submit(self, call: Callable[..., None], *arguments: Any) -> Future[None]:
        """Start a call now; its error, if any, is the future's."""
        future: Future[None] = Future()

        def run() -> None:
            try:
                call(*arguments)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)

        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=run, name=self._name, daemon=True)
        self._threads.append(thread)
        thread.start()
        return future

    def join(self, until: float) -> None:
        """Wait for calls under way, at most until this monotonic time."""
        for thread in list(self._threads):
            thread.join(max(until - time.monotonic(), 0.0))
