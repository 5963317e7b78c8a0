"""A CPU platform for stock sglang, for tests and the demo only.

sglang 0.5.23 finds no platform on a machine without an accelerator, and its in-tree CPU engine wants kernels that
are not on PyPI. This out-of-tree platform serves with torch's own operators instead: slow, exact, and the same
model code, loaders and HTTP server as on a GPU. Never use it to serve traffic.
"""

from __future__ import annotations

import os

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform


def activate() -> str | None:
    """Entry point ``sglang.srt.platforms``: the platform's path, or None where an accelerator serves.

    ``WEIGHTSYNC_CPU_PLATFORM=0`` keeps it off; ``1`` forces it on, on a machine with a GPU too.
    """
    wish = os.environ.get("WEIGHTSYNC_CPU_PLATFORM", "auto")
    if wish == "0" or (wish != "1" and has_accelerator()):
        return None
    return "weightsync_engine.platform.CpuPlatform"


def has_accelerator() -> bool:
    """Whether torch sees a device that sglang's own platforms serve on."""
    import torch

    return torch.cuda.is_available() or torch.xpu.is_available() or (hasattr(torch, "npu") and torch.npu.is_available())


class CpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Out-of-tree platform that runs every operator through torch on the CPU."""

    _enum = PlatformEnum.OOT

    def get_device(self, device_id: int = 0) -> str:
        # A name, as the base class declares it: an engine started without --device takes it for one.
        return "cpu"

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def supports_speculative_algorithm(self, algorithm: object) -> bool:
        return True

    def get_default_speculative_draft_attention_backend(self, algorithm: object) -> str:
        return "torch_native"

    def supports_speculative_draft_attention_backend(self, algorithm: object, backend: str) -> bool:
        return True
