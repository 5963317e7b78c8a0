"""The operator's metrics and its HTTP port: /metrics, /healthz, /readyz.

docs/metrics.md lists every metric; a test compares both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from weightsync_operator.resources import Key

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0)


class Metrics:
    """All metrics of one operator process, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        prefix, of = "p2p_weightsync_operator", ("namespace", "weightsync")
        self.reconcile_seconds = Histogram(
            f"{prefix}_reconcile_duration_seconds", "One reconcile of one WeightSync.", of, buckets=_SECONDS, registry=self.registry
        )
        self.reconciles = counter(f"{prefix}_reconciles_total", "Reconciles by result: ok, error.", (*of, "result"))
        self.engines = gauge(f"{prefix}_engines", "Engines by state: assigned, or the reason why not.", (*of, "state"))
        self.trainers = gauge(f"{prefix}_trainers", "Trainer pods by state: found, connected.", (*of, "state"))
        self.epoch = gauge(f"{prefix}_assignment_epoch", "Epoch of the assignments in force.", of)
        self.ready = gauge(f"{prefix}_weightsync_ready", "1 if the WeightSync's Ready condition is True.", of)
        self.watch_event = gauge(
            f"{prefix}_watch_last_event_timestamp_seconds", "Unix time of the last event that a watch brought.", ("resource",)
        )
        self.resync = gauge(f"{prefix}_resync_timestamp_seconds", "Unix time of the last full list.")
        self.watch_silent = counter(
            f"{prefix}_watch_silent_total", "Full lists that found changes which no watch had brought.", ("resource",)
        )
        self.leader = gauge(f"{prefix}_leader", "1 if this replica does the work.")
        for resource in ("pods", "weightsyncs", "configmaps"):
            self.watch_silent.labels(resource)
        self._states: dict[Key, set[str]] = {}

    def describe(self, key: Key, engines: Mapping[str, int], trainers: Mapping[str, int], epoch: int, ready: bool) -> None:
        """Set a WeightSync's gauges; states that no engine is in any more go to 0."""
        labels = (key.namespace, key.name)
        states = self._states.setdefault(key, set())
        states.update(engines)
        for state in states:
            self.engines.labels(*labels, state).set(engines.get(state, 0))
        for state, number in trainers.items():
            self.trainers.labels(*labels, state).set(number)
        self.epoch.labels(*labels).set(epoch)
        self.ready.labels(*labels).set(ready)

    def forget(self, key: Key) -> None:
        """Remove all series of a WeightSync that is gone."""
        match = {"namespace": key.namespace, "weightsync": key.name}
        for metric in (self.reconcile_seconds, self.reconciles, self.engines, self.trainers, self.epoch, self.ready):
            metric.remove_by_labels(match)
        self._states.pop(key, None)


async def serve(metrics: Metrics, port: int, problem: Callable[[], str], ready: Callable[[], bool]) -> web.AppRunner:
    """Serve until the returned runner is cleaned up.

    Args:
        problem: why the process must be restarted, "" if it is well.
        ready: whether it has seen the whole cluster, or waits for another replica.
    """

    async def show(_request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def healthz(_request: web.Request) -> web.Response:
        words = problem()
        return web.Response(text=words or "ok", status=500 if words else 200)

    async def readyz(_request: web.Request) -> web.Response:
        return web.Response(text="ok" if ready() else "not all objects are listed yet", status=200 if ready() else 503)

    application = web.Application()
    application.add_routes([web.get("/metrics", show), web.get("/healthz", healthz), web.get("/readyz", readyz)])
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    # Both families where there are both: pods may have either.
    await web.TCPSite(runner, None, port).start()
    return runner
