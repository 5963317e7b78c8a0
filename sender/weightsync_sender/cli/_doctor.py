"""``weightsync doctor``: what is missing here, or at engines, and how to mend it."""

from __future__ import annotations

import importlib
import json as json_module
import os
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from rich.filesize import decimal
from rich.table import Table

from weightsync_core.endpoints import Endpoint, parse_endpoint
from weightsync_core.errors import EngineRefused, MissingLibrary, Unreachable, WeightSyncError
from weightsync_core.libraries import load_library, mooncake_protocol
from weightsync_core.protocol import TRANSPORTS
from weightsync_sender.cli._console import make_console
from weightsync_sender.engine import ConfigFolders, Engine
from weightsync_sender.engine_client import Deadline, EngineClient
from weightsync_sender.replica.identity import local_identity
from weightsync_sender.settings import SenderSettings

_SECONDS = 20.0


class Verdict(StrEnum):
    """How one check ended."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    subject: str
    verdict: Verdict
    seen: str
    cure: str = ""


def run(urls: Sequence[str], transport: str | None, api_key: str | None, *, json: bool) -> int:
    """Check, print; returns 1 if anything failed."""
    findings = list(_here(TRANSPORTS if transport is None else (transport,)))
    for url in urls:
        findings += _engine(parse_endpoint(url), transport, api_key)
    if json:
        json_module.dump([asdict(finding) for finding in findings], sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        colours = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "red"}
        table = Table()
        for column in ("what", "", "seen", "how to mend it"):
            table.add_column(column, overflow="fold")
        for finding in findings:
            table.add_row(finding.subject, f"[{colours[finding.verdict]}]{finding.verdict.value}[/]", finding.seen, finding.cure)
        make_console().print(table)
    return int(any(finding.verdict is Verdict.FAIL for finding in findings))


def _here(transports: Sequence[str]) -> Iterator[Finding]:
    yield _library("torch", "install the build that fits this machine's GPUs (https://pytorch.org)")
    yield _library("sglang", "pip install sglang==0.5.23, the engines' version: the sender builds their models")
    works = 0
    for transport in transports:
        try:
            module = load_library(transport)
            works += 1
            yield Finding(f"transport {transport}", Verdict.OK, str(module.__name__))
        except MissingLibrary as error:
            yield Finding(f"transport {transport}", Verdict.FAIL if len(transports) == 1 else Verdict.WARN, str(error), "see left")
    if not works:
        yield Finding("transports", Verdict.FAIL, "none works", "pip install 'p2p-weightsync[mooncake]' or 'p2p-weightsync[nixl]'")
    devices = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
    yield Finding(
        "RDMA devices",
        Verdict.OK if devices else Verdict.WARN,
        ", ".join(devices) or "none",
        "" if devices else "bytes travel over TCP or shared memory; on RDMA hosts install ibverbs-providers and pass the devices in",
    )
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    enough = soft == resource.RLIM_INFINITY or soft >= SenderSettings().buffer_size
    yield Finding(
        "memlock limit",
        Verdict.OK if enough else (Verdict.FAIL if devices else Verdict.WARN),
        "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} bytes",
        "" if enough else "RDMA must lock all registered memory: ulimit -l unlimited, or capability IPC_LOCK in a pod",
    )
    allocator = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") + os.environ.get("PYTORCH_ALLOC_CONF", "")
    expandable = "expandable_segments:True" in allocator
    yield Finding(
        "CUDA allocator",
        Verdict.FAIL if expandable else Verdict.OK,
        allocator or "default",
        "expandable segments cannot be registered: unset it in trainer and engines" if expandable else "",
    )
    yield _guarded("this build", lambda: Finding("this build", Verdict.OK, _identity_text()))


def _identity_text() -> str:
    here = local_identity()
    return f"sglang {here.sglang}, torch {here.torch}, {here.arch}"


def _library(name: str, cure: str) -> Finding:
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        return Finding(name, Verdict.FAIL, str(error), cure)
    return Finding(name, Verdict.OK, str(getattr(module, "__version__", "installed")))


def _guarded(subject: str, check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except (WeightSyncError, ImportError) as error:
        return Finding(subject, Verdict.FAIL, str(error))


def _engine(endpoint: Endpoint, transport: str | None, api_key: str | None) -> list[Finding]:
    client = EngineClient(endpoint, api_key)
    name = endpoint.url
    folders = ConfigFolders(None)
    engine = Engine(endpoint, client)
    try:
        info = client.server_info(Deadline.after(_SECONDS, "asking for server_info"))
        findings = [Finding(name, Verdict.OK, f"sglang {info.get('version')}, tp {info.get('tp_size')}, serves {info.get('model_path')}")]
        if info.get("host") in ("127.0.0.1", "localhost", "::1"):
            findings.append(
                Finding(name, Verdict.WARN, f"listens on {info['host']} only", "start it with --host 0.0.0.0 to reach it from other hosts")
            )
        identity = client.identity(Deadline.after(_SECONDS, "asking for identity"))
        findings.append(
            Finding(name, Verdict.OK, "plugin installed")
            if identity
            else Finding(
                name, Verdict.WARN, "no plugin", "pip install 'p2p-weightsync[engine]' beside its sglang: NIXL, drafts, digests, leases"
            )
        )
        chosen = _transports(identity) if transport is None else [transport]
        if identity and identity["lease"]["owner"]:
            findings.append(Finding(name, Verdict.WARN, f"being updated by {identity['lease']['owner']}"))
        engine.connect(SenderSettings(transport=chosen[0]), mooncake_protocol(), folders, Deadline.after(_SECONDS, "connecting"))
        findings += [_published(engine, name, each) for each in chosen]
        if any(table.open_session for table in engine.tables):
            findings.append(
                Finding(
                    name, Verdict.WARN, "an update session is open: it is being updated, or was left incomplete and is paused", "push again"
                )
            )
        return findings
    except Unreachable as error:
        return [Finding(name, Verdict.FAIL, str(error).removeprefix(f"{name}: "), "start it, or check address, port and network policies")]
    except EngineRefused as error:
        return [Finding(name, Verdict.FAIL, str(error), "see left")]
    except (WeightSyncError, ImportError) as error:
        return [Finding(name, Verdict.FAIL, str(error))]
    finally:
        engine.close()
        folders.close()


def _transports(identity: dict[str, Any] | None) -> list[str]:
    """What an engine publishes; without the plugin that is what sglang's own seeding uses."""
    published = {name for rank in identity["ranks"] for name in rank["transports"]} if identity else set()
    return sorted(published) or ["mooncake"]


def _published(engine: Engine, name: str, transport: str) -> Finding:
    try:
        engine.read_tables(SenderSettings(transport=transport), mooncake_protocol(), Deadline.after(_SECONDS, "reading tables"))
    except WeightSyncError as error:
        return Finding(name, Verdict.FAIL, str(error))
    count = len(engine.tables)
    size = sum(table.nbytes for table in engine.tables)
    return Finding(name, Verdict.OK, f"{count} parameter table{'s' * (count != 1)} over {transport}, {decimal(size)}")
