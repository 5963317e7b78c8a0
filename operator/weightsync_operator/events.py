"""Kubernetes Events about WeightSyncs: one object for each thing that happens, counted when it happens again."""

from __future__ import annotations

import hashlib
import logging
from urllib.parse import quote

from weightsync_core.labels import GROUP, KIND, VERSION
from weightsync_operator.kube import OBJECTS_MANAGER, Kube, KubeError
from weightsync_operator.resources import WeightSync

log = logging.getLogger(__name__)

_MESSAGE_LIMIT = 1000
_CONFLICT = 409


async def post(kube: Kube, weight_sync: WeightSync, *, warning: bool, reason: str, message: str, now: str) -> None:
    """Tell what happened. An Event that cannot be written is logged: it never holds up the work.

    The name is made from what it says, so that a repeat, from a restarted operator too, counts up the one that is there.
    """
    message = message[:_MESSAGE_LIMIT]
    kind = "Warning" if warning else "Normal"
    digest = hashlib.sha256(f"{weight_sync.uid}{kind}{reason}{message}".encode()).hexdigest()[:16]
    name = f"{weight_sync.key.name}.{digest}"
    path = f"/api/v1/namespaces/{weight_sync.key.namespace}/events"
    body = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": weight_sync.key.namespace},
        "involvedObject": {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": KIND,
            "namespace": weight_sync.key.namespace,
            "name": weight_sync.key.name,
            "uid": weight_sync.uid,
        },
        "type": kind,
        "reason": reason,
        "message": message,
        "source": {"component": OBJECTS_MANAGER},
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }
    try:
        try:
            await kube.call("POST", path, body=body)
        except KubeError as error:
            if error.status != _CONFLICT:
                raise
            known = await kube.call("GET", f"{path}/{quote(name)}")
            change = {"count": known.get("count", 1) + 1, "lastTimestamp": now}
            await kube.call("PATCH", f"{path}/{quote(name)}", body=change, content_type="application/merge-patch+json")
    except KubeError as error:
        log.warning("weightsync: weightsync=%s event=%s not written: %s", weight_sync.key, reason, error)
