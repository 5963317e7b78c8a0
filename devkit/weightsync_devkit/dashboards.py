"""Makes the Grafana dashboard of the chart: ``python -m weightsync_devkit.dashboards`` writes charts/dashboards/*.json.

Panels are stated once, in :data:`ROWS`; their queries are also what tests run against a live Prometheus.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OUT = Path(__file__).parents[2] / "charts" / "dashboards" / "p2p-weightsync.json"
UID = "p2p-weightsync"

_SENDER = 'namespace=~"$namespace", weightsync=~"$weightsync"'
_ENGINE = _SENDER + ', engine=~"$engine"'
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True)
class Query:
    """One PromQL query of a panel."""

    expr: str
    legend: str
    heatmap: bool = False


@dataclass(frozen=True)
class Panel:
    """One panel, half the dashboard wide."""

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    kind: str = "timeseries"
    width: int = 12


_WRITES = f"p2p_weightsync_engine_write_duration_seconds_bucket{{{_ENGINE}}}"

ROWS: dict[str, tuple[Panel, ...]] = {
    "Engines": (
        Panel(
            "Write latency, all engines",
            "How long writing one engine took, from the first to the last byte; darker means more writes.",
            "s",
            (Query(f"sum by (le) (increase({_WRITES}[$__rate_interval]))", "{{le}}", heatmap=True),),
            kind="heatmap",
        ),
        Panel(
            "Failures by engine and reason",
            "Updates that left an engine without the version, by the kind of error.",
            "short",
            (
                Query(
                    f"sum by (engine, reason) (increase(p2p_weightsync_engine_write_failures_total{{{_ENGINE}}}[$__rate_interval])) > 0",
                    "{{engine}} {{reason}}",
                ),
            ),
        ),
        Panel(
            "Write latency by engine",
            "Median and 99th percentile.",
            "s",
            (
                Query(f"histogram_quantile(0.5, sum by (le, engine) (rate({_WRITES}[$__rate_interval])))", "{{engine}} p50"),
                Query(f"histogram_quantile(0.99, sum by (le, engine) (rate({_WRITES}[$__rate_interval])))", "{{engine}} p99"),
            ),
        ),
        Panel(
            "Bytes written by engine",
            "Bytes per second, averaged over time; engines are written in bursts.",
            "Bps",
            (Query(f"sum by (engine) (rate(p2p_weightsync_engine_write_bytes_total{{{_ENGINE}}}[$__rate_interval]))", "{{engine}}"),),
        ),
        Panel(
            "Write rate while writing",
            "Bytes per second of writing time: what the wire gives.",
            "Bps",
            (
                Query(
                    f"sum by (engine) (rate(p2p_weightsync_engine_write_bytes_total{{{_ENGINE}}}[$__rate_interval])) / "
                    f"(sum by (engine) (rate(p2p_weightsync_engine_write_duration_seconds_sum{{{_ENGINE}}}[$__rate_interval])) > 0)",
                    "{{engine}}",
                ),
            ),
        ),
        Panel(
            "Versions behind",
            "Updates since each engine last got one; 0 is current.",
            "short",
            (Query(f"max by (engine) (p2p_weightsync_engine_updates_behind{{{_ENGINE}}})", "{{engine}}"),),
        ),
    ),
    "Updates": (
        Panel(
            "Since the last good update",
            "Per WeightSync; grows while updates fail or training stands still.",
            "s",
            (
                Query(
                    f"time() - max by (namespace, weightsync) (p2p_weightsync_last_success_timestamp_seconds{{{_SENDER}}} > 0)",
                    "{{namespace}}/{{weightsync}}",
                ),
            ),
            kind="stat",
            width=6,
        ),
        Panel(
            "Updates",
            "By result, per minute.",
            "short",
            (Query(f"sum by (result) (rate(p2p_weightsync_updates_total{{{_SENDER}}}[$__rate_interval])) * 60", "{{result}}"),),
            width=6,
        ),
        Panel(
            "Phases",
            "Mean seconds that one engine spends in each phase of an update; all but connect and write are paid while it is paused.",
            "s",
            (
                Query(
                    f"sum by (phase) (rate(p2p_weightsync_phase_duration_seconds_sum{{{_SENDER}}}[$__rate_interval])) / "
                    f"(sum by (phase) (rate(p2p_weightsync_phase_duration_seconds_count{{{_SENDER}}}[$__rate_interval])) > 0)",
                    "{{phase}}",
                ),
            ),
        ),
        Panel(
            "Update duration",
            "Median and 99th percentile of whole updates.",
            "s",
            tuple(
                Query(
                    f"histogram_quantile({quantile}, sum by (le, weightsync) "
                    f"(rate(p2p_weightsync_update_duration_seconds_bucket{{{_SENDER}}}[$__rate_interval])))",
                    f"{{{{weightsync}}}} p{name}",
                )
                for quantile, name in ((0.5, 50), (0.99, 99))
            ),
        ),
        Panel(
            "Epoch skew",
            "Between the trainers of a WeightSync; above 0 for long, a trainer does not see its assignment.",
            "short",
            (
                Query(
                    f"max by (namespace, weightsync) (p2p_weightsync_assignment_epoch{{{_SENDER}}}) - "
                    f"min by (namespace, weightsync) (p2p_weightsync_assignment_epoch{{{_SENDER}}})",
                    "{{namespace}}/{{weightsync}}",
                ),
            ),
            width=6,
        ),
        Panel(
            "Version skew",
            "Between the trainers of a WeightSync, in versions brought.",
            "short",
            (
                Query(
                    f"max by (namespace, weightsync) (p2p_weightsync_version_count{{{_SENDER}}}) - "
                    f"min by (namespace, weightsync) (p2p_weightsync_version_count{{{_SENDER}}})",
                    "{{namespace}}/{{weightsync}}",
                ),
            ),
            width=6,
        ),
    ),
    "Operator": (
        Panel(
            "Engines by state",
            "Assigned, or the reason why not.",
            "short",
            (Query(f"sum by (weightsync, state) (p2p_weightsync_operator_engines{{{_SENDER}}})", "{{weightsync}} {{state}}"),),
        ),
        Panel(
            "Reconcile duration",
            "Median and 99th percentile.",
            "s",
            tuple(
                Query(
                    f"histogram_quantile({quantile}, sum by (le) "
                    f"(rate(p2p_weightsync_operator_reconcile_duration_seconds_bucket{{{_SENDER}}}[$__rate_interval])))",
                    f"p{name}",
                )
                for quantile, name in ((0.5, 50), (0.99, 99))
            ),
        ),
        Panel(
            "Watch age",
            "Since each watch brought its last event; quiet clusters have old watches.",
            "s",
            (
                Query(
                    "time() - max by (resource) (p2p_weightsync_operator_watch_last_event_timestamp_seconds > 0)",
                    "{{resource}}",
                ),
            ),
        ),
        Panel(
            "Reconciles",
            "By result, per minute.",
            "short",
            (Query(f"sum by (result) (rate(p2p_weightsync_operator_reconciles_total{{{_SENDER}}}[$__rate_interval])) * 60", "{{result}}"),),
        ),
    ),
}


def panels() -> Iterator[Panel]:
    """All panels."""
    for row in ROWS.values():
        yield from row


def dashboard() -> dict[str, Any]:
    """The dashboard's JSON model."""
    made: list[dict[str, Any]] = []
    x = y = 0
    for title, row in ROWS.items():
        made.append(
            {
                "id": len(made) + 1,
                "type": "row",
                "title": title,
                "collapsed": False,
                "gridPos": {"h": 1, "w": 24, "x": 0, "y": y},
                "panels": [],
            }
        )
        x, y = 0, y + 1
        for panel in row:
            if x + panel.width > 24:
                x, y = 0, y + 8
            made.append(_panel(panel, len(made) + 1, {"h": 8, "w": panel.width, "x": x, "y": y}))
            x += panel.width
        y += 8
    return {
        "uid": UID,
        "title": "p2p-weightsync",
        "description": "Weights from trainers into sglang engines: write latency, failures, versions, and the operator.",
        "tags": ["p2p-weightsync", "sglang"],
        "editable": False,
        "graphTooltip": 1,
        "schemaVersion": 39,
        "timezone": "browser",
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timepicker": {},
        "annotations": {"list": []},
        "links": [],
        "templating": {
            "list": [
                {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "refresh": 1, "hide": 0},
                _variable("namespace", "Namespace", "p2p_weightsync_assignment_epoch"),
                _variable("weightsync", "WeightSync", 'p2p_weightsync_assignment_epoch{namespace=~"$namespace"}'),
                _variable("engine", "Engine", f"p2p_weightsync_engine_updates_behind{{{_SENDER}}}"),
            ]
        },
        "panels": made,
    }


def _variable(name: str, label: str, series: str) -> dict[str, Any]:
    query = f"label_values({series}, {name})"
    return {
        "name": name, "label": label, "type": "query", "datasource": _DATASOURCE,
        "query": {"query": query, "refId": name}, "refresh": 2, "sort": 1, "multi": True, "includeAll": True, "allValue": ".*", "hide": 0,
        "current": {"text": ["All"], "value": ["$__all"], "selected": True},
    }  # fmt: skip


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    targets = [
        {
            "refId": chr(ord("A") + index), "datasource": _DATASOURCE, "expr": query.expr, "legendFormat": query.legend, "editorMode": "code",
            "format": "heatmap" if query.heatmap else "time_series", "range": panel.kind != "stat", "instant": panel.kind == "stat",
        }
        for index, query in enumerate(panel.queries)
    ]  # fmt: skip
    by_kind: dict[str, dict[str, Any]] = {
        "timeseries": {"legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []}, "tooltip": {"mode": "multi", "sort": "desc"}},
        "stat": {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}, "colorMode": "value", "graphMode": "none"},
        "heatmap": {"calculate": False, "yAxis": {"unit": panel.unit}, "color": {"mode": "scheme", "scheme": "Oranges"}, "cellGap": 1, "legend": {"show": True}, "tooltip": {"show": True}},
    }  # fmt: skip
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": _DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": by_kind[panel.kind],
        "targets": targets,
    }


def main() -> None:
    """Write the file."""
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(dashboard(), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
