"""What stock sglang's model code lacks on a CPU, by hooks, for tests and the demo (see :mod:`weightsync_engine.platform`).

Each hook replaces an operator that exists for GPUs only by plain torch, or makes start-up code survive a machine without
CUDA. No hook changes a weight or a loader. On a machine with an accelerator none is registered.
"""

from __future__ import annotations

import socket
import time
from typing import Any

import torch


def register() -> None:
    """Register all hooks of this module."""
    _mixture_of_experts()
    _latent_attention()
    _elementwise()
    _block_fp8()
    _start_up()
    _speculative()
    _mooncake_seeding()


def _hook(target: str, function: Any, kind: str) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(target, function, HookType[kind])


def _mixture_of_experts() -> None:
    """Expert parallelism marks picks of other ranks' experts with id -1, which the native MoE forward cannot take."""

    def local_experts(original: Any, layer: Any, x: torch.Tensor, topk_output: Any, config: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        weights, ids = topk_output.topk_weights, topk_output.topk_ids
        if not bool((ids < 0).any()):
            return original(layer, x, topk_output, config, *args, **kwargs)
        return _run_experts(x, weights, ids, lambda e: (layer.w13_weight[e], layer.w2_weight[e]), layer.w13_weight.shape[0])

    _hook("sglang.srt.layers.moe.fused_moe_native.moe_forward_native", local_experts, "AROUND")


def _run_experts(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, expert: Any, count: int) -> torch.Tensor:
    """SwiGLU experts one after the other; ids below zero belong to other ranks."""
    out = torch.zeros(x.shape, dtype=torch.float32)
    for index in range(count):
        rows = (ids == index).any(1).nonzero().flatten()
        if len(rows) == 0:
            continue
        gate_up, down = expert(index)
        gate, up = torch.nn.functional.linear(x[rows], gate_up).chunk(2, -1)
        share = (weights.float() * (ids == index)).sum(1)[rows, None]
        out[rows] += share * torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, down).float()
    return out.to(x.dtype)


def _latent_attention() -> None:
    """MLA on torch_native: the pool holds the latent, so only the absorbed form fits; rope without a GPU kernel."""
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    AttentionBackendRegistry.register("torch_native", lambda attention, batch: AttnForwardMethod.MLA)

    def rope(original: Any, *args: Any, **kwargs: Any) -> Any:
        scaling = kwargs.get("rope_scaling", args[5] if len(args) > 5 else None)
        if scaling is not None:
            return original(*args, **kwargs)
        kwargs.pop("device", None)
        return original(*args[:8], device=None, **kwargs)

    _hook("sglang.srt.layers.rotary_embedding.factory.get_rope_wrapper", rope, "AROUND")
    # While a sequence is shorter than index_topk the sparse indexer selects every token: dense MLA is the same.
    _hook("sglang.srt.layers.attention.dsa.dsa_indexer.Indexer.forward_native", lambda *a, **k: None, "REPLACE")


def _elementwise() -> None:
    """Logit soft caps, which exist as Triton kernels only."""

    def in_place(x: torch.Tensor, cap: float) -> torch.Tensor:
        return x.copy_(cap * torch.tanh(x / cap))

    def to_float(x: torch.Tensor, cap: float, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(cap * torch.tanh(x.float() / cap))

    _hook("sglang.kernels.ops.activation.softcap.softcap_inplace_logits", in_place, "REPLACE")
    _hook("sglang.kernels.ops.activation.softcap.softcap_to_float32_logits", to_float, "REPLACE")


def _block_fp8() -> None:
    """Block fp8 as dequantise and multiply; weights stay fp8 in memory."""

    def dequantise(weight: torch.Tensor, scale: torch.Tensor, block: list[int]) -> torch.Tensor:
        full = scale.float().repeat_interleave(block[0], -2)[..., : weight.shape[-2], :]
        return weight.float() * full.repeat_interleave(block[1], -1)[..., : weight.shape[-1]]

    def linear(
        input: torch.Tensor, weight: torch.Tensor, block_size: list[int], weight_scale: torch.Tensor,
        input_scale: Any = None, bias: torch.Tensor | None = None, *args: Any, **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        return torch.nn.functional.linear(input, dequantise(weight, weight_scale, block_size).to(input.dtype), bias)

    def experts(original: Any, method: Any, layer: Any, dispatch_output: Any) -> Any:
        if layer.w13_weight.device.type != "cpu":
            return original(method, layer, dispatch_output)
        from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

        x, (weights, ids, _) = dispatch_output.hidden_states, dispatch_output.topk_output
        block = method.quant_config.weight_block_size

        def expert(index: int) -> tuple[torch.Tensor, torch.Tensor]:
            return (
                dequantise(layer.w13_weight[index], layer.w13_weight_scale_inv[index], block),
                dequantise(layer.w2_weight[index], layer.w2_weight_scale_inv[index], block),
            )

        out = _run_experts(x.float(), weights, ids, expert, layer.w13_weight.shape[0])
        return StandardCombineInput(hidden_states=out.to(x.dtype))

    _hook("sglang.srt.layers.quantization.fp8_utils.triton_w8a8_block_fp8_linear", linear, "REPLACE")
    _hook("sglang.srt.layers.quantization.fp8.Fp8MoEMethod.apply", experts, "AROUND")


def _start_up() -> None:
    """CUDA probes in model set-up code, answered as on Hopper; and shapes as on a GPU.

    On a CPU sglang pads heads and widths that its CPU kernels do not like, which changes what a rank holds (and cannot load
    2 KV heads at tensor parallel 4, where a GPU replicates them).
    """
    _hook("sglang.srt.model_executor.model_runner.adjust_config_with_unaligned_cpu_tp", lambda config, *a, **k: config, "REPLACE")
    if torch.cuda.is_available():
        return
    _hook("torch.cuda.get_device_capability", lambda *a, **k: (9, 0), "REPLACE")
    _hook("torch.cuda.current_device", lambda *a, **k: torch.device("cpu"), "REPLACE")
    _hook("torch.cuda.synchronize", lambda *a, **k: None, "REPLACE")
    _hook("torch.cuda.empty_cache", lambda *a, **k: None, "REPLACE")
    # sglang's weight comparison works chunk by chunk on the GPU, whatever device serves.
    _hook("torch.Tensor.cuda", lambda tensor, *a, **k: tensor, "REPLACE")


def _speculative() -> None:
    """A draft worker that starts, loads and hashes its weights; it does not speculate."""
    _hook("sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._init_kv_copy_and_warmup", lambda *a, **k: None, "REPLACE")

    def draft_backend(original: Any, factory: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(factory, *args, **kwargs)
        except ValueError:
            from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

            return TorchNativeAttnBackend(factory.draft_model_runner)

    _hook("sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend", draft_backend, "AROUND")


def _mooncake_seeding() -> None:
    """sglang's own Mooncake seeding finds weights through CUDA's allocator; on a CPU they are registered one by one.

    Its tables are sent once, to a server that a tiny model can outrun; here the sender of a table waits for it.
    """
    from weightsync_engine.memory import parameter_spans

    def register_memory(original: Any, model: torch.nn.Module, engine: Any) -> Any:
        if next(model.parameters()).device.type != "cpu":
            return original(model, engine)
        for address, length in parameter_spans(model):
            code = engine.register_memory(address, length)
            if code != 0:
                raise RuntimeError(f"mooncake: registering {length} bytes at {address:#x} returned {code}")
        return {name: (p.data_ptr(), p.numel(), p.element_size()) for name, p in model.named_parameters()}

    def wait_for_server(transporter: Any, *args: Any, **kwargs: Any) -> None:
        from sglang.srt.runtime_context import get_model

        for _ in range(300):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", get_model().engine_info_bootstrap_port)) == 0:
                    return
            time.sleep(0.1)

    _hook(
        "sglang.srt.model_executor.model_runner_components.remote_instance_weight_transporter.register_memory_region",
        register_memory,
        "AROUND",
    )
    _hook(
        "sglang.srt.model_executor.model_runner_components.remote_instance_weight_transporter"
        ".RemoteInstanceWeightTransporter._register_to_engine_info_bootstrap",
        wait_for_server,
        "BEFORE",
    )
