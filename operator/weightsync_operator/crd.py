"""Compares the installed CustomResourceDefinition with what this operator reads and writes. Pure.

Helm never upgrades what lies in a chart's ``crds`` folder and users apply CRDs by hand, so an old one under a new
operator is the usual accident: unknown fields are dropped without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weightsync_core.errors import WeightSyncError, listing
from weightsync_core.labels import GROUP, KIND, PLURAL, VERSION

OPENAPI_PATH = f"/openapi/v3/apis/{GROUP}/{VERSION}"
"""Every authenticated client may read it, so that a namespaced operator needs no cluster-wide right."""

REQUIRED_FIELDS = (
    "spec.trainer.selector",
    "spec.trainer.port",
    "spec.engineGroups[].name",
    "spec.engineGroups[].selector",
    "spec.engineGroups[].port",
    "spec.engineGroups[].podGroup.label",
    "spec.engineGroups[].podGroup.indexLabel",
    "spec.engineGroups[].podGroup.size",
    "spec.transport.backend",
    "spec.transport.network",
    "spec.update.bufferSizeMegabytes",
    "spec.update.verify",
    "spec.update.pauseMode",
    "spec.update.minimumEngines",
    "spec.compatibility.sglang",
    "spec.compatibility.gpuArchitecture",
    "spec.compatibility.onMismatch",
    "spec.readinessGate",
    "spec.suspend",
    "status.observedGeneration",
    "status.epoch",
    "status.version",
    "status.engines.summary",
    "status.engines.found",
    "status.engines.assigned",
    "status.engines.synced",
    "status.engines.excluded",
    "status.trainers.summary",
    "status.trainers.found",
    "status.trainers.connected",
    "status.excludedEngines[].engine",
    "status.excludedEngines[].reason",
    "status.excludedEngines[].message",
    "status.conditions[].type",
)


class CrdError(WeightSyncError):
    """The installed CRD is absent or too old."""


def check(openapi: Mapping[str, Any] | None) -> None:
    """Compare.

    Args:
        openapi: the API server's answer to ``OPENAPI_PATH``; None where it knows no such group.

    Raises:
        CrdError: absent, or fields are missing, named one by one.
    """
    schemas = (openapi or {}).get("components", {}).get("schemas", {})
    schema = next((each for name, each in schemas.items() if name.split(".")[-1] == KIND), None)
    if schema is None:
        raise CrdError(f"the API server knows no {KIND} of {GROUP}/{VERSION}: kubectl apply --server-side -f crds/")
    missing = [path for path in REQUIRED_FIELDS if not _has(schema, path.split("."))]
    if missing:
        raise CrdError(
            f"the installed CRD {PLURAL}.{GROUP} lacks {listing(missing)}: it is older than this operator; "
            "kubectl apply --server-side -f crds/"
        )


def _has(schema: Mapping[str, Any], path: list[str]) -> bool:
    if not path:
        return True
    name, inner = path[0].removesuffix("[]"), path[0].endswith("[]")
    found = schema.get("properties", {}).get(name)
    if found is None:
        return False
    return _has(found.get("items", {}) if inner else found, path[1:])
