"""What kopf watches for the controller: raw events only, so kopf keeps no state on any object."""

from __future__ import annotations

import logging
from typing import Any

import kopf

from weightsync_core.labels import GROUP, MANAGED_BY, MANAGED_BY_LABEL, PLURAL, VERSION
from weightsync_operator.controller import Controller
from weightsync_operator.settings import OperatorSettings

SHUTDOWN_SECONDS = 0.5
"""For tasks of kopf that do not end at once; none of them holds anything."""
_WATCH_SECONDS = 240
"""The server ends a watch after this time and kopf asks again."""


def make_registry(controller: Controller, settings: OperatorSettings) -> kopf.OperatorRegistry:
    """Handlers that pass every event on."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    async def login(logger: kopf.Logger, settings: kopf.OperatorSettings, **_: Any) -> kopf.ConnectionInfo | None:
        # As the official client does it: by the service account's environment, which needs no name server, else by kubeconfig.
        return kopf.login_via_client(logger=logger, settings=settings)

    def watch(resource: str, *selector: str, **options: Any) -> None:
        @kopf.on.event(*selector, registry=registry, id=f"saw-{resource}", **options)
        async def saw(type: str | None, body: kopf.Body, **_: Any) -> None:
            controller.saw(resource, type, body)

    watch("weightsyncs", GROUP, VERSION, PLURAL)
    watch("pods", "", "v1", "pods")
    watch("configmaps", "", "v1", "configmaps", labels={MANAGED_BY_LABEL: MANAGED_BY})
    if settings.read_nodes:
        watch("nodes", "", "v1", "nodes")
    return registry


def make_settings(settings: OperatorSettings) -> kopf.OperatorSettings:
    """kopf's own settings."""
    mine = kopf.OperatorSettings()
    mine.posting.enabled = False
    mine.posting.level = logging.CRITICAL
    # Scanning for namespaces and CRDs needs cluster-wide rights that a namespaced operator does not have.
    mine.scanning.disabled = bool(settings.namespaces)
    mine.watching.server_timeout = _WATCH_SECONDS
    mine.watching.client_timeout = _WATCH_SECONDS + 30
    mine.watching.connect_timeout = settings.request_seconds
    mine.networking.request_timeout = settings.request_seconds
    mine.process.ultimate_exiting_timeout = SHUTDOWN_SECONDS
    return mine
