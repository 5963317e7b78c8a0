"""A real Prometheus on this machine, and the chart's dashboard drawn from it where there is no Grafana."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import matplotlib as mpl
import numpy as np

from weightsync_devkit.dashboards import Panel, Query, panels
from weightsync_devkit.engines import free_port

mpl.use("Agg")
from matplotlib import pyplot as plt

SCRAPE_SECONDS = 1


class Prometheus:
    """Scrapes the given ports every second; use as a context manager."""

    def __init__(self, folder: Path, targets: Mapping[str, Mapping[str, str]]) -> None:
        """Args: targets: ``host:port`` to the labels that a cluster's scrape would add.

        Raises:
            FileNotFoundError: Prometheus is not installed (Debian package prometheus).
        """
        program = shutil.which("prometheus")
        if program is None:
            raise FileNotFoundError("prometheus is not installed (Debian package prometheus)")
        self.url = f"http://127.0.0.1:{free_port()}"
        self._folder = folder
        jobs = [{"targets": [target], "labels": dict(labels)} for target, labels in targets.items()]
        scrape = {"job_name": "weightsync", "honor_labels": True, "static_configs": jobs}
        settings = {"global": {"scrape_interval": f"{SCRAPE_SECONDS}s"}, "scrape_configs": [scrape]}
        (folder / "prometheus.yml").write_text(json.dumps(settings))  # JSON is YAML
        self._command = [
            program, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={self.url.removeprefix('http://')}",
        ]  # fmt: skip

    def __enter__(self) -> Prometheus:
        with (self._folder / "prometheus.log").open("wb") as out:
            self._process = subprocess.Popen(self._command, stdout=out, stderr=out)
        until = time.monotonic() + 30
        while not self._ready():
            if time.monotonic() > until or self._process.poll() is not None:
                raise RuntimeError((self._folder / "prometheus.log").read_text()[-2000:])
            time.sleep(0.1)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.terminate()
        self._process.wait(20)

    def query(self, expr: str) -> list[dict[str, Any]]:
        """Series of an instant query."""
        return self._ask("query", {"query": filled(expr)})

    def range(self, expr: str, seconds: float) -> list[dict[str, Any]]:
        """Series of the last seconds, a point each second."""
        now = time.time()
        return self._ask("query_range", {"query": filled(expr), "start": str(now - seconds), "end": str(now), "step": "1"})

    def _ask(self, what: str, parameters: dict[str, str]) -> list[dict[str, Any]]:
        answer = httpx.get(f"{self.url}/api/v1/{what}", params=parameters, timeout=20).json()
        if answer["status"] != "success":
            raise RuntimeError(f"{parameters['query']}: {answer['error']}")
        return list(answer["data"]["result"])

    def _ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/-/ready", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False


def filled(expr: str) -> str:
    """A dashboard's query with Grafana's variables put in as "All"."""
    for variable, value in (("$__rate_interval", "10s"), ("$namespace", ".*"), ("$weightsync", ".*"), ("$engine", ".*")):
        expr = expr.replace(variable, value)
    return expr


def draw(prometheus: Prometheus, seconds: float, path: Path) -> None:
    """Draw every panel of the dashboard into one PNG."""
    shown = list(panels())
    columns = 2
    rows = -(-len(shown) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(16, 3.2 * rows), layout="constrained")
    for axis, panel in zip(np.ravel(axes), shown, strict=False):
        _draw_panel(prometheus, panel, seconds, axis)
    for axis in np.ravel(axes)[len(shown) :]:
        axis.set_axis_off()
    figure.savefig(path, dpi=70)
    plt.close(figure)


def _draw_panel(prometheus: Prometheus, panel: Panel, seconds: float, axis: Any) -> None:
    axis.set_title(f"{panel.title} [{panel.unit}]", fontsize=10, loc="left")
    found = [(query, prometheus.range(query.expr, seconds)) for query in panel.queries]
    if panel.kind == "heatmap":
        _draw_heatmap([series for _, each in found for series in each], axis)
        return
    for query, each in found:
        for series in each:
            times = [float(moment) - float(time.time()) for moment, _ in series["values"]]
            axis.plot(times, [float(value) for _, value in series["values"]], label=_legend(query, series["metric"]))
    if axis.lines:
        axis.legend(fontsize=7, loc="upper left")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)


def _draw_heatmap(series: Sequence[dict[str, Any]], axis: Any) -> None:
    ordered = sorted(series, key=lambda each: float(each["metric"]["le"]))
    counts = np.array([[float(value) for _, value in each["values"]] for each in ordered])
    cells = np.diff(counts, axis=0, prepend=0)
    axis.imshow(cells, aspect="auto", origin="lower", cmap="Oranges", interpolation="nearest")
    axis.set_yticks(range(len(ordered)), [each["metric"]["le"] for each in ordered], fontsize=7)


def _legend(query: Query, labels: Mapping[str, str]) -> str:
    text = query.legend
    for name, value in labels.items():
        text = text.replace("{{" + name + "}}", value)
    return text
