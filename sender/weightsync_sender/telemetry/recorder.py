"""Keeps a sender's metrics and status in step with what it does, and serves both."""

from __future__ import annotations

import time
from collections.abc import Callable

from weightsync_core.assignment import Assignment
from weightsync_sender.report import Failure, UpdateReport, failure_of
from weightsync_sender.telemetry.metrics import SenderMetrics
from weightsync_sender.telemetry.server import SenderStatus, serve


class Recorder:
    """One sender's telemetry."""

    def __init__(self, weight_sync: str, trainer: str, identity: dict[str, str]) -> None:
        """Args: weight_sync, trainer: names of the resource and the pod; identity: sglang, torch, arch."""
        self.metrics = SenderMetrics(weight_sync)
        self.status = SenderStatus(weight_sync, trainer, identity)
        self._stop: Callable[[], None] = lambda: None

    def serve(self, port: int, host: str = "") -> None:
        """Open the port, on one address or on all.

        Raises:
            PortInUse: taken.
        """
        self._stop = serve(port, self.status, self.metrics.registry, host)

    def close(self) -> None:
        """Close the port."""
        self._stop()

    def assigned(self, assignment: Assignment) -> None:
        """A new assignment is in force."""
        self.metrics.assigned(assignment.epoch, [engine.id for engine in assignment.engines], time.time())
        self.status.epoch = assignment.epoch
        self.status.transport = str(assignment.transport.get("backend", ""))

    def began(self, version: str) -> None:
        """An update began."""
        self.status.updating = version
        self.metrics.updating(True)

    def raised(self, error: BaseException) -> None:
        """An update ended without a report."""
        self._ended(str(error) or type(error).__name__)
        self.metrics.failed(self.metrics.engines, failure_of(error) or Failure.INTERNAL)

    def reported(self, report: UpdateReport, *, good: bool) -> None:
        """An update ended with a report."""
        now = time.time()
        self.status.engines = {name: engine.state.value for name, engine in report.engines.items()}
        if good:
            # Before "updating" goes: whoever reads in between must not take the engines for outdated.
            self.status.version, self.status.updated_at = report.version, now
        self._ended("" if good else "; ".join(f"{name}: {engine.error}" for name, engine in report.engines.items() if engine.error))
        self.metrics.reported(report, good=good, now=now)

    def _ended(self, error: str) -> None:
        self.status.updating, self.status.error = "", error[:2000]
        self.metrics.updating(False)
