"""One engine rank: what it publishes, and what it does when an update begins and ends.

Lives in the scheduler process. In: sglang's model runners, as they come up. Out: live tables and digests as JSON texts.
Never changes a parameter.
"""

from __future__ import annotations

import json
import logging
import os
import uuid
from dataclasses import dataclass, field
from typing import Any

import torch

from weightsync_core.digest import digest_text, lane_sums
from weightsync_core.errors import DocumentError, WeightSyncError, listing
from weightsync_core.protocol import TRANSPORTS
from weightsync_engine import derived
from weightsync_engine.memory import describe_parameters, parameter_spans, raw_bytes
from weightsync_engine.publishers import Publisher, make_publisher

log = logging.getLogger(__name__)


def wanted_transports() -> tuple[str, ...]:
    """WEIGHTSYNC_TRANSPORTS: ``mooncake`` (the default), ``nixl``, ``mooncake,nixl``, or ``none`` to publish nothing.

    Raises:
        DocumentError: an unknown name.
    """
    text = os.environ.get("WEIGHTSYNC_TRANSPORTS", "mooncake").strip()
    names = tuple(name.strip() for name in text.split(",") if name.strip() and name.strip() != "none")
    unknown = [name for name in names if name not in TRANSPORTS]
    if unknown:
        raise DocumentError(f"WEIGHTSYNC_TRANSPORTS={text!r} names {listing(unknown)}; known are {listing(TRANSPORTS)} and none")
    return names


def identity() -> dict[str, str]:
    """Fields of :class:`weightsync_core.tables.Identity` for this process."""
    from sglang.version import __version__

    return {"sglang": __version__, "torch": torch.__version__, "arch": architecture()}


def architecture() -> str:
    """``cpu``, or the compute capability of the current CUDA device as ``sm_90``."""
    if not torch.cuda.is_available():
        return "cpu"
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


@dataclass
class EngineRank:
    """The publishing state of one scheduler process; ``runners`` by role."""

    transports: tuple[str, ...]
    runners: dict[str, Any] = field(default_factory=dict)
    publishers: dict[str, Publisher] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)
    placement: dict[str, int] = field(default_factory=dict)
    manager: Any = None
    """sglang's SchedulerWeightUpdaterManager, known from its first call on."""
    _process: str = field(default_factory=lambda: uuid.uuid4().hex)
    _memory_epoch: int = 0

    @property
    def generation(self) -> str:
        """Changes at every start and whenever weight memory was given up and taken back."""
        return f"{self._process}.{self._memory_epoch}"

    @property
    def open_session(self) -> bool:
        """Whether a weight-update session is open."""
        return self.manager is not None and self.manager._session is not None

    def add_runner(self, runner: Any) -> None:
        """A model runner finished loading (AFTER ``ModelRunner.initialize``)."""
        from sglang.srt.runtime_context import get_parallel

        if not self.placement:
            parallel = get_parallel()
            self.placement = {
                "rank": torch.distributed.get_rank() if torch.distributed.is_initialized() else 0,
                "tp_rank": parallel.tp_rank,
                "tp_size": parallel.tp_size,
                "pp_rank": parallel.pp_rank,
                "pp_size": parallel.pp_size,
                "dp_rank": parallel.dp_rank or 0,
                "dp_size": parallel.dp_size,
                "ep_rank": parallel.moe_ep_rank,
                "ep_size": parallel.moe_ep_size,
            }
            self._publish()
        self.runners["draft" if runner.is_draft_worker else "target"] = runner
        self._cover(runner.model)

    def parameter_bytes(self) -> dict[str, int]:
        """Bytes of all parameters by role."""
        return {
            role: sum(parameter.numel() * parameter.element_size() for parameter in runner.model.parameters())
            for role, runner in self.runners.items()
        }

    def table(self, role: str, model: torch.nn.Module) -> str:
        """The live table of one role, as JSON (``ANSWER_KEY`` of the live call)."""
        self._cover(model)
        return json.dumps(
            {
                "role": role,
                "placement": self.placement,
                "generation": self.generation,
                "identity": identity(),
                "parameters": describe_parameters(model),
                "sessions": {name: publisher.session() for name, publisher in self.publishers.items()},
                "unavailable": self.unavailable,
                "refusal": self._refusal(model),
                "open_session": self.open_session,
            }
        )

    def digests(self, role: str, model: torch.nn.Module, wanted_of: dict[str, dict[str, list[tuple[int, int]] | None]]) -> str:
        """Digests of raw parameter bytes as JSON ``{name: digest}``.

        Args:
            wanted_of: names to byte ranges (None for all), for ``role/dp_rank/tp_rank``, else for ``role``.
        """
        mine = f"{role}/{self.placement['dp_rank']}/{self.placement['tp_rank']}"
        wanted = wanted_of.get(mine, wanted_of.get(role, {}))
        parameters = dict(model.named_parameters(remove_duplicate=False))
        unknown = [name for name in wanted if name not in parameters]
        if unknown:
            raise DocumentError(f"digest asked for parameters that this rank does not have: {listing(unknown)}")
        found = {}
        for name, ranges in wanted.items():
            raw = raw_bytes(parameters[name])
            found[name] = digest_text(lane_sums(raw, [(0, raw.numel())] if ranges is None else ranges, torch))
        return json.dumps(found)

    def revoke(self) -> None:
        """Publish over new sessions: whoever wrote through the old ones is cut off, even in the middle of a write.

        Shared memory and CUDA IPC cannot be taken back from a process on this machine that has them already.
        """
        log.warning("weightsync: sessions revoked transports=%s", listing(self.publishers))
        self._publish_anew()
        if self.open_session:
            self.opened()

    def _publish_anew(self) -> None:
        for publisher in self.publishers.values():
            publisher.close()
        self.publishers.clear()
        self._publish()
        for runner in self.runners.values():
            self._cover(runner.model)

    def opened(self) -> None:
        """A weight-update session began on this rank."""
        for publisher in self.publishers.values():
            publisher.opened()

    def closed(self, model: torch.nn.Module) -> None:
        """A weight-update session ended: derived buffers follow their weights, progress stops."""
        derived.refresh(model)
        for publisher in self.publishers.values():
            publisher.closed()

    def memory_resumed(self) -> None:
        """Weight memory was released and taken back: whatever a peer, or a card, knew of its pages is void.

        The addresses are the old ones, so that nothing else would show that a registration maps pages that are gone.
        """
        self._memory_epoch += 1
        self._publish_anew()

    def _refusal(self, model: torch.nn.Module) -> str:
        if self.manager is not None and "weights" in self.manager.offload_tags:
            return "weight memory is released (release_memory_occupation); call /resume_memory_occupation first"
        return derived.refusal(model)

    def _publish(self) -> None:
        from sglang.srt.utils.network import get_local_ip_auto

        for transport in self.transports:
            try:
                self.publishers[transport] = make_publisher(transport, get_local_ip_auto())
            except WeightSyncError as error:
                self._give_up(transport, error)

    def _cover(self, model: torch.nn.Module) -> None:
        first = next((parameter for parameter in model.parameters() if parameter.numel()), None)
        if first is None or (self.manager is not None and "weights" in self.manager.offload_tags):
            return
        spans = parameter_spans(model)
        for transport, publisher in list(self.publishers.items()):
            try:
                publisher.cover(spans, first.device.index if first.is_cuda else None)
            except WeightSyncError as error:
                self._give_up(transport, error)

    def _give_up(self, transport: str, error: WeightSyncError) -> None:
        """An engine serves on without a transport; senders are told why at connect."""
        log.error("weightsync: transport=%s not published: %s", transport, error)
        self.publishers.pop(transport, None)
        self.unavailable[transport] = str(error)
