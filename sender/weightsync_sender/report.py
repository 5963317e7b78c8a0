"""What an update did, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from weightsync_core.errors import (
    BufferTooSmall,
    ControlCallError,
    DeadlineExceeded,
    DocumentError,
    EngineRefused,
    LayoutError,
    LeaseLost,
    SourceError,
    TransportError,
    Unreachable,
    VerificationError,
)


class EngineState(StrEnum):
    """Where an update left one engine."""

    READY = "ready"
    """Serves the new version."""
    SKIPPED = "skipped"
    """Untouched: serves its old version."""
    FENCED = "fenced"
    """Got some bytes but not a proven whole: left paused until an update succeeds."""
    GONE = "gone"
    """Does not answer any more, so whether it is paused cannot be said."""


class Failure(StrEnum):
    """Why an engine did not get a version: a closed set, for counting."""

    UNREACHABLE = "unreachable"
    """No connection to its HTTP server."""
    REFUSED = "refused"
    """It must not or cannot be written."""
    CONTROL_CALL = "control_call"
    """One of its HTTP routes answered an error, or too late."""
    LEASE = "lease"
    """Another sender has it, or took it over."""
    SOURCE = "source"
    """The tensors do not fill it."""
    LAYOUT = "layout"
    """Its parameters cannot be reproduced here."""
    DEADLINE = "deadline"
    """A step took too long."""
    TRANSPORT = "transport"
    """A connection or a write of the transport's library failed."""
    VERIFICATION = "verification"
    """It holds other bytes than were meant."""
    INTERRUPTED = "interrupted"
    """The update was stopped."""
    INTERNAL = "internal"
    """Anything else."""


_KINDS: tuple[tuple[type[BaseException], Failure], ...] = (
    (LeaseLost, Failure.LEASE),
    (Unreachable, Failure.UNREACHABLE),
    (ControlCallError, Failure.CONTROL_CALL),
    (EngineRefused, Failure.REFUSED),
    (BufferTooSmall, Failure.SOURCE),
    (SourceError, Failure.SOURCE),
    (LayoutError, Failure.LAYOUT),
    (DocumentError, Failure.LAYOUT),
    (DeadlineExceeded, Failure.DEADLINE),
    (TransportError, Failure.TRANSPORT),
    (VerificationError, Failure.VERIFICATION),
    (KeyboardInterrupt, Failure.INTERRUPTED),
    (SystemExit, Failure.INTERRUPTED),
)


def failure_of(error: BaseException) -> Failure:
    """The kind of an error."""
    return next((failure for kind, failure in _KINDS if isinstance(error, kind)), Failure.INTERNAL)


@dataclass(frozen=True)
class EngineReport:
    """One engine in one update."""

    engine: str
    state: EngineState
    planned_bytes: int = 0
    written_bytes: int = 0
    targets: int = 0
    """(role, rank) pairs."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """By phase: connect, pause, flush, begin, write, verify, end, resume."""
    transport: str = ""
    """As really used: ``mooncake/tcp``, ``nixl/UCX``."""
    error: str = ""
    failure: Failure | None = None
    """The error's kind; None when ready."""
    version: str = ""
    """The version that it serves as far as known; empty if unknown."""
    notes: tuple[str, ...] = ()
    """What could not be checked, and why."""

    @property
    def reason(self) -> str:
        """The error, beginning with the engine's name."""
        return self.error if self.error.startswith(self.engine) else f"{self.engine}: {self.error}"

    @property
    def rate(self) -> float:
        """Bytes per second while writing."""
        spent = self.seconds.get("write", 0.0)
        return self.written_bytes / spent if spent else 0.0


@dataclass(frozen=True)
class UpdateReport:
    """One update over all engines."""

    version: str
    engines: Mapping[str, EngineReport]
    seconds: float
    direct_bytes: int = 0
    """Written from where the tensors lay."""
    packed_bytes: int = 0
    """Written from staging memory, counted once per target."""
    registrations: int = 0
    """Memory regions registered with the transport at the end."""
    unused: tuple[str, ...] = ()
    """HF tensors that no engine took, as allowed."""

    @property
    def ready(self) -> int:
        """Engines that serve the new version."""
        return sum(report.state is EngineState.READY for report in self.engines.values())

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON-ready values."""
        return {
            "version": self.version,
            "seconds": round(self.seconds, 4),
            "ready": self.ready,
            "direct_bytes": self.direct_bytes,
            "packed_bytes": self.packed_bytes,
            "registrations": self.registrations,
            "unused": list(self.unused),
            "engines": {
                name: {
                    "state": report.state.value,
                    "planned_bytes": report.planned_bytes,
                    "written_bytes": report.written_bytes,
                    "targets": report.targets,
                    "seconds": {phase: round(spent, 4) for phase, spent in report.seconds.items()},
                    "bytes_per_second": round(report.rate),
                    "transport": report.transport,
                    "version": report.version,
                    "error": report.error,
                    "failure": report.failure.value if report.failure else None,
                    "notes": list(report.notes),
                }
                for name, report in self.engines.items()
            },
        }
