"""``weightsync push``."""

from __future__ import annotations

import json as json_module
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TransferSpeedColumn
from rich.table import Table

from weightsync_core.errors import UpdateFailed
from weightsync_sender.cli._console import make_console
from weightsync_sender.report import EngineState, UpdateReport
from weightsync_sender.sender import WeightSender
from weightsync_sender.settings import SenderSettings
from weightsync_sender.sources import CheckpointSource

_COLOURS = {EngineState.READY: "green", EngineState.SKIPPED: "yellow", EngineState.FENCED: "red", EngineState.GONE: "red"}


def run(checkpoint: Path, urls: Sequence[str], version: str, settings: SenderSettings, api_key: str | None, *, json: bool) -> int:
    """Push; returns the exit code."""
    console = make_console(stderr=json)
    source = CheckpointSource(checkpoint)
    with WeightSender(engines=urls, config=checkpoint, api_key=api_key, settings=settings) as sender:
        shown = _Bar(console) if console.is_terminal else _Lines(console)
        try:
            with shown:
                report, failed = sender.update(source, version, progress=shown), None
        except UpdateFailed as error:
            report, failed = cast(UpdateReport, error.report), error
    if json:
        json_module.dump({**report.as_dict(), "error": str(failed) if failed else ""}, sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        console.print(_table(report))
        for name, engine in report.engines.items():
            if engine.error and not failed:  # else it is part of the error below
                console.print(engine.reason, markup=False, soft_wrap=True)
            for note in engine.notes:
                console.print(f"{name}: note: {note}", markup=False, soft_wrap=True)
        if report.unused:
            console.print(f"{len(report.unused)} checkpoint tensors have no place in these engines, e.g. {report.unused[0]}", markup=False)
    if failed:
        make_console(stderr=True).print(f"error: {failed}", markup=False, soft_wrap=True)
        return 1
    return 0


def _table(report: UpdateReport) -> Table:
    table = Table(title=f"version {report.version}: {report.ready} of {len(report.engines)} engines, {report.seconds:.2f} s")
    for column in ("engine", "state", "bytes", "write", "rate", "pause to resume", "transport"):
        table.add_column(column, overflow="fold")
    for name, engine in report.engines.items():
        away = sum(spent for phase, spent in engine.seconds.items() if phase != "connect")
        table.add_row(
            name,
            f"[{_COLOURS[engine.state]}]{engine.state.value}[/]",
            decimal(engine.written_bytes),
            f"{engine.seconds.get('write', 0.0):.3f} s",
            f"{decimal(int(engine.rate))}/s",
            f"{away:.3f} s",
            engine.transport,
        )
    return table


class _Lines:
    """Plain lines, for logs."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = time.monotonic()
        self._last = 0.0

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def __call__(self, event: str, fields: Mapping[str, Any]) -> None:
        now = time.monotonic()
        if event == "moved" and now - self._last < 5.0:
            return
        self._last = now
        text = " ".join(f"{key}={decimal(value) if key in ('bytes', 'of') else value}" for key, value in fields.items())
        self._console.print(f"{now - self._started:8.2f}s {event} {text}", markup=False, soft_wrap=True)


class _Bar:
    """A progress bar, on a terminal."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeElapsedColumn(), console=console
        )
        self._task = self._progress.add_task("connecting", total=None)
        self._ready = 0

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def __call__(self, event: str, fields: Mapping[str, Any]) -> None:
        if event == "failed":
            self._progress.console.print(f"failed: {fields['engine']}: {fields['error']}", markup=False, soft_wrap=True)
        elif event in ("connecting", "preparing"):
            self._progress.update(self._task, description=f"{event} {fields['engines']} engines")
        elif event == "connected":
            self._progress.update(self._task, description=f"pausing {fields['engines']} engines", total=fields["bytes"])
        elif event == "opened":
            self._progress.update(self._task, description=f"writing to {fields['engines']} engines")
        elif event == "moved":
            self._progress.update(self._task, completed=fields["bytes"])
        elif event == "ready":
            self._ready += 1
            self._progress.update(self._task, description=f"{self._ready} engines ready")
