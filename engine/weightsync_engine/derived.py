"""State that a model derives from its weights and keeps beside them.

A raw write changes parameters only. What sglang's own ``end_weight_update`` recomputes (MLA's w_kc/w_vc, quantised
repacking) is left to it; what it forgets is refreshed here, and engines whose copies nobody can refresh are refused.
"""

from __future__ import annotations

import torch


def refresh(model: torch.nn.Module) -> int:
    """Recompute derived buffers that ``end_weight_update`` leaves stale; returns how many modules were refreshed.

    Gemma norms keep ``weight + 1`` in a buffer (sglang 0.5.23, ``GemmaRMSNorm.refresh_gemma_weight``).
    """
    done = 0
    with torch.no_grad():
        for module in model.modules():
            recompute = getattr(module, "refresh_gemma_weight", None)
            if recompute is not None:
                recompute()
                done += 1
    return done


def refusal(model: torch.nn.Module) -> str:
    """Why this model must not be written, in sglang's own words, or an empty text.

    sglang refuses disk and tensor updates for such models, but not sessions with raw writes, so the sender must.
    """
    from sglang.srt.model_executor.model_runner_components.weight_updater import _unsupported_derived_weight_cache_error
    from sglang.srt.runtime_context import get_model

    mode = get_model().weight_cache_mode
    if mode != "off":
        return f"--weight-cache-mode {mode}: weights are shared with a daemon over CUDA IPC and must not be changed in place"
    return _unsupported_derived_weight_cache_error(model) or ""
