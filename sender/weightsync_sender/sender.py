"""``WeightSender``: what a trainer calls after each step."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from types import TracebackType

import torch
import torch.distributed as dist

from weightsync_core.errors import EndpointError, SourceError, UpdateFailed
from weightsync_sender.division import Writers
from weightsync_sender.engine import ConfigFolders, Engine
from weightsync_sender.membership import Membership, PodEnvironment
from weightsync_sender.party import Alone, Party, TorchParty
from weightsync_sender.progress import Progress
from weightsync_sender.replica.compiled import ReplicaStore
from weightsync_sender.replica.identity import local_identity
from weightsync_sender.report import EngineState, UpdateReport
from weightsync_sender.roster import AssignedEngines, FixedEngines, Roster
from weightsync_sender.settings import SenderSettings, SettingsError
from weightsync_sender.sources import Source, as_source, is_collective
from weightsync_sender.staging import Ring, SourceMemory
from weightsync_sender.telemetry import Recorder
from weightsync_sender.transports import Transport, make_transport
from weightsync_sender.update import Update, device_for

log = logging.getLogger(__name__)

MOST_VERSION_CHARACTERS = 200
"""Of a version; it travels in HTTP bodies, metrics labels and logs."""


class WeightSender:
    """Brings new weights to a set of sglang engines.

    Keep one for the life of the trainer: layouts, programs, connections and registered memory are kept between updates.
    Not for several threads at once.
    """

    def __init__(
        self,
        *,
        engines: Sequence[str] | Roster,
        config: str | os.PathLike[str] | None = None,
        api_key: str | None = None,
        settings: SenderSettings | None = None,
        group: dist.ProcessGroup | None = None,
        host: str | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """Name the engines; nothing is connected yet.

        Args:
            engines: addresses, e.g. ``http://10.0.0.7:30000``, or where they come from.
            config: folder with the model's config.json; default: the engine's own model path, or the plugin's copy.
            api_key: sent to every engine as bearer token.
            settings: see :class:`SenderSettings`.
            group: trainer ranks that update together, e.g. ``dist.group.WORLD``: each makes a sender with equal arguments, calls
                ``update`` as often, and writes its share. Default: this process alone.
            host: this machine's address as engines see it; default: found from the route to the first engine.
            recorder: keeps metrics and status; closed with this sender.

        Raises:
            EndpointError: an address that cannot be read, none at all, or one twice.
            SettingsError: more engines must serve a version than were given, or a key that is no header.
            PartyError: the ranks of the group did not come together.
        """
        self.settings = settings or SenderSettings()
        self._roster = FixedEngines(engines, api_key, self.settings.minimum_engines) if isinstance(engines, Sequence) else engines
        self._closed = False
        self._host = host
        self._recorder = recorder
        self._folders = ConfigFolders(os.fspath(config) if config is not None else None)
        self._transport: Transport | None = None
        self._memory: SourceMemory | None = None
        self._rings: dict[torch.device, tuple[Ring, int]] = {}
        """With the buffer size that they were made for."""
        self._store = ReplicaStore(torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu"))
        self._rate: float | None = None
        self._party: Party = Alone() if group is None or dist.get_world_size(group) == 1 else TorchParty(group, host)
        self._writers: Writers = {}

    @classmethod
    def from_environment(
        cls,
        *,
        config: str | os.PathLike[str] | None = None,
        settings: SenderSettings | None = None,
        first_assignment_seconds: float = 120.0,
    ) -> WeightSender:
        """The sender of a trainer pod: its engines are those that the operator assigns to it.

        Opens the pod's port (/identity, /status, /metrics, /healthz) and watches its assignment; changes are taken over at
        the start of an update. See :class:`weightsync_sender.membership.PodEnvironment` for the variables.

        Args:
            config: as above.
            settings: what the WeightSync does not say.
            first_assignment_seconds: how long the first update waits for an assignment.

        Raises:
            SettingsError: a variable is missing.
            PortInUse: the port is taken.
        """
        place = PodEnvironment.read()
        recorder = Recorder(place.weight_sync, place.pod, asdict(local_identity()))
        recorder.serve(place.port)
        membership = Membership(place, recorder.assigned)
        membership.start()
        roster = AssignedEngines(membership, place.api_key, first_assignment_seconds)
        return cls(engines=roster, config=config, settings=settings, host=place.host, recorder=recorder)

    def update(
        self,
        named_tensors: Source | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
        version: str | int,
        *,
        progress: Progress = lambda event, fields: None,
    ) -> UpdateReport:
        """Bring one version to all engines.

        Args:
            named_tensors: whole HF tensors: a mapping, (name, tensor) pairs, or a :class:`Source`. They must keep their
                bytes until this returns.
            version: what the engines report afterwards.
            progress: called with events, for display.

        Raises:
            SourceError: the tensors do not fill the engines exactly; nothing was written.
            PartyError: another trainer rank failed; engines that were touched are resumed or fenced.
            UpdateFailed: fewer engines than ``minimum_engines`` serve the version; ``.report`` has each one's state.
        """
        if self._closed:
            raise SettingsError("this sender was closed; make another one")
        source = as_source(named_tensors)
        if is_collective(source) and self._party.size == 1 and getattr(source, "ranks", 1) > 1:
            raise SourceError(
                "the tensors are spread over several trainer ranks, which must update together: give each rank's sender "
                "group=torch.distributed.group.WORLD and call update on all of them"
            )
        if not source.manifest():
            raise SourceError("no tensors to send: an update must bring the whole model")
        _check_version(version)
        if self._recorder is not None:
            self._recorder.began(str(version))
        try:
            engines, settings = self._roster.refresh(self.settings)
            report = self._run(engines, settings, source, str(version), progress)
        except BaseException as error:
            if self._recorder is not None:
                self._recorder.raised(error)
            raise
        failure = self._judge(report, settings)
        if self._recorder is not None:
            self._recorder.reported(report, good=failure is None)
        if failure is not None:
            raise failure
        return report

    def _run(self, engines: Sequence[Engine], settings: SenderSettings, source: Source, version: str, progress: Progress) -> UpdateReport:
        if not engines:
            log.info("no engines are assigned version=%s", version)
            return UpdateReport(version, {}, 0.0)
        transport, memory = self._ready_transport(engines, settings)

        def ring(alive: Sequence[Engine], largest: int) -> Ring:
            return self._ring(transport, alive, settings, largest)

        update = Update(
            engines,
            source,
            version,
            settings,
            transport,
            self._store,
            memory,
            ring,
            self._folders,
            self._party,
            self._writers,
            self._rate,
            progress,
        )
        report = update.run()
        self._rate, self._writers = update.rate, update.writers
        return report

    def close(self) -> None:
        """Give back registered memory and connections. Engines keep what they have.

        While a write hangs that cannot be cut off, its memory stays registered until this process ends.
        """
        self._closed = True
        self._roster.close()
        self._drop_transport()
        self._folders.close()
        self._party.close()
        if self._recorder is not None:
            self._recorder.close()

    def __enter__(self) -> WeightSender:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _ready_transport(self, engines: Sequence[Engine], settings: SenderSettings) -> tuple[Transport, SourceMemory]:
        if self._transport is not None and self._transport.name != settings.transport:
            for engine in engines:
                engine.drop_connections()
            self._drop_transport()
        if self._transport is None or self._memory is None:
            self._transport = make_transport(settings.transport, self._host or address_towards(engines[0]))
            self._memory = SourceMemory(self._transport)
        return self._transport, self._memory

    def _drop_transport(self) -> None:
        if self._roster.stuck():
            self._transport = self._memory = None
            self._rings.clear()
            return
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        for ring, _ in self._rings.values():
            ring.close()
        self._rings.clear()
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    def _ring(self, transport: Transport, engines: Sequence[Engine], settings: SenderSettings, largest: int) -> Ring:
        """The ring for these engines; made once per device, made anew only for larger blocks or another buffer size."""
        device = device_for(engines, transport, settings)
        known = self._rings.get(device)
        if known is None or known[0].capacity < largest or known[1] != settings.buffer_size:
            if known is not None:
                known[0].close()
            self._rings[device] = (Ring(transport, device, settings.buffer_size, largest), settings.buffer_size)
        return self._rings[device][0]

    def _judge(self, report: UpdateReport, settings: SenderSettings) -> UpdateFailed | None:
        """What an update's report comes to: enough engines serve the version, or an error."""
        failed = {name for name, engine in report.engines.items() if engine.state is not EngineState.READY}
        if not failed:
            return None
        left = failed - self._roster.departed(failed)
        expected = report.ready + len(left)
        minimum = expected if settings.minimum_engines is None else settings.minimum_engines
        if report.ready >= minimum:
            return None
        words = [f"{report.engines[name].reason} ({report.engines[name].state.value})" for name in sorted(left)]
        return UpdateFailed(
            f"{report.ready} of {expected} engines serve version {report.version}, at least {minimum} must: {'; '.join(words)}",
            report=report,
        )


def _check_version(given: str | int) -> None:
    version = str(given)
    if given is None or not version:
        raise SourceError("the version is empty; give each update a name of its own")
    if len(version) > MOST_VERSION_CHARACTERS or not version.isprintable():
        raise SourceError(
            f"the version {version[:40]!r} of {len(version)} characters cannot be published: expected at most {MOST_VERSION_CHARACTERS} "
            "printable characters"
        )


def address_towards(engine: Engine) -> str:
    """This machine's address on the route to an engine.

    Raises:
        EndpointError: the engine's host cannot be resolved.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(engine.endpoint.host, engine.endpoint.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # a datagram socket: nothing is sent
            return str(probe.getsockname()[0])
    except OSError as error:
        raise EndpointError(f"cannot find a route to {engine.name}: {error}; check the address, or pass host=") from error
