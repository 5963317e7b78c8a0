"""Prometheus metrics of one sender, recorded from update reports.

docs/metrics.md lists every metric with its labels and the upper bound of its series; a test compares both. Series of an
engine vanish when it leaves the assignment.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from weightsync_sender.report import EngineState, Failure, UpdateReport

_WRITE_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_PHASE_SECONDS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0)
PHASES = ("connect", "pause", "flush", "begin", "write", "verify", "end", "resume")


class SenderMetrics:
    """All metrics of one sender, in a registry of their own."""

    def __init__(self, weight_sync: str) -> None:
        """Args: weight_sync: value of the label ``weightsync``; the scrape adds namespace and pod."""
        self.registry = CollectorRegistry()
        self._weight_sync = weight_sync
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        prefix, whole, each = "p2p_weightsync", ("weightsync",), ("weightsync", "engine")
        self._write = histogram(
            f"{prefix}_engine_write_duration_seconds", "Writing one engine, first to last byte.", each, buckets=_WRITE_SECONDS
        )
        self._phase = histogram(
            f"{prefix}_phase_duration_seconds", "One phase of one engine in one update.", (*whole, "phase"), buckets=_PHASE_SECONDS
        )
        self._update = histogram(f"{prefix}_update_duration_seconds", "One update over all engines.", whole, buckets=_WRITE_SECONDS)
        self._updates = counter(f"{prefix}_updates_total", "Updates by result: ok, failed.", (*whole, "result"))
        self._writes = counter(f"{prefix}_engine_writes_total", "Updates that meant this engine.", each)
        self._failures = counter(
            f"{prefix}_engine_write_failures_total", "Of those, the ones that left it without the version.", (*each, "reason")
        )
        self._bytes = counter(f"{prefix}_engine_write_bytes_total", "Bytes written into this engine.", each)
        self._planned = counter(f"{prefix}_engine_planned_bytes_total", "Bytes that were to be written into this engine.", each)
        self._behind = gauge(f"{prefix}_engine_updates_behind", "Updates since this engine last got one.", each)
        self._success = gauge(f"{prefix}_last_success_timestamp_seconds", "Unix time of the last update that succeeded.", whole)
        self._version = gauge(f"{prefix}_version_info", "1 for the newest version brought to engines.", (*whole, "version"))
        self._count = gauge(f"{prefix}_version_count", "Versions that this process brought to engines.", whole)
        self._epoch = gauge(f"{prefix}_assignment_epoch", "Epoch of the assignment that this sender holds, -1 for none.", whole)
        self._received = gauge(f"{prefix}_assignment_timestamp_seconds", "Unix time at which that assignment arrived.", whole)
        self._assigned = gauge(f"{prefix}_assigned_engines", "Engines of that assignment.", whole)
        self._updating = gauge(f"{prefix}_updating", "1 while an update is under way.", whole)
        for result in ("ok", "failed"):
            self._updates.labels(weight_sync, result)
        for phase in PHASES:
            self._phase.labels(weight_sync, phase)
        self._update.labels(weight_sync)
        self._success.labels(weight_sync).set(0)
        self._count.labels(weight_sync).set(0)
        self._epoch.labels(weight_sync).set(-1)
        self._updating.labels(weight_sync).set(0)
        self.engines: set[str] = set()
        """Those of the assignment in force."""
        self._known_version = ""

    def assigned(self, epoch: int, engines: Iterable[str], received_at: float) -> None:
        """A new assignment: series of engines that left vanish, those of new ones start at 0."""
        now = set(engines)
        for engine in self.engines - now:
            for metric in (self._write, self._writes, self._failures, self._bytes, self._planned, self._behind):
                metric.remove_by_labels({"weightsync": self._weight_sync, "engine": engine})
        for engine in now - self.engines:
            for metric in (self._write, self._writes, self._bytes, self._planned, self._behind):
                metric.labels(self._weight_sync, engine)
            for reason in Failure:
                self._failures.labels(self._weight_sync, engine, reason.value)
        self.engines = now
        self._epoch.labels(self._weight_sync).set(epoch)
        self._received.labels(self._weight_sync).set(received_at)
        self._assigned.labels(self._weight_sync).set(len(now))

    def updating(self, under_way: bool) -> None:
        """An update began or ended."""
        self._updating.labels(self._weight_sync).set(under_way)

    def failed(self, engines: Iterable[str], reason: Failure) -> None:
        """An update that raised before it had a report."""
        self._updates.labels(self._weight_sync, "failed").inc()
        for engine in self.engines & set(engines):
            self._writes.labels(self._weight_sync, engine).inc()
            self._failures.labels(self._weight_sync, engine, reason.value).inc()
            self._behind.labels(self._weight_sync, engine).inc()

    def reported(self, report: UpdateReport, *, good: bool, now: float) -> None:
        """An update with a report; engines that left meanwhile are not recorded."""
        self._updates.labels(self._weight_sync, "ok" if good else "failed").inc()
        self._update.labels(self._weight_sync).observe(report.seconds)
        for name, engine in report.engines.items():
            self._phases(engine.seconds)
            if name not in self.engines:
                continue
            labels = (self._weight_sync, name)
            self._writes.labels(*labels).inc()
            self._bytes.labels(*labels).inc(engine.written_bytes)
            self._planned.labels(*labels).inc(engine.planned_bytes)
            if engine.state is EngineState.READY:
                self._write.labels(*labels).observe(engine.seconds.get("write", 0.0))
                self._behind.labels(*labels).set(0)
            else:
                self._failures.labels(*labels, engine.failure.value if engine.failure else Failure.INTERNAL.value).inc()
                self._behind.labels(*labels).inc()
        if good:
            if self._known_version:
                self._version.remove_by_labels({"weightsync": self._weight_sync, "version": self._known_version})
            self._known_version = report.version
            self._version.labels(self._weight_sync, report.version).set(1)
            self._count.labels(self._weight_sync).inc()
            self._success.labels(self._weight_sync).set(now)

    def _phases(self, seconds: Mapping[str, float]) -> None:
        for phase, spent in seconds.items():
            self._phase.labels(self._weight_sync, phase).observe(spent)
