"""Transport libraries, imported when first needed, so that one works without the other.

A missing shared object (``libibverbs.so.1``) and a missing wheel read the same way to a user: the error names what
is missing, how to get it, and which transport still works.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
from pathlib import Path
from types import ModuleType

from weightsync_core.errors import MissingLibrary

_MODULES = {
    "mooncake": ("mooncake.engine",),
    "nixl": ("nixl._api", "nixl_cu13._api", "nixl_cu12._api"),
}
_CURES = {
    "mooncake": "pip install mooncake-transfer-engine (-non-cuda without a GPU), and Debian's libibverbs1 and libnuma1",
    "nixl": "pip install nixl (or nixl-cu13, nixl-cu12)",
}


def load_library(transport: str) -> ModuleType:
    """Import the library of ``mooncake`` or ``nixl``.

    Raises:
        MissingLibrary: not installed, or one of its shared objects is missing.
    """
    failures = []
    if transport == "nixl":
        _load_system_netlink()
    for module in _MODULES[transport]:
        try:
            return importlib.import_module(module)
        except ImportError as error:
            failures.append(f"{module}: {error}")
    other = next(name for name in _MODULES if name != transport)
    state = "still works here" if available(other) else "is missing too"
    raise MissingLibrary(
        f"transport {transport} cannot be used: {'; '.join(failures)}; install it with: {_CURES[transport]}; transport {other} {state}"
    )


def mooncake_protocol() -> str:
    """How Mooncake travels here: sglang's MOONCAKE_PROTOCOL, else ``rdma`` where the kernel shows an RDMA device, else ``tcp``."""
    devices = Path("/sys/class/infiniband")
    return os.environ.get("MOONCAKE_PROTOCOL") or ("rdma" if devices.is_dir() and any(devices.iterdir()) else "tcp")


def _load_system_netlink() -> None:
    """Load the system's libnl-route before NIXL's wheel loads its own copy.

    Where RDMA providers are installed, UCX pulls in both; with the wheel's copy first, its destructor walks the other's
    list and the process dies with SIGSEGV at exit (nixl 1.5.1, seen with Debian's ibverbs-providers).
    """
    with contextlib.suppress(OSError):
        ctypes.CDLL("libnl-route-3.so.200")


def available(transport: str) -> bool:
    """Whether the transport's library imports in this process."""
    for module in _MODULES[transport]:
        try:
            importlib.import_module(module)
        except ImportError:
            continue
        return True
    return False
