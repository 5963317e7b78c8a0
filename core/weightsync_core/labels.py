"""Names that operator, sender and chart agree on inside Kubernetes."""

from __future__ import annotations

GROUP = "weightsync.dev"
VERSION = "v1alpha1"
PLURAL = "weightsyncs"
KIND = "WeightSync"

NAME_LABEL = f"{GROUP}/name"
"""On an assignment's ConfigMap: the WeightSync that it belongs to."""

TRAINER_LABEL = f"{GROUP}/trainer"
"""On an assignment's ConfigMap: the trainer pod that reads it."""

MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
MANAGED_BY = "p2p-weightsync"

READINESS_GATE = f"{GROUP}/synced"
"""Condition type of an engine pod: True while it holds the current version."""

GPU_PRODUCT_LABELS = ("nvidia.com/gpu.compute.major", "nvidia.com/gpu.compute.minor")
"""Node labels of NVIDIA's GPU feature discovery: the compute capability."""

ASSIGNMENT_KEY = "assignment.json"
"""Key of the document in a trainer's ConfigMap."""

ASSIGNMENT_LIMIT = 64 * 1024
"""Bytes that one trainer's document may have; etcd refuses objects of 1.5 MiB, and every trainer watches its own."""

SENDER_PORT = 9095
"""Default port of a trainer pod: /identity, /status, /metrics, /healthz."""


def assignment_name(weight_sync: str, trainer: str) -> str:
    """Name of the ConfigMap with one trainer pod's assignment: fixed, so that a Role can list it.

    Names of WeightSyncs have no dots, so no two pairs share a name.
    """
    return f"{weight_sync}.{trainer}"
