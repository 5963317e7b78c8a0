"""Watch ``load_weights`` on meta tensors and write down what it moves where.

In: a model whose parameters are on ``meta``, and the names, shapes and dtypes of the Hugging Face tensors. Out: a
``Trace`` of strided copies and fills, in order. No weight is read. What is not a copy (arithmetic on a weight, a read of
its values) taints the parameters that it reaches; those go through ``load_weights`` itself at update time.

Seen for every supported family (sglang 0.5.23): loaders are views, ``copy_``, ``cat``, ``clone``, ``to`` and ``fill_``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weightsync_core.errors import SourceError
from weightsync_sender.replica.views import View


class Kind(Enum):
    """What a traced storage belongs to."""

    HF = "hf"
    PARAMETER = "parameter"
    TEMPORARY = "temporary"
    IGNORED = "ignored"
    """Buffers and derived state, which the engine recomputes after an update."""


class Ref(NamedTuple):
    """A storage, by name."""

    kind: Kind
    name: str


@dataclass(frozen=True, slots=True)
class Copy:
    """Elements of ``source`` go to ``target``, converted if the dtypes differ; both views have the same shape."""

    target: Ref
    target_view: View
    source: Ref
    source_view: View


@dataclass(frozen=True, slots=True)
class Fill:
    """A constant goes to ``target``."""

    target: Ref
    target_view: View
    value: float


Step = Copy | Fill


@dataclass
class Trace:
    """What one rank's ``load_weights`` does with a set of Hugging Face tensors."""

    steps: list[Step] = field(default_factory=list)
    temporaries: dict[str, int] = field(default_factory=dict)
    """Bytes by name."""
    opaque: dict[str, set[str]] = field(default_factory=dict)
    """Parameters that something else than a copy reached, with the HF tensors that were seen to flow into them."""
    reasons: dict[str, str] = field(default_factory=dict)
    """The operator that made a parameter opaque."""


def trace_loading(
    parameters: Mapping[str, torch.Tensor],
    others: Iterable[torch.Tensor],
    tensors: Mapping[str, torch.Tensor],
    load: Callable[[Iterator[tuple[str, torch.Tensor]]], Any],
    value_dependent: Collection[str] = (),
) -> Trace:
    """Trace one ``load_weights`` call.

    Args:
        parameters: the model's parameters by canonical name, on meta.
        others: buffers of the model; writes into them are the engine's own business.
        tensors: HF tensors by name, on meta (or real zeros, for one whose values the loader reads).
        load: calls the loader with an iterator of (name, tensor).
        value_dependent: HF tensors whose values the loader reads; what they reach is opaque.

    Raises:
        ValueReadError: the loader read the values of a meta tensor; trace again with that tensor real.
        SourceError: the loader refused a tensor; names it, with the loader's own words.
    """
    tracer = _Tracer()
    for name, parameter in parameters.items():
        tracer.own(parameter.data, Ref(Kind.PARAMETER, name))
    for number, other in enumerate(others):
        tracer.own(other, Ref(Kind.IGNORED, str(number)))
    for name, tensor in tensors.items():
        tracer.own(tensor, Ref(Kind.HF, name))
    for name in value_dependent:
        tracer.taint(name)
    before = {name: parameter.data.untyped_storage()._cdata for name, parameter in parameters.items()}
    given = _Given(tensors)
    try:
        with tracer:
            load(iter(given))
    except Exception as error:  # loaders raise whatever they like; the tensor at hand is what the user needs
        if tensors[given.current].is_meta and "meta" in str(error).lower():
            raise ValueReadError(given.current, str(error)) from error
        raise SourceError(
            f"the engine's loader refused HF tensor {given.current!r} (shape {list(tensors[given.current].shape)}, "
            f"{tensors[given.current].dtype}): {type(error).__name__}: {error or 'assertion failed'}; expected the shape and dtype "
            "that the engine's own checkpoint has",
            names=[given.current],
        ) from error
    for name, parameter in parameters.items():
        if parameter.data.untyped_storage()._cdata != before[name]:
            tracer.rebound(name, parameter.data)
    return tracer.finished()


class ValueReadError(Exception):
    """The loader read values of a tensor that has none."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


class _Given:
    """The HF tensors as the loader takes them; remembers the one it is at."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self.current = next(iter(tensors), "")

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._tensors.items():
            self.current = name
            yield name, tensor


_COPIES = ("clone", "_to_copy", "contiguous")
_ZEROS = ("zeros", "zeros_like", "new_zeros")
_ONES = ("ones", "ones_like", "new_ones")
_EMPTY = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")


class _Tracer(TorchDispatchMode):
    """Follows storages through one load. Storage identity is the C++ object, kept alive while the trace runs."""

    def __init__(self) -> None:
        super().__init__()
        self.trace = Trace()
        self._refs: dict[int, Ref] = {}
        self._flows: dict[Ref, set[str]] = {}
        """HF tensors whose data a temporary holds."""
        self._tainted: dict[Ref, str] = {}
        """Temporaries that hold something else than copied bytes, with the operator."""
        self._alive: list[torch.Tensor] = []

    def own(self, tensor: torch.Tensor, ref: Ref) -> None:
        """Let ``tensor``'s storage be known as ``ref``; the first name of a shared storage stays."""
        self._alive.append(tensor)
        self._refs.setdefault(tensor.untyped_storage()._cdata, ref)

    def finished(self) -> Trace:
        """The trace, with all that flows into opaque parameters, before or after they became so."""
        for name, origins in self.trace.opaque.items():
            origins |= self._flows[Ref(Kind.PARAMETER, name)]
        return self.trace

    def taint(self, name: str) -> None:
        """Treat whatever an HF tensor reaches as computed from its values."""
        self._tainted[Ref(Kind.HF, name)] = "a read of its values"

    def rebound(self, name: str, data: torch.Tensor) -> None:
        """A loader pointed a parameter at another tensor instead of copying into it."""
        source = self._ref(data)
        if source is None:
            self._mark(Ref(Kind.PARAMETER, name), "assignment of .data", ())
            return
        view = _view(data)
        packed = View(0, view.shape, _packed(view), view.item, view.dtype)
        self.trace.steps.append(Copy(Ref(Kind.PARAMETER, name), packed, source, view))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        written = _written(func, args, kwargs)
        if name == "copy_":
            self._copied(args[0], args[1])
        elif name in ("fill_", "zero_"):
            self._filled(args[0], 0.0 if name == "zero_" else args[1])
        elif written:
            for tensor in written:
                self._computed(tensor, name, inputs)
        elif func.is_view:
            pass  # shares its input's storage, which is known or not
        elif name in _COPIES and self._ref(inputs[0]) is not None:
            for tensor in outputs:
                if self._ref(tensor) is None:
                    self._temporary(tensor)
                    self._copied(tensor, inputs[0])
        elif name == "cat" and any(self._ref(tensor) is not None for tensor in args[0]):
            self._concatenated(outputs[0], args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0))
        elif name in _ZEROS + _ONES + _EMPTY:
            for tensor in outputs:
                self._temporary(tensor)
                if name not in _EMPTY:
                    self._filled(tensor, 1.0 if name in _ONES else 0.0)
        else:
            for tensor in outputs:
                if self._ref(tensor) is None:
                    self._temporary(tensor)
                self._computed(tensor, name, inputs)
        return out

    def _ref(self, tensor: torch.Tensor) -> Ref | None:
        return self._refs.get(tensor.untyped_storage()._cdata)

    def _temporary(self, tensor: torch.Tensor) -> None:
        ref = Ref(Kind.TEMPORARY, str(len(self.trace.temporaries)))
        self.trace.temporaries[ref.name] = tensor.untyped_storage().nbytes()
        self._alive.append(tensor)
        self._refs[tensor.untyped_storage()._cdata] = ref

    def _copied(self, target: torch.Tensor, source: torch.Tensor) -> None:
        to, came = self._ref(target), self._ref(source)
        if to is None or to.kind is Kind.IGNORED:
            return
        if came is None or came.kind in (Kind.IGNORED, Kind.PARAMETER):
            self._mark(to, "copy from something else than a checkpoint tensor", () if came is None else self._origins(came))
            return
        self._flows.setdefault(to, set()).update(self._origins(came))
        if came in self._tainted:
            self._mark(to, self._tainted[came], self._origins(came))
            return
        self.trace.steps.append(Copy(to, _view(target), came, _view(source.expand(target.shape))))

    def _filled(self, target: torch.Tensor, value: Any) -> None:
        to = self._ref(target)
        if to is None or to.kind is Kind.IGNORED:
            return
        if isinstance(value, torch.Tensor):
            self._mark(to, "fill_ with a tensor", ())
            return
        self.trace.steps.append(Fill(to, _view(target), float(value)))

    def _concatenated(self, out: torch.Tensor, parts: Iterable[torch.Tensor], dim: int) -> None:
        if self._ref(out) is None:
            self._temporary(out)
        at = 0
        for part in parts:
            if part.dim() == 1 and part.numel() == 0:
                continue  # torch.cat skips legacy empty tensors
            self._copied(out.narrow(dim, at, part.shape[dim]), part)
            at += part.shape[dim]

    def _computed(self, target: torch.Tensor, operator: str, inputs: Iterable[torch.Tensor]) -> None:
        to = self._ref(target)
        if to is None or to.kind is Kind.IGNORED:
            return
        origins: set[str] = set()
        for tensor in inputs:
            came = self._ref(tensor)
            if came is not None:
                origins |= self._origins(came)
        self._mark(to, operator, origins)

    def _origins(self, ref: Ref) -> set[str]:
        return {ref.name} if ref.kind is Kind.HF else self._flows.get(ref, set())

    def _mark(self, ref: Ref, operator: str, origins: Iterable[str]) -> None:
        self._flows.setdefault(ref, set()).update(origins)
        self._tainted.setdefault(ref, operator)
        if ref.kind is Kind.PARAMETER:
            self.trace.opaque.setdefault(ref.name, set()).update(self._flows[ref])
            self.trace.reasons.setdefault(ref.name, operator)


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Tensors that the operator's schema says it mutates."""
    found: list[torch.Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        found.extend(leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
    return found


def _view(tensor: torch.Tensor) -> View:
    item = tensor.element_size()
    return View(
        int(tensor.storage_offset()) * item,
        tuple(tensor.shape),
        tuple(step * item for step in tensor.stride()),
        item,
        str(tensor.dtype).removeprefix("torch."),
    )


def _packed(view: View) -> tuple[int, ...]:
    strides, step = [], view.item
    for size in reversed(view.shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
