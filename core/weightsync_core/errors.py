"""The exception tree. Every message says what was tried, what was seen, what was expected and what to do.

Catch ``WeightSyncError`` for all of it. Lower-level causes stay chained (``raise ... from``).
"""

from __future__ import annotations

from collections.abc import Iterable


class WeightSyncError(Exception):
    """Base of all errors that this product raises on purpose."""


class EndpointError(WeightSyncError, ValueError):
    """An engine address that cannot be read."""


class DocumentError(WeightSyncError, ValueError):
    """A published document (parameter table, assignment) that breaks its schema or its digest."""


class PlanError(WeightSyncError, ValueError):
    """Targets that cannot be given to the trainer ranks at hand."""


class MissingLibrary(WeightSyncError, ImportError):
    """A transport's library is absent or cannot load; names it and what still works."""


class EngineRefused(WeightSyncError):
    """An engine whose weights must not be written; the reason is in the engine's own words where it has any."""


class LayoutError(WeightSyncError):
    """An engine rank's parameters cannot be reproduced here, or differ from what the engine published."""


class SourceError(WeightSyncError, ValueError):
    """The trainer's tensors do not fill the engine: missing, unknown, wrong shape or dtype."""

    def __init__(self, message: str, *, names: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.names = tuple(names)
        """Hugging Face tensor names, or engine parameter names, that the error is about."""


class BufferTooSmall(WeightSyncError, ValueError):
    """The staging buffer cannot hold the largest block that must be packed in one piece."""

    def __init__(self, message: str, *, needed: int) -> None:
        super().__init__(message)
        self.needed = needed
        """Bytes that would be enough."""


class ControlCallError(WeightSyncError):
    """A control call to one engine failed; carries the call, the HTTP status and the remote body."""

    def __init__(self, message: str, *, call: str, status: int | None = None, body: str = "") -> None:
        super().__init__(message)
        self.call, self.status, self.body = call, status, body


class Unreachable(ControlCallError):
    """The engine's HTTP server does not answer at all."""


class LeaseLost(EngineRefused):
    """Another sender is updating this engine, or has taken it over."""


class DeadlineExceeded(WeightSyncError, TimeoutError):
    """An absolute deadline passed; says which step and how long it was given."""


class TransportError(WeightSyncError):
    """A one-sided write, a registration or a connection failed in the transport's library."""


class VerificationError(WeightSyncError):
    """The engine holds other bytes than were meant; names the first differing parameters."""


class UpdateFailed(WeightSyncError):
    """Fewer engines than the stated minimum serve the new version. ``report`` has every engine's state."""

    def __init__(self, message: str, *, report: object) -> None:
        super().__init__(message)
        self.report = report


def listing(names: Iterable[str], limit: int = 20) -> str:
    """Join names for a message, cut after ``limit`` with the number left out."""
    known = list(names)
    shown = ", ".join(known[:limit])
    return shown if len(known) <= limit else f"{shown} and {len(known) - limit} more"
