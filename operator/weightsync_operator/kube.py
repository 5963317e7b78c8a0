"""The operator's calls to the API server: lists, server-side apply, events. Each bounded in time; nothing is decided here."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from kubernetes.aio import client, config

from weightsync_core.errors import WeightSyncError
from weightsync_core.labels import GROUP, KIND, PLURAL, READINESS_GATE, VERSION
from weightsync_operator.resources import Key

OBJECTS_MANAGER = "p2p-weightsync-operator"
"""Field manager of ConfigMaps."""
STATUS_MANAGER = "p2p-weightsync-operator-status"
"""Field manager of WeightSync status and of the readiness gate."""

_PAGE = 500
_CONCURRENT = 16


class KubeError(WeightSyncError):
    """A call to the API server failed; ``status`` is the HTTP status, 0 if there was no answer."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Kube:
    """One API server."""

    api: client.ApiClient
    request_seconds: float
    slots: asyncio.Semaphore

    async def list_all(self, path: str, selector: str = "") -> list[dict[str, Any]]:
        """All objects below a path, page by page.

        Raises:
            KubeError: refused or no answer.
        """
        found: list[dict[str, Any]] = []
        more = ""
        while True:
            query = [("limit", str(_PAGE))]
            query += [("labelSelector", selector)] if selector else []
            query += [("continue", more)] if more else []
            page = await self.call("GET", path, query=query)
            found += page["items"]
            more = page["metadata"].get("continue") or ""
            if not more:
                return found

    async def apply(self, path: str, body: Mapping[str, Any], manager: str) -> dict[str, Any]:
        """Server-side apply of an object, or of its status, that belongs to the operator."""
        query = [("fieldManager", manager), ("force", "true")]
        return await self.call("PATCH", path, query=query, body=body, content_type="application/apply-patch+yaml")

    async def call(
        self,
        method: str,
        path: str,
        *,
        query: list[tuple[str, str]] | None = None,
        body: Any = None,
        content_type: str = "application/json",
    ) -> dict[str, Any]:
        """One request.

        Raises:
            KubeError: refused or no answer.
        """
        headers = {"Accept": "application/json", "Content-Type": content_type, "User-Agent": OBJECTS_MANAGER}
        prepared = await self.api.param_serialize(
            method=method, resource_path=path, query_params=query or [], header_params=headers, body=body, auth_settings=["BearerToken"]
        )
        try:
            async with self.slots, asyncio.timeout(self.request_seconds):
                response = await self.api.call_api(*prepared, _request_timeout=self.request_seconds)
                data = await response.read()
        except TimeoutError as error:
            raise KubeError(f"{method} {path}: no answer in {self.request_seconds:g} s", 0) from error
        except (OSError, client.ApiException) as error:
            raise KubeError(f"{method} {path}: {error}", getattr(error, "status", None) or 0) from error
        if response.status >= 400:
            raise KubeError(f"{method} {path}: {response.status} {_message(data)}", response.status)
        answer: dict[str, Any] = json.loads(data)
        return answer


@asynccontextmanager
async def connect(request_seconds: float) -> AsyncIterator[Kube]:
    """Connect with the pod's service account, else with the kubeconfig."""
    settings = client.Configuration()
    try:
        config.load_incluster_config(client_configuration=settings)
    except config.ConfigException:
        await config.load_kube_config(client_configuration=settings)
    async with client.ApiClient(settings) as api:
        yield Kube(api, request_seconds, asyncio.Semaphore(_CONCURRENT))


def pods_path(namespace: str) -> str:
    """Of the pods of a namespace, or of all for ""."""
    return f"/api/v1/namespaces/{namespace}/pods" if namespace else "/api/v1/pods"


def config_maps_path(namespace: str, name: str = "") -> str:
    """Of the ConfigMaps of a namespace, of all for "", or of one."""
    if not namespace:
        return "/api/v1/configmaps"
    return f"/api/v1/namespaces/{namespace}/configmaps" + (f"/{quote(name)}" if name else "")


def weight_syncs_path(namespace: str, name: str = "", subresource: str = "") -> str:
    """Of WeightSyncs, of one, or of its status."""
    base = f"/apis/{GROUP}/{VERSION}"
    if not namespace:
        return f"{base}/{PLURAL}"
    return f"{base}/namespaces/{namespace}/{PLURAL}" + (f"/{quote(name)}" if name else "") + (f"/{subresource}" if subresource else "")


async def apply_status(kube: Kube, key: Key, status: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the status of a WeightSync."""
    body = {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "metadata": {"name": key.name}, "status": status}
    return await kube.apply(weight_syncs_path(key.namespace, key.name, "status"), body, STATUS_MANAGER)


async def set_gate(kube: Kube, pod: Key, uid: str, holds: bool, message: str, now: str) -> None:
    """Set the readiness gate's condition of an engine pod; of this very pod, not of a successor with its name."""
    condition = {
        "type": READINESS_GATE,
        "status": str(holds),
        "reason": "Synced" if holds else "NotSynced",
        "message": message,
        "lastTransitionTime": now,
    }
    await kube.call(
        "PATCH",
        f"{pods_path(pod.namespace)}/{quote(pod.name)}/status",
        query=[("fieldManager", STATUS_MANAGER)],
        body={"metadata": {"uid": uid}, "status": {"conditions": [condition]}},
        content_type="application/strategic-merge-patch+json",
    )


def _message(data: bytes) -> str:
    try:
        return str(json.loads(data)["message"])
    except (ValueError, KeyError, TypeError):
        return data[:300].decode(errors="replace")
