"""What a user may choose about updates. Every field says its unit, its default and why."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum

from weightsync_core.errors import WeightSyncError
from weightsync_core.protocol import TRANSPORTS


class PauseMode(StrEnum):
    """How running requests are treated (sglang's ``/pause_generation``)."""

    ABORT = "abort"
    """They end and return what they have."""
    RETRACT = "retract"
    """They wait and are computed again under the new weights."""
    IN_PLACE = "in_place"
    """They wait and go on with the KV cache of the old weights; the cache is not flushed."""


class Verify(StrEnum):
    """How an update proves what the engine holds, beyond written bytes."""

    OFF = "off"
    DIGEST = "digest"
    """Both ends sum up the raw bytes of every parameter, the engine on its device (stock engines: sglang's checksums)."""
    SNAPSHOT = "snapshot"
    """Update, snapshot, randomise, update again, compare: proves that an update overwrites every tensor. Twice the time."""


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Seconds that each step of an update may take, per engine."""

    connect: float = 30.0
    """Reading one engine's tables and opening its sessions."""
    pause: float = 60.0
    """Aborting waits for running requests to end."""
    flush: float = 60.0
    """``/flush_cache`` answers 400 while requests run; it is asked again until then."""
    begin: float = 120.0
    """Restoring packed weights."""
    write: float = 60.0
    """One batch of writes, on top of its bytes at ``slowest_rate``."""
    slowest_rate: float = 50e6
    """Bytes per second below which a transfer counts as hung."""
    verify: float = 300.0
    """Digests or checksums of one engine."""
    end: float = 300.0
    """Quantised repacking and derived weights."""
    resume: float = 30.0
    """Setting the version and continuing; also tried when the update failed."""
    lease: float = 60.0
    """Waiting for another sender to finish with an engine."""
    ranks: float = 1800.0
    """Waiting for the other trainer ranks at one step; one that died is noticed in 15 s, whatever this says."""


@dataclass(frozen=True, kw_only=True)
class SenderSettings:
    """How a sender works. All defaults suit one machine; a cluster's are set by the operator."""

    transport: str = "mooncake"
    """``mooncake`` or ``nixl``; the engine must publish it."""
    buffer_size: int = 512 << 20
    """Bytes of registered staging memory. At least the largest block that is packed in one piece."""
    pause_mode: PauseMode = PauseMode.ABORT
    verify: Verify = Verify.OFF
    minimum_engines: int | None = None
    """Engines that must serve the new version for an update to count; None for all."""
    allow_unused: tuple[str, ...] = ()
    """Regular expressions of HF tensor names that no engine parameter takes; others are an error."""
    allow_cast: bool = False
    """Let values be rounded to the engine's dtype (float32 tensors into bfloat16 parameters)."""
    require_rdma: bool = False
    """Make a connection over anything else than RDMA an error instead of a slow update."""
    batch_bytes: int = 64 << 20
    """Bytes after which a batch of writes is posted."""
    batch_count: int = 1024
    """Descriptors after which a batch of writes is posted."""
    in_flight: int = 4
    """Batches under way to one target before the next waits."""
    flush_after_update: bool = True
    """Drop the prefix cache, whose entries belong to the old weights (never with ``in_place``)."""
    timeouts: Timeouts = field(default_factory=Timeouts)

    def __post_init__(self) -> None:
        problems = []
        if self.transport not in TRANSPORTS:
            problems.append(f"transport is {self.transport!r}, expected one of {', '.join(TRANSPORTS)}")
        if self.buffer_size <= 0:
            problems.append(f"buffer_size is {self.buffer_size} bytes, expected more than 0")
        if self.minimum_engines is not None and self.minimum_engines < 0:
            problems.append(f"minimum_engines is {self.minimum_engines}, expected 0 or more")
        for pattern in self.allow_unused:
            try:
                re.compile(pattern)
            except re.error as error:
                problems.append(f"allow_unused has {pattern!r}, which is no regular expression: {error}")
        if problems:
            raise SettingsError("; ".join(problems))


class SettingsError(WeightSyncError, ValueError):
    """A setting out of its range."""
