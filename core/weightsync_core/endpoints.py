"""Engine addresses as users write them, read into one form.

Accepted: ``http://host:port``, ``https://host``, ``host:port``, ``host``, ``10.0.0.1:30000``, ``[fd00::1]:30000``,
``[fd00::1]``, and a bare IPv6 address. A path, a query or a password in the address is an error.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from weightsync_core.errors import EndpointError

DEFAULT_PORT = 30000
"""sglang's default HTTP port (``--port``)."""

_HOST_NAME = re.compile(r"^(?!-)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?$")


@dataclass(frozen=True, order=True)
class Endpoint:
    """Where one engine answers HTTP."""

    host: str
    """Name, IPv4 or IPv6 address; IPv6 without brackets."""
    port: int
    scheme: str = "http"

    @property
    def authority(self) -> str:
        """``host:port``, IPv6 in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """``scheme://host:port`` without a trailing slash."""
        return f"{self.scheme}://{self.authority}"

    def __str__(self) -> str:
        return self.url


def parse_endpoint(text: str, default_port: int = DEFAULT_PORT) -> Endpoint:
    """Read one engine address.

    Raises:
        EndpointError: anything but a scheme (http, https), a host and a port from 1 to 65535.
    """
    given = text.strip()
    scheme, rest = "http", given
    if "://" in given:
        scheme, _, rest = given.partition("://")
        scheme = scheme.lower()
        if scheme not in ("http", "https"):
            raise _bad(text, f"scheme {scheme!r} is not http or https")
    rest = rest.rstrip("/")
    if not rest:
        raise _bad(text, "no host")
    if _is_ipv6(rest):
        return Endpoint(rest, default_port, scheme)
    try:
        parts = urlsplit(f"//{rest}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise _bad(text, str(error)) from error
    if parts.path or parts.query or parts.fragment:
        raise _bad(text, "an engine address has no path, query or fragment")
    if parts.username is not None:
        raise _bad(text, "an API key belongs in an environment variable, not in the address")
    if not host:
        raise _bad(text, "no host")
    if ":" in host and not _is_ipv6(host):
        raise _bad(text, f"{host!r} is not an IPv6 address")
    if ":" not in host and not _HOST_NAME.match(host):
        raise _bad(text, f"{host!r} is not a host name or address")
    if port == 0:
        raise _bad(text, "port 0 cannot be connected to")
    return Endpoint(host, default_port if port is None else port, scheme)


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def _bad(text: str, seen: str) -> EndpointError:
    return EndpointError(f"cannot read engine address {text!r}: {seen}; expected e.g. http://10.0.0.7:30000 or [fd00::7]:30000")
