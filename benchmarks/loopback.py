"""An update beside the raw transport and the same bytes, in one run on this machine: ``make bench``.

Starts two stock engines (tensor parallel 2) of a small MoE model on the CPU. For each transport it times updates on connected
engines, then writes the same number of bytes to the same ranks in large pieces through the transport alone, and prints both
and their ratio. Absolute numbers are this machine's; the ratio is the point.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from weightsync_devkit import zoo
from weightsync_devkit.engines import EngineProcess, Engines, cpu_environment
from weightsync_sender import CheckpointSource, SenderSettings, WeightSender
from weightsync_sender.engine_client import Deadline
from weightsync_sender.roster import FixedEngines
from weightsync_sender.sender import address_towards
from weightsync_sender.transports import Memory, Piece, WriteState, make_transport

SIZES = replace(zoo.CPU, hidden=512, heads=8, head_dim=64, layers=4, experts=16, expert_width=512, intermediate=1024)
ROUNDS = 5


def main() -> None:
    """Measure and print."""
    os.environ.update(cpu_environment())
    table = Table(title="write phase of an update, two engines of two ranks (median of 5)")
    for column in ("transport", "bytes", "update", "of it writing", "raw transport", "raw / ours"):
        table.add_column(column)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoint = zoo.write("qwen3_moe", folder / "model", 1, sizes=SIZES)
        with Engines(folder / "run") as engines, engines.running((checkpoint, "--tp", "2"), (checkpoint, "--tp", "2")) as running:
            for transport in ("mooncake", "nixl"):
                table.add_row(*measure(transport, checkpoint, running))
    Console().print(table)


def measure(transport: str, checkpoint: Path, running: list[EngineProcess]) -> list[str]:
    """One row."""
    with WeightSender(
        engines=[engine.url for engine in running], config=checkpoint, settings=SenderSettings(transport=transport)
    ) as sender:
        reports = [sender.update(CheckpointSource(checkpoint), str(number)) for number in range(ROUNDS + 1)][1:]
        writing = statistics.median(max(engine.seconds["write"] for engine in report.engines.values()) for report in reports)
        whole = statistics.median(report.seconds for report in reports)
        nbytes = sum(engine.written_bytes for engine in reports[0].engines.values())
        raw = raw_seconds([engine.url for engine in running], sender.settings)
        # The raw pass left the engines with the wrong bytes.
        sender.update(CheckpointSource(checkpoint), "after")
    return [transport, decimal(nbytes), f"{whole:.3f} s", f"{writing:.3f} s", f"{raw:.3f} s", f"{raw / writing:.2f}"]


def raw_seconds(urls: list[str], settings: SenderSettings) -> float:
    """The same bytes to the same ranks, one piece for each parameter, through the transport alone."""
    engines, _ = FixedEngines(urls, None, None).refresh(settings)
    transport = make_transport(settings.transport, address_towards(engines[0]))
    targets = []
    largest = 0
    for engine in engines:
        engine.client.begin(_deadline())
        engine.read_tables(settings, transport.protocol, _deadline())
        connections = engine.open_connections(transport, settings, set(engine.ranks))
        for rank in engine.tables:
            targets.append((connections[rank.role, rank.placement.rank], list(rank.entries.values())))
            largest = max(largest, rank.nbytes)
    source = torch.zeros(largest, dtype=torch.uint8)
    token = transport.register(source.data_ptr(), source.numel(), Memory())
    seconds = []
    for _ in range(ROUNDS):
        began = time.monotonic()
        writes = []
        for connection, entries in targets:
            at, pieces = source.data_ptr(), []
            for entry in entries:
                if entry.nbytes:
                    pieces.append(Piece(at, entry.address, entry.nbytes))
                    at += entry.nbytes
            writes.append(connection.post(pieces, Memory()))
        while any(write.poll() is WriteState.PENDING for write in writes):
            time.sleep(0.0001)
        seconds.append(time.monotonic() - began)
    transport.deregister(token)
    for engine in engines:
        engine.client.end(_deadline())
        engine.close()
    transport.close()
    return statistics.median(seconds)


def _deadline() -> Deadline:
    return Deadline.after(60.0, "a control call of the benchmark")


if __name__ == "__main__":
    main()
