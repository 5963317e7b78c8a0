"""The trainer ranks that bring one update together, and how they agree.

``exchange`` is all they need: every rank gives a value and gets everybody's, or an error that all of them see. It goes over
torch's key-value store, held by the first rank, not over collectives: a rank that dies is noticed by its pulse within
seconds, in whatever phase, where a collective would wait for its time-out. No tensor travels here.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, cast

import torch.distributed as dist

from weightsync_core.errors import WeightSyncError, listing

PULSE_SECONDS = 1.0
"""Between two signs of life of a rank."""
SILENCE_SECONDS = 15.0
"""A rank without a sign of life for so long counts as dead."""
_POLL_SECONDS = 0.005
_END_SECONDS = 10.0
"""How long rank 0 waits for the others to take the last answer."""
_CALL_SECONDS = 20.0
"""For one call to the store; its host is dead or stopped if it takes longer."""


class PartyError(WeightSyncError):
    """Another trainer rank failed, died or did not come in time; names it and what it said."""

    def __init__(self, message: str, *, shared: bool = False) -> None:
        super().__init__(message)
        self.shared = shared
        """Whether every rank that lives gets this error at the same step, so that none has gone on."""


class Party(Protocol):
    """Trainer ranks that update together."""

    rank: int
    """Of this process; rank 0 leads."""
    size: int

    def begin(self) -> None:
        """A new update begins."""

    def exchange(self, what: str, value: Any, seconds: float) -> list[Any]:
        """Give a value, get everybody's, by rank.

        Args:
            what: what is exchanged, for messages; the same on all ranks.
            value: anything that pickles.
            seconds: how long to wait for the others.

        Raises:
            PartyError: a rank failed, died, or did not come in time.
        """
        ...

    def end(self) -> None:
        """The update is over for all: rank 0 may end its process without taking an answer from the others."""

    def fail(self, why: str) -> None:
        """Tell the others, who wait for this rank, that it gave the update up."""

    def close(self) -> None:
        """Leave."""


class Alone:
    """A party of one."""

    rank, size = 0, 1

    def begin(self) -> None:
        """Nothing to do."""

    def exchange(self, what: str, value: Any, seconds: float) -> list[Any]:
        """One's own value."""
        return [value]

    def end(self) -> None:
        """Nobody to wait for."""

    def fail(self, why: str) -> None:
        """Nobody to tell."""

    def close(self) -> None:
        """Nothing to do."""


@dataclass(frozen=True)
class _Failed:
    """Takes the place of a value."""

    why: str


class _Store:
    """torch's TCPStore, every call of which ends: one whose host is stopped would block for ever."""

    def __init__(self, store: dist.TCPStore) -> None:
        self._store = store
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="weightsync-party", daemon=True).start()

    def set(self, key: str, value: bytes) -> None:
        self._call(lambda: self._store.set(key, value))  # type: ignore[arg-type]  # bytes are taken too

    def get(self, key: str) -> bytes:
        """Of a key that is there."""
        return cast(bytes, self._call(lambda: self._store.get(key)))

    def has(self, *keys: str) -> bool:
        return bool(self._call(lambda: self._store.check(list(keys))))

    def delete(self, key: str) -> None:
        self._call(lambda: self._store.delete_key(key))

    def close(self) -> None:
        self._calls.put(None)

    def _call(self, call: Callable[[], Any]) -> Any:
        future: Future[Any] = Future()
        self._calls.put((future, call))
        try:
            return future.result(_CALL_SECONDS)
        except TimeoutError as error:
            raise PartyError(f"trainer rank 0, which holds the store, did not answer in {_CALL_SECONDS:g} s") from error
        except RuntimeError as error:  # torch.distributed.DistNetworkError and its kin
            raise PartyError(f"trainer rank 0, which holds the store, cannot be reached: {error}") from error

    def _serve(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call = item
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)


class TorchParty:
    """The ranks of a torch process group."""

    def __init__(self, group: Any, host: str | None = None) -> None:
        """Meet the others; every rank of the group must do so.

        Args:
            group: e.g. ``dist.group.WORLD``; any backend.
            host: address of the group's first rank as the others see it; default MASTER_ADDR where that is this rank's
                host, else the host's name.

        Raises:
            PartyError: they did not all come.
        """
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        own: Any = dist.new_group(dist.get_process_group_ranks(group), backend="gloo", use_local_synchronization=True)
        place: list[Any] = [None]
        held: dist.TCPStore | None = None
        if self.rank == 0:
            held = dist.TCPStore("0.0.0.0", 0, None, True, wait_for_workers=False)
            place = [(host or _own_address(), held.port)]
        dist.broadcast_object_list(place, src=dist.get_global_rank(group, 0), group=own)
        dist.destroy_process_group(own)
        self._held = held
        address, port = place[0]
        self._address = f"{address}:{port}"

        def connect() -> _Store:
            try:
                limit = timedelta(seconds=_CALL_SECONDS)
                return _Store(dist.TCPStore("127.0.0.1" if held else address, port, None, False, limit, wait_for_workers=False))
            except RuntimeError as error:
                raise PartyError(f"cannot reach trainer rank 0 at {self._address}: {error}") from error

        self._store, self._pulse = connect(), connect()
        self._update = self._step = 0
        self._closed = threading.Event()
        self._seen: dict[int, tuple[bytes, float]] = {}
        """Of each rank, its last pulse and when it was new."""
        self._beat(0)
        threading.Thread(target=self._live, name="weightsync-pulse", daemon=True).start()

    def begin(self) -> None:
        self._update += 1
        self._step = 0
        self._seen.clear()

    def exchange(self, what: str, value: Any, seconds: float) -> list[Any]:
        self._step += 1
        key = f"{self._update}/{self._step}"
        until = time.monotonic() + seconds
        self._store.set(f"{key}/{self.rank}", pickle.dumps((what, value)))
        if self.rank == 0:
            answer = self._gather(key, what, seconds)
            self._store.set(f"{key}/all", pickle.dumps(answer))
            self._forget(self._step - 2)
        else:
            while not self._store.has(f"{key}/all"):
                self._require_alive([0], what)
                if time.monotonic() > until:
                    raise PartyError(f"trainer rank 0 did not come to {what!r} in {seconds:g} s")
                time.sleep(_POLL_SECONDS)
            answer = pickle.loads(self._store.get(f"{key}/all"))
        if isinstance(answer, _Failed):
            raise PartyError(answer.why, shared=True)
        return list(answer)

    def end(self) -> None:
        done = [f"{self._update}/done/{rank}" for rank in range(1, self.size)]
        with contextlib.suppress(PartyError):  # all have the answer, whatever becomes of the others now
            if self.rank > 0:
                self._store.set(done[self.rank - 1], b"1")
                return
            until = time.monotonic() + _END_SECONDS
            while not self._store.has(*done) and time.monotonic() < until:
                time.sleep(_POLL_SECONDS)
            for key in done:
                self._store.delete(key)

    def fail(self, why: str) -> None:
        self._step += 1
        key = f"{self._update}/{self._step}"
        with contextlib.suppress(PartyError):
            if self.rank == 0:
                self._store.set(f"{key}/all", pickle.dumps(_Failed(f"trainer rank 0 failed: {why}")))
            else:
                self._store.set(f"{key}/{self.rank}", pickle.dumps(("", _Failed(why))))

    def close(self) -> None:
        self._closed.set()
        self._store.close()
        self._pulse.close()

    def _gather(self, key: str, what: str, seconds: float) -> list[Any] | _Failed:
        until = time.monotonic() + seconds
        missing = set(range(self.size))
        values: dict[int, Any] = {}
        while missing:
            for rank in sorted(missing):
                if self._store.has(f"{key}/{rank}"):
                    said, values[rank] = pickle.loads(self._store.get(f"{key}/{rank}"))
                    missing.discard(rank)
                    if isinstance(values[rank], _Failed):
                        return _Failed(f"trainer rank {rank} failed: {values[rank].why}")
                    if said != what:
                        return _Failed(f"trainer rank {rank} is at {said!r} while rank 0 is at {what!r}: all must make the same calls")
            try:
                self._require_alive(sorted(missing), what)
            except PartyError as error:
                return _Failed(str(error))
            if missing and time.monotonic() > until:
                return _Failed(f"trainer ranks {listing(map(str, sorted(missing)))} did not come to {what!r} in {seconds:g} s")
            if missing:
                time.sleep(_POLL_SECONDS)
        return [values[rank] for rank in range(self.size)]

    def _forget(self, step: int) -> None:
        """Take away what all have read: they have come to the step after it."""
        if step > 0:
            for name in (*map(str, range(self.size)), "all"):
                self._store.delete(f"{self._update}/{step}/{name}")

    def _require_alive(self, ranks: list[int], what: str) -> None:
        now = time.monotonic()
        for rank in ranks:
            last = self._seen.get(rank)
            if last is not None and now - last[1] < PULSE_SECONDS:
                continue
            pulse = self._store.get(f"pulse/{rank}") if self._store.has(f"pulse/{rank}") else b""
            if last is None or pulse != last[0]:
                self._seen[rank] = (pulse, now)
            elif now - last[1] > SILENCE_SECONDS:
                raise PartyError(f"trainer rank {rank} gave no sign of life for {SILENCE_SECONDS:g} s at {what!r}: it died or hangs")

    def _beat(self, number: int) -> None:
        self._pulse.set(f"pulse/{self.rank}", str(number).encode())

    def _live(self) -> None:
        number = 0
        while not self._closed.wait(PULSE_SECONDS):
            number += 1
            with contextlib.suppress(PartyError):
                self._beat(number)


def _own_address() -> str:
    master = os.environ.get("MASTER_ADDR", "")
    return master if master and dist.get_rank() == 0 else socket.gethostname()
