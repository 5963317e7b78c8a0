"""All that decides an engine's bytes, taken from the engine's own words.

In: ``/server_info``, the live tables, the folder with the model's config. Out: a ``Layout``, equal for engines whose
replicas are interchangeable, or a refusal that names the reason.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weightsync_core.errors import EngineRefused, SourceError, listing

LAYOUT_FIELDS = (
    "tp_size", "pp_size", "dp_size", "ep_size", "attn_dp_size", "attn_cp_size", "moe_dp_size", "dcp_size", "enable_dp_lm_head",
    "enable_tp_lm_head_all_to_all", "enable_shared_experts_attn_tp", "shared_experts_tp_size", "moe_dense_tp_size",
    "disable_shared_experts_fusion", "enforce_shared_experts_fusion", "dtype", "quantization", "enable_fp32_lm_head", "kv_cache_dtype",
    "moe_runner_backend", "moe_a2a_backend", "speculative_moe_runner_backend", "speculative_moe_a2a_backend", "fp8_gemm_runner_backend",
    "fp4_gemm_runner_backend", "bf16_gemm_backend", "speculative_algorithm", "json_model_override_args", "model_impl", "device",
)  # fmt: skip
"""Resolved arguments of sglang 0.5.23 that change parameter names, shapes or bytes."""

_EXPERT_PLACEMENT = (
    ("ep_num_redundant_experts", 0, "redundant experts"),
    ("init_expert_location", "trivial", "a non-trivial expert location"),
    ("enable_eplb", False, "EPLB, which moves experts while serving"),
    ("elastic_ep_backend", None, "elastic expert parallelism"),
    ("dwdp_size", 1, "DWDP"),
    ("kt_weight_path", None, "KTransformers"),
    ("enable_paged_experts", False, "paged experts"),
    ("pp_size", 1, "pipeline parallelism in the engine"),
    ("weight_cache_mode", "off", "a weight cache shared over CUDA IPC"),
    ("quantize_and_serve", False, "quantisation while loading"),
)


@dataclass(frozen=True)
class Layout:
    """One engine's layout; ``key`` is equal where replicas may be shared."""

    launch_command: str
    resolved: tuple[tuple[str, Any], ...]
    """LAYOUT_FIELDS as the engine resolved them."""
    config_dir: str
    sglang: str
    arch: str
    """``cpu`` or ``sm_90``; empty where the engine does not say."""
    config_digest: str

    @property
    def size(self) -> int:
        """Ranks that hold distinct shards: tensor-parallel ranks of one data-parallel replica."""
        return int(dict(self.resolved)["tp_size"])

    @property
    def speculative(self) -> bool:
        """Whether the engine runs a draft model."""
        return bool(dict(self.resolved)["speculative_algorithm"])

    @property
    def key(self) -> str:
        """SHA-256 over all fields but the launch command, whose host and port differ between equal engines."""
        text = json.dumps([self.resolved, self.config_digest, self.sglang, self.arch], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()


def read_layout(server_info: Mapping[str, Any], config_dir: str, arch: str) -> Layout:
    """The layout of an engine.

    Raises:
        SourceError: ``config_dir`` holds no readable config.json.
    """
    return Layout(
        launch_command=str(server_info.get("launch_command") or ""),
        resolved=tuple((name, _plain(server_info.get(name))) for name in LAYOUT_FIELDS),
        config_dir=config_dir,
        sglang=str(server_info.get("version", "")),
        arch=arch,
        config_digest=hashlib.sha256(json.dumps(read_config(config_dir), sort_keys=True).encode()).hexdigest(),
    )


def read_config(config_dir: str) -> dict[str, Any]:
    """The model's config.json.

    Raises:
        SourceError: missing or no JSON object.
    """
    path = os.path.join(config_dir, "config.json")
    try:
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
    except (OSError, ValueError) as error:
        raise SourceError(f"cannot read {path}: {error}; expected the model's Hugging Face config.json") from error
    if not isinstance(config, dict):
        raise SourceError(f"{path} holds {type(config).__name__}, expected a JSON object")
    return config


def refuse_unsupported(server_info: Mapping[str, Any]) -> None:
    """Refuse placements that no replica can reproduce.

    Raises:
        EngineRefused: naming each setting, its value and what it means.
    """
    reasons = []
    for name, plain, meaning in _EXPERT_PLACEMENT:
        value = server_info.get(name, plain)
        if value not in (plain, None):
            reasons.append(f"{meaning} ({name}={value!r}, only {plain!r} can be written)")
    reasons += _refuse_draft(server_info)
    if reasons:
        raise EngineRefused(f"engine cannot be written: {listing(reasons)}. Restart it without, or update it by broadcast")


def _refuse_draft(info: Mapping[str, Any]) -> list[str]:
    if not info.get("speculative_algorithm"):
        return []
    reasons = []
    if info.get("enable_multi_layer_eagle") or str(info.get("speculative_algorithm")).upper() == "MULTI_LAYER_EAGLE":
        reasons.append("multi-layer EAGLE, whose drafts are several models")
    draft, model = info.get("speculative_draft_model_path"), info.get("model_path")
    if draft and draft != model:
        reasons.append(f"a separate draft checkpoint (speculative_draft_model_path={draft!r}, the target's is {model!r})")
    for what in ("runner", "a2a"):
        backend = info.get(f"speculative_moe_{what}_backend")
        target = info.get(f"moe_{what}_backend")
        if backend not in (None, "auto", target):
            reasons.append(f"a draft MoE {what} backend of its own ({backend!r}, the target's is {target!r})")
    if int(info.get("attn_dp_size") or 1) > 1:
        reasons.append(f"a draft under attention data parallelism (attn_dp_size={info['attn_dp_size']})")
    return reasons


def _plain(value: Any) -> Any:
    return json.dumps(value, sort_keys=True) if isinstance(value, (dict, list)) else value
