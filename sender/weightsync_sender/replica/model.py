"""sglang's own model of one engine rank, built without parameter storage.

In: a ``Layout`` and a rank. Out: a ``ReplicaModel`` whose ``load`` is the engine's own ``load_weights``. Uses sglang's
runtime contexts, which change process globals: one thread at a time, held by a lock here.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import shlex
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch

from weightsync_core.errors import LayoutError, listing
from weightsync_core.tables import DRAFT, ParameterTable, Placement
from weightsync_sender.replica.layout import LAYOUT_FIELDS, Layout
from weightsync_sender.replica.program import TensorSpec

_LOCK = threading.RLock()
"""sglang's contexts are process globals."""

_GROUPS = ("pp", "tp", "attn_tp", "attn_cp", "moe_ep", "moe_tp", "moe_dp")


class _Group:
    """Stands in for a process group: model code only reads ranks and sizes while it is built and loaded."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = self.rank_in_group = rank
        self.world_size, self.ranks, self.local_rank = size, list(range(size)), 0
        self.is_first_rank, self.is_last_rank = rank == 0, rank == size - 1
        self.device_group = self.cpu_group = None


class ReplicaModel:
    """One rank's model; parameters lie on ``meta`` except while ``materialised``."""

    def __init__(self, context: Any, model: torch.nn.Module, role: str) -> None:
        self._context, self.module = context, model
        self.role = role
        self.parameters: dict[str, torch.nn.Parameter] = dict(model.named_parameters())
        """By canonical name: the first of several names of one parameter."""
        self.aliases: dict[str, str] = _aliases(model, self.parameters)
        """Other names, to the canonical one."""
        self.engine_only = frozenset(
            name
            for name, parameter in self.parameters.items()
            if getattr(parameter, "_skip_weight_check", False) or name.endswith((".k_scale", ".v_scale"))
        )
        """Parameters that no checkpoint fills."""
        self.padded = frozenset(
            f"{prefix}.{name}"
            for prefix, module in model.named_modules()
            if hasattr(module, "num_embeddings_padded")
            for name, _ in module.named_parameters(recurse=False)
        )
        """Vocabulary tables, whose rows beyond the vocabulary the engine fills itself."""
        for parameter in self.parameters.values():
            parameter.requires_grad_(False)
            if not parameter.is_meta:  # some modules name a device of their own (Qwen3-Next's gated norm)
                _swap(parameter, torch.empty_like(parameter.data, device="meta"))
        if hasattr(model, "post_load_weights"):
            # Derived state (MLA's w_kc/w_vc) is the engine's to compute, in end_weight_update.
            cast(Any, model).post_load_weights = lambda *args, **kwargs: None

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Shapes and dtypes of all parameters."""
        return {name: spec_of(parameter) for name, parameter in self.parameters.items()}

    @property
    def others(self) -> list[torch.Tensor]:
        """Buffers: the engine recomputes them."""
        return list(self.module.buffers())

    @property
    def buffer_names(self) -> list[str]:
        """Names of all buffers."""
        return [name for name, _ in self.module.named_buffers()]

    def load(self, tensors: Iterator[tuple[str, torch.Tensor]] | Iterable[tuple[str, torch.Tensor]]) -> None:
        """The engine's ``load_weights``, in the context of this rank."""
        with _LOCK, _active(self._context, self.role), torch.no_grad():
            cast(Any, self.module).load_weights(iter(tensors))

    @contextlib.contextmanager
    def materialised(self, storages: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Give some parameters real memory for a while.

        Args:
            storages: tensors with the parameters' shapes and dtypes, by canonical name.
        """
        swapped = []
        try:
            for name, real in storages.items():
                swapped.append((self.parameters[name], _swap(self.parameters[name], real)))
            yield
        finally:
            for parameter, double in swapped:
                torch._C._swap_tensor_impl(parameter, double)


def build_replica(layout: Layout, placement: Placement, role: str) -> ReplicaModel:
    """Build the model of one rank and role on meta.

    Raises:
        LayoutError: sglang refuses the layout (its own words follow), or resolves it otherwise than the engine did.
    """
    from sglang.srt import runtime_context
    from sglang.srt.plugins import load_plugins

    with _LOCK:
        load_plugins()
        arguments = _server_args(layout)
        try:
            context = runtime_context.create_context(
                arguments,
                role="scheduler",
                ranks=runtime_context.SpawnRanks(
                    world_rank=placement.tp_rank, dp_rank=placement.dp_rank if placement.dp_size > 1 else None
                ),
            )
            _state_groups(context.parallel)
            _require_same_resolution(layout, arguments)
            with _active(context, role):
                model = _initialise(layout, arguments, role)
        except LayoutError:
            raise
        except Exception as error:  # model code raises anything; its words are what the user needs
            raise LayoutError(
                f"cannot build the model of {role} rank {placement.tp_rank} of {placement.tp_size} (ep {placement.ep_size}) from "
                f"{layout.config_dir}: {type(error).__name__}: {error}"
            ) from error
        return ReplicaModel(context, model, role)


def require_same_table(replica: ReplicaModel, table: ParameterTable) -> None:
    """Prove that the replica has the parameters that the engine published.

    Raises:
        LayoutError: listing the first twenty differences.
    """
    differences = []
    for name, spec in replica.specs.items():
        entry = table.entries.get(name)
        if entry is None:
            differences.append(f"{name}: only in the replica ({list(spec.shape)} {spec.dtype})")
            continue
        if entry.nbytes != spec.nbytes:
            differences.append(f"{name}: the engine has {entry.nbytes} bytes, the replica {spec.nbytes} ({list(spec.shape)} {spec.dtype})")
        elif entry.dtype is not None and entry.dtype != spec.dtype:
            differences.append(f"{name}: the engine has {entry.dtype}, the replica {spec.dtype}")
        elif entry.shape is not None and entry.shape != spec.shape:
            differences.append(f"{name}: the engine has shape {list(entry.shape)}, the replica {list(spec.shape)}")
        elif entry.stride is not None and not _same_stride(entry.stride, replica.parameters[name]):
            differences.append(f"{name}: the engine has stride {list(entry.stride)}, the replica {list(replica.parameters[name].stride())}")
    known = {(entry.address, entry.nbytes) for name, entry in table.entries.items() if name in replica.parameters}
    for name, entry in table.entries.items():
        canonical = replica.aliases.get(name, name)
        if canonical not in replica.parameters:
            if (entry.address, entry.nbytes) in known:
                continue  # one more name for memory that is written (MLA hangs kv_b_proj into its attention at the first forward)
            differences.append(f"{name}: only in the engine ({entry.nbytes} bytes)")
        elif name != canonical and canonical in table.entries and entry.address != table.entries[canonical].address:
            differences.append(f"{name}: the replica shares it with {canonical}, the engine does not")
    if differences:
        raise LayoutError(
            f"{table.label} differs from the model built here, nothing was written: {listing(differences)}. The checkpoint's "
            "config.json, the engine's arguments and both sglang builds must agree"
        )


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """Shape and dtype of a tensor."""
    return TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.element_size())


def _swap(parameter: torch.nn.Parameter, data: torch.Tensor) -> torch.nn.Parameter:
    """Put ``data`` under a parameter object, which keeps its class and loader attributes; returns what was under it.

    Objects stay the same, since models keep references to them. ``torch.utils.swap_tensors`` does this too, but refuses
    parameters of which the model holds a view (Qwen3-Next's convolution), for autograd's sake; there is none here.
    """
    double = torch.nn.Parameter(data, requires_grad=False)
    torch._C._swap_tensor_impl(parameter, double)
    return double


def _same_stride(stride: tuple[int, ...], parameter: torch.Tensor) -> bool:
    return (
        all(size == 1 or a == b for size, a, b in zip(parameter.shape, stride, parameter.stride(), strict=True)) or parameter.numel() == 0
    )


def _aliases(model: torch.nn.Module, parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, str]:
    canonical = {id(parameter): name for name, parameter in parameters.items()}
    return {
        name: canonical[id(parameter)]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if canonical[id(parameter)] != name
    }


@contextlib.contextmanager
def _active(context: Any, role: str) -> Iterator[None]:
    """sglang's globals of one rank and role, as they stand while the engine builds and loads that model."""
    from sglang.srt import runtime_context
    from sglang.srt.layers.moe.utils import (
        draft_model_build_scope,
        initialize_moe_config,
        speculative_moe_a2a_backend_context,
        speculative_moe_backend_context,
    )

    with runtime_context.use_context(context), contextlib.ExitStack() as stack:
        initialize_moe_config()
        if role == DRAFT:
            stack.enter_context(speculative_moe_backend_context())
            stack.enter_context(speculative_moe_a2a_backend_context())
            stack.enter_context(draft_model_build_scope())
        yield


def _server_args(layout: Layout) -> Any:
    """The engine's own arguments, for this machine's folders.

    Raises:
        LayoutError: this sglang cannot read them.
    """
    from sglang.srt.server_args import ServerArgs, record_fields

    known = {item.name for item in record_fields(ServerArgs)}
    text = layout.launch_command
    if text.startswith("Engine("):
        call = ast.parse(text, mode="eval").body
        keywords = {word.arg: ast.literal_eval(word.value) for word in call.keywords}  # type: ignore[attr-defined]
        given = {name: value for name, value in keywords.items() if name in known}
    else:
        parser = _Parser()
        ServerArgs.add_cli_args(parser)
        given = vars(parser.parse_args(shlex.split(text)))
        given = {name: value for name, value in given.items() if name in known}
    given.update(model_path=layout.config_dir, tokenizer_path=None, chat_template=None, skip_tokenizer_init=True, lora_paths=None)
    given.update(remote_instance_weight_loader_start_seed_via_transfer_engine=False)
    if layout.speculative:
        given.update(speculative_draft_model_path=None)
    return ServerArgs(**given)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise LayoutError(f"the engine's arguments cannot be read by the sglang installed here: {message}; both builds must be the same")


def _require_same_resolution(layout: Layout, arguments: Any) -> None:
    """Defaults depend on the machine; a layout that resolves otherwise here is another layout."""
    from weightsync_sender.replica.layout import _plain

    here = arguments.resolved_dict()
    differences = [
        f"{name} is {value!r} in the engine and {_plain(here.get(name))!r} here"
        for name, value in layout.resolved
        if name in LAYOUT_FIELDS and _plain(here.get(name)) != value
    ]
    if differences:
        raise LayoutError(
            f"the engine's arguments resolve otherwise on this machine: {listing(differences)}. Build the sender's side on the same "
            "kind of device, with the same sglang build, or state these arguments at the engine's start"
        )


def _state_groups(parallel: Any) -> None:
    for name in _GROUPS:
        group = _Group(getattr(parallel, f"{name}_rank"), getattr(parallel, f"{name}_size"))
        try:
            parallel.override_permanently(**{f"{name}_group": group})
        except ValueError:
            if name != "moe_dp":  # it may alias a wider group, which has its own
                raise


def _initialise(layout: Layout, arguments: Any, role: str) -> torch.nn.Module:
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_executor.model_runner import adjust_config_with_unaligned_cpu_tp
    from sglang.srt.model_loader.loader import _get_quantization_config, _initialize_model
    from sglang.srt.model_loader.utils import set_default_torch_dtype

    load_config = LoadConfig()
    if role == DRAFT:
        config = ModelConfig.from_server_args(arguments, model_path=layout.config_dir, is_draft_model=True)
    else:
        config = ModelConfig.from_server_args(arguments)
    if dict(layout.resolved)["device"] == "cpu":
        config = adjust_config_with_unaligned_cpu_tp(config, load_config, layout.size)
    quantisation = _get_quantization_config(config, load_config)
    with set_default_torch_dtype(config.dtype), torch.device("meta"):
        model: torch.nn.Module = _initialize_model(config, load_config, quantisation)
    return model
