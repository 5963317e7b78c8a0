"""Registered memory that writes read from: a ring of slots for packed bytes, and the sources' own memory.

A slot is packed, then written to one or many targets, and reused only when every write that reads it is known to be over.
A write that hangs keeps its slot for as long as it hangs; a fresh slot takes its place.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from weightsync_core.errors import BufferTooSmall, TransportError
from weightsync_sender.transports import Memory, Transport

log = logging.getLogger(__name__)

_ALIGNMENT = 256
_MOST_SLOTS = 8
_SMALLEST_SLOT = 4 << 20
_TRIALS = 3
"""Registrations that are measured before their cost decides anything."""


def memory_of(tensor: torch.Tensor) -> Memory:
    """The kind of memory that a tensor lies in."""
    return Memory(tensor.device.index if tensor.is_cuda else None)


@dataclass(eq=False)
class Slot:
    """One registered block; ``readers`` counts writes that may still read it."""

    buffer: torch.Tensor
    token: object
    used: int = 0
    readers: int = 0

    @property
    def free(self) -> bool:
        """Whether nothing reads or will read what lies in it."""
        return self.readers == 0

    def release(self) -> None:
        """One reader less."""
        self.readers -= 1

    def take(self, nbytes: int, *, adjoining: bool = False) -> torch.Tensor | None:
        """A piece of the slot as uint8 tensor, or None if it does not fit.

        Args:
            adjoining: put it right behind the last piece, so that both can be written as one.
        """
        start = self.used if adjoining and self.used % 8 == 0 else -(-self.used // _ALIGNMENT) * _ALIGNMENT
        if start + nbytes > self.buffer.numel():
            return None
        self.used = start + nbytes
        return self.buffer[start : start + nbytes]


class Ring:
    """Slots on one device. Made for the largest piece; grows only while hung writes hold slots."""

    def __init__(self, transport: Transport, device: torch.device, buffer_size: int, largest: int) -> None:
        """Allocate and register.

        Raises:
            BufferTooSmall: the largest piece does not fit into ``buffer_size``.
            TransportError: the transport cannot register the memory.
        """
        needed = -(-max(largest, 1) // _ALIGNMENT) * _ALIGNMENT
        if needed > buffer_size:
            raise BufferTooSmall(
                f"the staging buffer of {buffer_size} bytes is smaller than the largest block that is packed in one piece: set at least "
                f"{needed} bytes (--buffer-size {-(-needed // (1 << 20))}MB)",
                needed=needed,
            )
        count = min(max(buffer_size // max(needed, _SMALLEST_SLOT), 1), _MOST_SLOTS)
        self._transport, self._device = transport, device
        self._size = buffer_size // count // _ALIGNMENT * _ALIGNMENT
        self._count = count
        self._slots = [self._make() for _ in range(count)]
        self._lost: list[Slot] = []
        self.capacity = self._size

    @property
    def device(self) -> torch.device:
        """Where the slots lie."""
        return self._device

    @property
    def registered(self) -> int:
        """Slots registered now, hung ones included."""
        return len(self._slots) + len(self._lost)

    def acquire(self) -> Slot | None:
        """A free slot, emptied, or None."""
        for slot in self._slots:
            if slot.free:
                slot.used = 0
                return slot
        return None

    def extend(self) -> bool:
        """Add a slot, up to twice the buffer size in all; whether there was room for it."""
        if len(self._slots) + len(self._lost) >= 2 * self._count:
            return False
        slot = self._try_to_make()
        if slot is not None:
            self._slots.append(slot)
        return slot is not None

    def give_up(self, slot: Slot) -> None:
        """A write that reads ``slot`` hangs: put a fresh slot into the ring in its place, if one can be had."""
        if slot in self._slots:
            self._slots.remove(slot)
            self._lost.append(slot)
            fresh = self._try_to_make()
            if fresh is not None:
                self._slots.append(fresh)

    @property
    def exhausted(self) -> bool:
        """Whether hung writes hold every slot that could be made."""
        return not self._slots

    def sweep(self) -> None:
        """Free slots whose hung writes are over now."""
        for slot in [slot for slot in self._lost if slot.free]:
            self._lost.remove(slot)
            self._transport.deregister(slot.token)

    def close(self) -> None:
        """Deregister all slots that no write reads."""
        for slot in [slot for slot in (*self._slots, *self._lost) if slot.free]:
            self._transport.deregister(slot.token)
        self._slots, self._lost = [], [slot for slot in self._lost if not slot.free]

    def _try_to_make(self) -> Slot | None:
        try:
            return self._make()
        except (TransportError, torch.OutOfMemoryError) as error:
            log.warning("staging memory stays smaller slots=%d error=%r", len(self._slots), str(error))
            return None

    def _make(self) -> Slot:
        pin = self._device.type == "cpu" and torch.cuda.is_available()
        buffer = torch.empty(self._size, dtype=torch.uint8, device=self._device, pin_memory=pin)
        return Slot(buffer, self._transport.register(buffer.data_ptr(), buffer.numel(), memory_of(buffer)))


@dataclass(eq=False)
class _Region:
    token: object
    length: int
    alive: StorageWeakRef
    held: list[torch.Tensor] = field(default_factory=list)
    readers: int = 0


class SourceMemory:
    """Registration of the memory that tensors already lie in, so that runs of them are written without a copy.

    A registration outlives an update only while the storage does: memory that was freed and given out again must never
    be written from under its old registration.
    """

    def __init__(self, transport: Transport, clock: Callable[[], float] = time.monotonic) -> None:
        """Args: clock: measures what registering takes."""
        self._transport, self._clock = transport, clock
        self._regions: dict[int, _Region] = {}
        self._took: deque[float] = deque(maxlen=_TRIALS)

    @property
    def registered(self) -> int:
        """Regions registered now."""
        return len(self._regions)

    @property
    def held_bytes(self) -> int:
        """Bytes of storages that are kept alive for writes."""
        return sum(region.length for region in self._regions.values() if region.held)

    def cost(self, tensor: torch.Tensor) -> float:
        """Seconds that registering the tensor's storage will take, as measured on others; 0 if it is registered.

        It differs by orders of magnitude: microseconds for Mooncake over TCP, 70 ms for its CUDA build on an H200 host.
        """
        region = self._regions.get(tensor.untyped_storage().data_ptr())
        if region is not None and not region.alive.expired():
            return 0.0
        return statistics.median(self._took) if len(self._took) == _TRIALS else 0.0

    def hold(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Register the tensor's storage if it is not yet; returns what to call when one write of it is over.

        Raises:
            TransportError: it cannot be registered, or overlaps what is (storages that share memory).
        """
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        region = self._regions.get(address)
        if region is not None and (region.alive.expired() or region.length != storage.nbytes()):
            if region.readers:
                raise TransportError(f"memory at {address:#x} is still being written from under another registration")
            self._drop(address)
            region = None
        if region is None:
            began = self._clock()
            token = self._transport.register(address, storage.nbytes(), memory_of(tensor))
            self._took.append(self._clock() - began)
            region = self._regions[address] = _Region(token, storage.nbytes(), StorageWeakRef(storage))
        region.readers += 1
        if not region.held:
            region.held.append(tensor)

        def over() -> None:
            region.readers -= 1

        return over

    def release(self, *, keep_living: bool) -> None:
        """Let go of tensors that no write reads any more.

        Args:
            keep_living: keep the registration of storages that somebody else still holds (a trainer's parameters).
        """
        for address, region in list(self._regions.items()):
            if region.readers == 0:
                if not keep_living:
                    self._drop(address)
                    continue
                region.held.clear()
                if region.alive.expired():
                    self._drop(address)

    def close(self) -> None:
        """Deregister all that no write reads."""
        self.release(keep_living=False)

    def _drop(self, address: int) -> None:
        region = self._regions.pop(address)
        self._transport.deregister(region.token)
        region.held.clear()
