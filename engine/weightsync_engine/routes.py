"""HTTP routes of an engine's front process: its identity, and the lease of the sender that updates it.

Both are answered without touching the ranks, so a busy or hung scheduler cannot delay them, and both are guarded like
sglang's own administrative routes (API key or admin key, where one is set).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from weightsync_core.protocol import IDENTITY_ROUTE, LEASE_ROUTE, OWNER_HEADER

MAX_LEASE_SECONDS = 300.0


@dataclass
class Lease:
    """The right of one sender to update this engine, given for a time and renewed while it lives.

    Two senders that write one engine at once leave a mixture of both, which nothing can find later; one that died must
    not lock the engine for ever.
    """

    clock: Callable[[], float] = time.monotonic
    owner: str = ""
    expires: float = 0.0

    def take(self, owner: str, seconds: float) -> bool:
        """Take; False while somebody else holds it."""
        if self.owner and self.owner != owner and self.clock() < self.expires:
            return False
        return self._grant(owner, seconds)

    def renew(self, owner: str, seconds: float) -> bool:
        """Renew, late too if nobody took it meanwhile; False when somebody did, even if it was given back since."""
        return self.owner == owner and self._grant(owner, seconds)

    def _grant(self, owner: str, seconds: float) -> bool:
        self.owner, self.expires = owner, self.clock() + min(seconds, MAX_LEASE_SECONDS)
        return True

    def give_back(self, owner: str) -> None:
        """Give back, if it is still this owner's."""
        if self.owner == owner:
            self.owner = ""

    def excludes(self, owner: str) -> bool:
        """Whether somebody else took the lease, or this owner gave it back."""
        return self.owner != owner

    def state(self) -> dict[str, Any]:
        """Owner and seconds left, for answers."""
        left = self.expires - self.clock()
        return {"owner": self.owner if left > 0 else "", "expires_in": max(round(left, 3), 0.0)}


def mount(app: Any, records: list[dict[str, Any]], server_args: Any) -> None:
    """Add the routes to sglang's FastAPI application.

    Args:
        app: the application of ``sglang.srt.entrypoints.http_server``.
        records: one per scheduler process of this node, from its ready handshake.
        server_args: sglang's ServerArgs; the served checkpoint's config.json lets a sender without one build the model.
    """
    from fastapi import Request
    from fastapi.responses import JSONResponse
    from sglang.srt.utils.auth import AuthLevel, auth_level

    replicas = 1 if server_args.enable_dp_attention else server_args.dp_size
    answer = {
        "ranks": records,
        "size": server_args.tp_size * server_args.pp_size * replicas,
        "nodes": server_args.nnodes,
        "model_path": server_args.model_path,
        "config": _read_config(server_args.model_path),
    }
    lease = Lease()

    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def identity() -> Any:
        return {**answer, "lease": lease.state()}

    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def take(request: Request) -> Any:
        try:
            body = await request.json()
            owner, seconds, ask = str(body["owner"]), float(body["seconds"]), lease.renew if body.get("renew") else lease.take
            if not owner or not 0 < seconds < float("inf"):
                raise ValueError("owner must be a text and seconds a positive number")
        except (ValueError, KeyError, TypeError) as error:
            return JSONResponse({"error": f"expected {{owner, seconds, renew}}: {error}"}, status_code=400)
        granted = ask(owner, seconds)
        return JSONResponse({"granted": granted, **lease.state()}, status_code=200 if granted else 409)

    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def give_back(owner: str) -> Any:
        lease.give_back(owner)
        return lease.state()

    # Annotations are texts in this module; FastAPI must see the class itself to hand the request over.
    take.__annotations__["request"] = Request
    app.add_middleware(_LeaseGuard, lease=lease)
    app.add_api_route(IDENTITY_ROUTE, identity, methods=["GET"])
    app.add_api_route(LEASE_ROUTE, take, methods=["POST"])
    app.add_api_route(LEASE_ROUTE, give_back, methods=["DELETE"])


class _LeaseGuard:
    """ASGI middleware: a control call that names its owner is refused unless that owner holds the lease."""

    def __init__(self, app: Any, lease: Lease) -> None:
        self._app, self._lease = app, lease
        self._header = OWNER_HEADER.encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] != LEASE_ROUTE:
            owner = next((value.decode() for name, value in scope["headers"] if name == self._header), None)
            if owner is not None and self._lease.excludes(owner):
                from fastapi.responses import JSONResponse

                refusal = JSONResponse({"error": f"{owner} does not hold the lease of this engine", **self._lease.state()}, 409)
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _read_config(model_path: str) -> dict[str, Any] | None:
    try:
        with open(os.path.join(model_path, "config.json"), encoding="utf-8") as file:
            config: dict[str, Any] = json.load(file)
    except (OSError, ValueError):
        return None
    return config
