"""``weightsync plan``."""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.filesize import decimal
from rich.table import Table

from weightsync_core.endpoints import parse_endpoint
from weightsync_core.libraries import mooncake_protocol
from weightsync_core.planner import PlanTarget, TargetId, TrainerRank, plan
from weightsync_sender.cli._console import make_console
from weightsync_sender.engine import ConfigFolders, Engine
from weightsync_sender.engine_client import Deadline, EngineClient
from weightsync_sender.replica.compiled import ReplicaStore
from weightsync_sender.settings import SenderSettings
from weightsync_sender.sources import CheckpointSource


def run(
    urls: Sequence[str], transport: str, checkpoint: Path | None, trainers: int, per_node: int, api_key: str | None, *, json: bool
) -> int:
    """Read the engines, plan, print; returns the exit code."""
    settings = SenderSettings(transport=transport)
    folders = ConfigFolders(str(checkpoint) if checkpoint else None)
    rows = []
    try:
        for url in urls:
            endpoint = parse_endpoint(url)
            engine = Engine(endpoint, EngineClient(endpoint, api_key))
            engine.connect(settings, mooncake_protocol(), folders, Deadline.after(settings.timeouts.connect, "connecting"))
            if checkpoint is not None:
                import torch

                engine.compile(ReplicaStore(torch.device("cpu")), CheckpointSource(checkpoint).manifest(), settings)
            rows += [_row(engine, index) for index in range(len(engine.tables))]
            engine.close()
    finally:
        folders.close()
    targets = [PlanTarget(TargetId(row["engine"], row["role"], row["rank"]), row["bytes"], row["layout"]) for row in rows]
    made = plan([TrainerRank(rank, f"node-{rank // per_node}") for rank in range(trainers)], targets)
    for row in rows:
        row["writer"] = made.writers[TargetId(row["engine"], row["role"], row["rank"])]
    if json:
        answer = {
            "targets": rows,
            "rank_loads": dict(made.rank_loads),
            "node_loads": dict(made.node_loads),
            "productions": made.productions,
        }
        json_module.dump(answer, sys.stdout, indent=2)
        sys.stdout.write("\n")
        return 0
    console = make_console()
    columns = ["writer", "engine", "role", "rank", "bytes", "parameters", "layout"] + (["direct", "packed"] if checkpoint else [])
    table = Table(title=f"{len(rows)} targets, {decimal(sum(row['bytes'] for row in rows))} an update")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in sorted(rows, key=lambda row: (row["writer"], row["engine"], row["role"], row["rank"])):
        table.add_row(*(decimal(row[c]) if c in ("bytes", "direct", "packed") else str(row[c])[:48] for c in columns))
    console.print(table)
    loads = ", ".join(f"{rank}: {decimal(load)}" for rank, load in made.rank_loads.items())
    console.print(f"load of trainer ranks: {loads}", markup=False, soft_wrap=True)
    return 0


def _row(engine: Engine, index: int) -> dict[str, Any]:
    table = engine.tables[index]
    assert engine.layout is not None
    row: dict[str, Any] = {
        "engine": engine.name,
        "role": table.role,
        "rank": table.placement.rank,
        "bytes": table.nbytes,
        "parameters": len(table.entries),
        "layout": f"{engine.layout.key[:12]}/{table.role}/{table.placement.tp_rank}",
    }
    compiled = engine.ranks.get((table.role, table.placement.rank))
    if compiled is not None:
        direct = sum(unit.written for unit in compiled.program.units if unit.direct is not None)
        row.update(bytes=compiled.program.written, direct=direct, packed=compiled.program.written - direct)
    return row
