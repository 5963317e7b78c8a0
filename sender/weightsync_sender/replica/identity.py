"""The build that this process runs, to be compared with an engine's."""

from __future__ import annotations

import functools

import torch

from weightsync_core.tables import Identity


@functools.cache
def local_identity() -> Identity:
    """sglang, torch and the GPU architecture of this process (``cpu`` without a GPU).

    Raises:
        ImportError: sglang is not installed here.
    """
    from sglang.version import __version__

    if not torch.cuda.is_available():
        return Identity(__version__, torch.__version__, "cpu")
    # Not torch.cuda.get_device_capability, which the CPU platform's support replaces.
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Identity(__version__, torch.__version__, f"sm_{properties.major}{properties.minor}")
