"""``p2p-weightsync-operator``: the operator's process."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

import kopf
import typer
from kubernetes.aio.leaderelection import leaderelection
from kubernetes.aio.leaderelection.electionconfig import Config

from weightsync_core.errors import WeightSyncError
from weightsync_operator import crd
from weightsync_operator.controller import Controller
from weightsync_operator.handlers import make_registry, make_settings
from weightsync_operator.kube import OBJECTS_MANAGER, Kube, KubeError, connect
from weightsync_operator.lease import ReplicaLease
from weightsync_operator.settings import OperatorSettings
from weightsync_operator.telemetry import Metrics, serve

log = logging.getLogger(__name__)

API_KEY_VARIABLE = "WEIGHTSYNC_ENGINE_API_KEY"
_NOT_FOUND = 404
_WATCHDOG_SECONDS = 1.0
_END_SECONDS = 3.0


async def run(settings: OperatorSettings) -> None:
    """Serve until told to stop.

    Raises:
        WeightSyncError: the CRD does not fit, the API server refuses, the lease was lost, or a watch or task died.
    """
    metrics, stop = Metrics(), asyncio.Event()
    _stop_on_signals(stop)
    async with connect(settings.request_seconds) as kube:
        controller = Controller(kube, settings, metrics)
        waiting = bool(settings.lease)
        server = await serve(metrics, settings.port, controller.problem, lambda: controller.ready or waiting)
        try:
            if settings.lease:
                await _lead(kube, settings, stop, lambda: _work(kube, controller, settings, metrics, stop))
            else:
                await _work(kube, controller, settings, metrics, stop)
        finally:
            await server.cleanup()


def _stop_on_signals(stop: asyncio.Event) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)


async def _work(kube: Kube, controller: Controller, settings: OperatorSettings, metrics: Metrics, stop: asyncio.Event) -> None:
    await _check_crd(kube)
    metrics.leader.set(1)
    await controller.start()
    started = asyncio.Event()
    watching = asyncio.create_task(
        kopf.operator(
            registry=make_registry(controller, settings),
            settings=make_settings(settings),
            namespaces=settings.namespaces,
            clusterwide=not settings.namespaces,
            standalone=True,
            stop_flag=stop,
            ready_flag=started,
        )
    )
    waiting, stopping = asyncio.create_task(started.wait()), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([watching, waiting], return_when=asyncio.FIRST_COMPLETED)
        _stop_on_signals(stop)  # kopf has put its own in their place
        while not watching.done() and not stop.is_set():
            await asyncio.wait([watching, stopping], timeout=_WATCHDOG_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if controller.problem():
                raise WeightSyncError(f"{controller.problem()}; ending, to be started again")
        if watching.done():
            watching.result()
        if not stop.is_set():
            raise WeightSyncError("the watches ended; ending, to be started again")
    finally:
        stop.set()
        await controller.stop()
        waiting.cancel()
        stopping.cancel()
        await asyncio.wait([watching], timeout=_END_SECONDS)
        watching.cancel()


async def _lead(kube: Kube, settings: OperatorSettings, stop: asyncio.Event, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Work while this replica holds the Lease.

    Raises:
        WeightSyncError: it lost the Lease: whatever it still believes may be wrong, so the process ends.
    """
    leading = asyncio.Event()

    async def began() -> None:
        leading.set()

    async def ended() -> None:
        """The election's end is seen from its task."""

    lock = ReplicaLease(settings.lease, settings.lease_namespace, settings.identity, kube.api)
    seconds = settings.lease_seconds
    config = Config(lock, seconds, seconds * 2 // 3, max(seconds // 10, 1), began, ended)
    electing = asyncio.create_task(leaderelection.LeaderElection(config).run())
    waiting = [asyncio.create_task(leading.wait()), asyncio.create_task(stop.wait())]
    try:
        await asyncio.wait([electing, *waiting], return_when=asyncio.FIRST_COMPLETED)
        if leading.is_set() and not stop.is_set():
            log.info("weightsync: lease=%s identity=%s held", settings.lease, settings.identity)
            working = asyncio.create_task(work())
            await asyncio.wait([electing, working], return_when=asyncio.FIRST_COMPLETED)
            stop.set()
            await working
        if electing.done():
            electing.result()
            raise WeightSyncError(f"lost the lease {settings.lease}; ending, to be started again")
    finally:
        for task in (electing, *waiting):
            task.cancel()


async def _check_crd(kube: Kube) -> None:
    try:
        openapi = await kube.call("GET", crd.OPENAPI_PATH)
    except KubeError as error:
        if error.status != _NOT_FOUND:
            raise
        openapi = None
    crd.check(openapi)


app = typer.Typer(add_completion=False)


@app.command()
def main(
    namespace: Annotated[list[str] | None, typer.Option(help="Serve this namespace; may be given several times.")] = None,
    all_namespaces: Annotated[bool, typer.Option(help="Serve all namespaces; needs a ClusterRole.")] = False,
    read_nodes: Annotated[bool, typer.Option(help="Read GPU architectures from node labels; needs a ClusterRole.")] = False,
    port: Annotated[int, typer.Option(help="/metrics, /healthz, /readyz.")] = OperatorSettings.port,
    resync: Annotated[float, typer.Option(min=1, help="Seconds between full lists.")] = OperatorSettings.resync_seconds,
    lease: Annotated[str, typer.Option(help="Name of the Lease that one of several replicas must hold.")] = "",
    verbose: Annotated[bool, typer.Option(help="Log every decision.")] = False,
) -> None:
    """Keep trainers and sglang engines matched."""
    logging.basicConfig(level=logging.DEBUG if verbose else logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    for noisy in ("kopf", "aiohttp", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    if not namespace and not all_namespaces:
        raise typer.BadParameter("give --namespace (one or more) or --all-namespaces")
    os.environ.setdefault("POD_ID", OBJECTS_MANAGER)  # else kopf looks for the user's name, which an image need not have
    settings = OperatorSettings(
        namespaces=() if all_namespaces else tuple(namespace or ()),
        read_nodes=read_nodes,
        port=port,
        resync_seconds=resync,
        api_key=os.environ.get(API_KEY_VARIABLE, ""),
        lease=lease,
        lease_namespace=os.environ.get("POD_NAMESPACE", ""),
        identity=os.environ.get("POD_NAME", ""),
    )
    try:
        asyncio.run(run(settings))
    except WeightSyncError as error:
        log.critical("weightsync: %s", error)
        sys.exit(1)


if __name__ == "__main__":
    app()
