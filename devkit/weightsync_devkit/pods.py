"""Pods that no node runs: Pod objects whose addresses are loopback ones, with small servers behind them.

For what many pods, or broken ones, do to the operator. An engine here answers the routes that the operator asks; a trainer
is the sender's own membership and telemetry without a model. Real engines in real pods are in the end-to-end test.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from kubernetes import client, config

from weightsync_core.labels import READINESS_GATE, SENDER_PORT
from weightsync_core.protocol import IDENTITY_ROUTE
from weightsync_sender.membership import Membership, PodEnvironment
from weightsync_sender.telemetry import Recorder

ENGINE_PORT = 30000


@dataclass
class FakeEngine:
    """What one engine answers; change it at will."""

    ip: str
    sglang: str = "0.5.23"
    arch: str = "sm_90"
    transports: tuple[str, ...] = ("mooncake", "nixl")
    generation: str = "g0"
    size: int = 1
    nodes: int = 1
    version: str = "default"
    plugin: bool = True
    seeding: bool = True
    """A stock engine's flag."""
    api_key: str = ""
    hangs: bool = False
    nonsense: str = ""
    """Answered instead of anything else, if set."""

    def identity(self) -> dict[str, Any]:
        """The plugin's identity."""
        rank = {
            "identity": {"sglang": self.sglang, "torch": "2.11.0", "arch": self.arch},
            "placement": {},
            "generation": self.generation,
            "bytes": {"target": 1 << 30},
            "transports": list(self.transports),
            "unavailable": {},
        }
        return {"ranks": [rank] * (self.size // self.nodes), "size": self.size, "nodes": self.nodes, "model_path": "/m", "config": None}

    def server_info(self) -> dict[str, Any]:
        """Stock sglang's."""
        return {
            "version": self.sglang,
            "tp_size": self.size,
            "startup_time": self.generation,
            "remote_instance_weight_loader_start_seed_via_transfer_engine": self.seeding,
        }


class FakeEngines:
    """Servers of many engines, each on its own loopback address, in one thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._engines: dict[str, FakeEngine] = {}
        self._sites: dict[str, web.TCPSite] = {}

    def __enter__(self) -> FakeEngines:
        self._thread.start()
        self._do(self._start())
        return self

    def __exit__(self, *exc: object) -> None:
        self._do(self._runner.cleanup())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def listen(self, engine: FakeEngine) -> FakeEngine:
        """Open its port."""
        self._engines[engine.ip] = engine
        self._do(self._open(engine.ip))
        return engine

    def refuse(self, ip: str) -> None:
        """Close its port, as a process that ended does."""
        site = self._sites.pop(ip, None)
        if site is not None:
            self._do(site.stop())

    def _do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(20)

    async def _start(self) -> None:
        application = web.Application()
        application.add_routes(
            [web.get("/model_info", self._model), web.get(IDENTITY_ROUTE, self._identity), web.get("/server_info", self._info)]
        )
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()

    async def _open(self, ip: str) -> None:
        if ip not in self._sites:
            self._sites[ip] = web.TCPSite(self._runner, ip, ENGINE_PORT)
            await self._sites[ip].start()

    async def _asked(self, request: web.Request) -> FakeEngine:
        assert request.transport is not None
        engine = self._engines[request.transport.get_extra_info("sockname")[0]]
        until = asyncio.get_running_loop().time() + 15
        while engine.hangs and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(0.05)
        if engine.nonsense:
            raise web.HTTPOk(text=engine.nonsense)
        if engine.api_key and request.headers.get("Authorization") != f"Bearer {engine.api_key}":
            raise web.HTTPUnauthorized
        return engine

    async def _model(self, request: web.Request) -> web.Response:
        return web.json_response({"model_path": "/m", "weight_version": (await self._asked(request)).version})

    async def _identity(self, request: web.Request) -> web.Response:
        engine = await self._asked(request)
        if not engine.plugin:
            raise web.HTTPNotFound
        return web.json_response(engine.identity())

    async def _info(self, request: web.Request) -> web.Response:
        return web.json_response((await self._asked(request)).server_info())


@dataclass
class FakeTrainer:
    """A trainer pod's sender without a model: it takes assignments and says so."""

    name: str
    ip: str
    recorder: Recorder
    membership: Membership

    def brought(self, version: str, at: float) -> None:
        """As after an update that succeeded."""
        self.recorder.status.version, self.recorder.status.updated_at = version, at

    def close(self) -> None:
        """Stop answering and watching."""
        self.membership.close()
        self.recorder.close()


@dataclass
class PodSpace:
    """One namespace's pods, with the servers behind them."""

    namespace: str
    kubeconfig: str
    engines: FakeEngines
    _trainers: dict[str, FakeTrainer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        settings = client.Configuration()
        config.load_kube_config(self.kubeconfig, client_configuration=settings)
        self.api = client.ApiClient(settings)
        self.core, self.custom = client.CoreV1Api(self.api), client.CustomObjectsApi(self.api)

    def engine(self, name: str, *, labels: Mapping[str, str] | None = None, gated: bool = False, node: str = "", **says: Any) -> FakeEngine:
        """An engine pod that runs and answers."""
        engine = self.engines.listen(FakeEngine(_next_address(), **says))
        self.pod(name, engine.ip, {"app": "engine", **(labels or {})}, gated=gated, node=node)
        return engine

    def trainer(self, name: str, weight_sync: str, *, sglang: str = "0.5.23", arch: str = "sm_90") -> FakeTrainer:
        """A trainer pod that runs, answers and watches its assignment."""
        ip = _next_address()
        recorder = Recorder(weight_sync, name, {"sglang": sglang, "torch": "2.11.0", "arch": arch})
        recorder.serve(SENDER_PORT, ip)
        membership = Membership(PodEnvironment(weight_sync, name, self.namespace), recorder.assigned)
        membership.start()
        trainer = self._trainers[name] = FakeTrainer(name, ip, recorder, membership)
        self.pod(name, ip, {"app": "trainer"})
        return trainer

    def pod(self, name: str, ip: str, labels: Mapping[str, str], *, gated: bool = False, node: str = "") -> None:
        """A Pod object that says it runs."""
        # No scheduler of that name: the pod stays an object, even where there is a node.
        spec: dict[str, Any] = {"containers": [{"name": "main", "image": "none"}], "schedulerName": "nobody"}
        if gated:
            spec["readinessGates"] = [{"conditionType": READINESS_GATE}]
        if node:
            spec["nodeName"] = node
        body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": dict(labels)}, "spec": spec}
        self.core.create_namespaced_pod(self.namespace, body)
        self.status(name, phase="Running", podIP=ip, podIPs=[{"ip": ip}])

    def status(self, name: str, **fields: Any) -> None:
        """Set fields of a pod's status, as its kubelet would."""
        self.core.patch_namespaced_pod_status(name, self.namespace, {"status": fields}, _content_type="application/merge-patch+json")

    def delete_pod(self, name: str) -> None:
        """Take a pod away at once, and what answers for it."""
        self.core.delete_namespaced_pod(name, self.namespace, grace_period_seconds=0)
        if name in self._trainers:
            self._trainers.pop(name).close()

    def gate(self, name: str) -> str:
        """Status of a pod's readiness gate, "" if unset."""
        conditions = self.core.read_namespaced_pod(name, self.namespace).status.conditions or []
        return next((condition.status for condition in conditions if condition.type == READINESS_GATE), "")

    def close(self) -> None:
        """Close trainers."""
        for trainer in self._trainers.values():
            trainer.close()
        with contextlib.suppress(client.ApiException):
            self.core.delete_namespace(self.namespace)


_LAST_ADDRESS = itertools.count(10 << 8)


def _next_address() -> str:
    """Each once, to whichever thread asks."""
    number = next(_LAST_ADDRESS)  # of a C iterator, so no two threads get one number; a generator would refuse the second
    return f"127.77.{number // 249 + 1}.{number % 249 + 1}"
