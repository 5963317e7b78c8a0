"""sglang's own weight checksums, computed on a replica's parameters (``sglang.srt.utils.weight_checker``, 0.5.23)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from weightsync_sender.replica.execute import as_parameter
from weightsync_sender.replica.model import ReplicaModel


def checksums_of(replica: ReplicaModel, made: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Checksums of parameters, as ``/weights_checker`` would answer them.

    Args:
        made: flat bytes (uint8) by parameter.
    """
    from sglang.srt.utils.weight_checker import _build_check_entries, _build_quantized_set, _hash_tensor

    tensors = {name: as_parameter(raw, replica.specs[name]) for name, raw in made.items()}
    quantised = {name: pair for name, pair in _build_quantized_set(replica.module).items() if name in tensors}
    entries = _build_check_entries(tensors, set(replica.engine_only), quantised)
    return {name: _hash_tensor(comparable.dequantize().data) for name, compare, comparable in entries if compare}
