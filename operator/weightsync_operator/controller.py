"""Carries out what the pure modules decide: one level-triggered reconcile for each WeightSync, and full lists that repair.

News (a watch's event, a changed answer of a pod, a full list) only ever wakes a reconcile; the reconcile looks at everything
that is known. Nothing that matters lives in memory alone: assignments and their epoch are read back from the cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weightsync_core.assignment import Assignment
from weightsync_core.endpoints import Endpoint
from weightsync_core.labels import (
    ASSIGNMENT_KEY,
    ASSIGNMENT_LIMIT,
    GROUP,
    KIND,
    MANAGED_BY,
    MANAGED_BY_LABEL,
    NAME_LABEL,
    TRAINER_LABEL,
    VERSION,
    assignment_name,
)
from weightsync_operator import events
from weightsync_operator.assigning import Publication, assign
from weightsync_operator.compatibility import MISMATCHES, STARTING, EngineFacts, NoAnswer, Reason, TrainerFacts, Verdict, judge
from weightsync_operator.discovery import FoundEngine, find_engines, find_trainers, owners
from weightsync_operator.kube import (
    OBJECTS_MANAGER,
    Kube,
    KubeError,
    apply_status,
    config_maps_path,
    pods_path,
    set_gate,
    weight_syncs_path,
)
from weightsync_operator.probing import Address, Http, Prober, ask_engine, ask_trainer
from weightsync_operator.resources import Key, OnMismatch, Pod, WeightSync, key_of, timestamp
from weightsync_operator.settings import OperatorSettings
from weightsync_operator.status import Condition, Outcome, Why, build_status, excluded_reasons
from weightsync_operator.store import Kind, Store
from weightsync_operator.telemetry import Metrics

log = logging.getLogger(__name__)

_NOT_FOUND = 404
_CONFLICT = 409
_LONGEST_PAUSE_SECONDS = 30.0
_TAKEN_SECONDS = 0.2
"""After which a trainer has usually taken a new assignment, and is asked whether it has."""


@dataclass
class _Worker:
    """The reconciles of one WeightSync."""

    news: asyncio.Event
    task: asyncio.Task[None] | None = None
    told: dict[str, str] = field(default_factory=dict)
    """Engine -> reason that an Event told last."""
    ready: str = ""


@dataclass
class _Watched:
    """One kind's watch, seen from the full lists."""

    path: Callable[[str], str]
    kind: Kind[Any]
    selector: str = ""
    seen: set[Key] = field(default_factory=set)
    """Objects that the watch brought since the last full list."""
    silent: int = 0
    """Full lists in a row that found it silent."""


class Controller:
    """All WeightSyncs of the served namespaces."""

    def __init__(self, kube: Kube, settings: OperatorSettings, metrics: Metrics) -> None:
        self._kube, self._settings, self._metrics = kube, settings, metrics
        self._store = Store(self.wake)
        self._workers: dict[Key, _Worker] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._http: Http | None = None
        self._listed = False
        self._death = ""
        self._watched = {
            "pods": _Watched(pods_path, self._store.pods),
            "weightsyncs": _Watched(weight_syncs_path, self._store.weight_syncs),
            "configmaps": _Watched(config_maps_path, self._store.held, f"{MANAGED_BY_LABEL}={MANAGED_BY}"),
        }
        if settings.read_nodes:
            self._watched["nodes"] = _Watched(lambda _namespace: "/api/v1/nodes", self._store.nodes)

    # -- life

    async def start(self) -> None:
        """List everything, then begin to reconcile.

        Raises:
            KubeError: something cannot be listed.
        """
        self._http = Http(self._settings)
        self._engines = Prober[EngineFacts](self._http, ask_engine, self.wake, self._spawn, self._settings)
        self._trainers = Prober[TrainerFacts](self._http, ask_trainer, self.wake, self._spawn, self._settings)
        await self._list_all()
        self._listed = True
        for weight_sync in self._store.weight_syncs.values():
            self.wake(weight_sync.key)
        self._spawn(self._keep_listing(), "resync")

    async def stop(self) -> None:
        """Stop at once: whatever is half done is done by the next one."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._http is not None:
            await self._http.close()

    def problem(self) -> str:
        """Why this process must be restarted; "" if it is well."""
        if self._death:
            return self._death
        silent = [name for name, watched in self._watched.items() if watched.silent >= self._settings.silent_resyncs]
        return f"the watch of {', '.join(silent)} brings no changes although lists find some" if silent else ""

    @property
    def ready(self) -> bool:
        """Whether all objects were listed."""
        return self._listed

    # -- news

    def saw(self, resource: str, kind: str | None, body: Mapping[str, Any]) -> None:
        """A watch brought an object (``kind`` is DELETED, or anything else for an object that is there)."""
        watched = self._watched[resource]
        key = key_of(body)
        watched.seen.add(key)
        self._metrics.watch_event.labels(resource).set_to_current_time()
        if kind == "DELETED":
            watched.kind.drop(key)
        else:
            watched.kind.put(body)

    def wake(self, key: Key) -> None:
        """Something about a WeightSync may have changed."""
        if not self._listed:
            return
        if key not in self._workers:
            if self._store.weight_syncs.get(key) is None:
                return
            worker = self._workers[key] = _Worker(asyncio.Event())
            worker.task = self._spawn(self._keep_reconciling(key, worker), f"reconcile {key}")
        self._workers[key].news.set()

    # -- full lists

    async def _keep_listing(self) -> None:
        while True:
            await asyncio.sleep(self._settings.resync_seconds)
            try:
                unseen = await self._list_all()
            except KubeError as error:
                log.warning("weightsync: full list failed: %s", error)
                continue
            self._metrics.resync.set_to_current_time()
            for worker in self._workers.values():
                worker.news.set()
            await asyncio.sleep(self._settings.lag_seconds)
            for name, keys in unseen.items():
                watched = self._watched[name]
                lost = keys - watched.seen
                watched.silent = watched.silent + 1 if lost else 0
                if lost:
                    self._metrics.watch_silent.labels(name).inc()
                    log.warning("weightsync: watch=%s brought none of %d changes, first %s; the full list did", name, len(lost), min(lost))

    async def _list_all(self) -> dict[str, set[Key]]:
        """List every kind; returns what no watch had brought yet."""
        unseen: dict[str, set[Key]] = {}
        for name, watched in self._watched.items():
            unseen[name] = set()
            watched.seen.clear()
            for namespace in ("",) if name == "nodes" else self._settings.namespaces or ("",):
                bodies = await self._kube.list_all(watched.path(namespace), watched.selector)
                if self._listed:
                    unseen[name] |= watched.kind.unseen(namespace, bodies)
                watched.kind.replace(namespace, bodies)
        return unseen

    # -- reconcile

    async def _keep_reconciling(self, key: Key, worker: _Worker) -> None:
        pause = 0.0
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(worker.news.wait(), pause or None)
            await asyncio.sleep(self._settings.settle_seconds)
            worker.news.clear()
            weight_sync = self._store.weight_syncs.get(key)
            if weight_sync is None or weight_sync.deleting:
                self._forget(key)
                return
            result = "ok"
            began = time.monotonic()
            try:
                await self._reconcile(weight_sync, worker)
                pause = 0.0
            except KubeError as error:
                if error.status == _NOT_FOUND and self._store.weight_syncs.get(key) is None:
                    continue
                result, pause = "error", min(max(pause * 2, 1.0), _LONGEST_PAUSE_SECONDS)
                log.warning("weightsync: weightsync=%s reconcile failed, again in %.0f s: %s", key, pause, error)
            self._metrics.reconcile_seconds.labels(*key).observe(time.monotonic() - began)
            self._metrics.reconciles.labels(*key, result).inc()

    async def _reconcile(self, weight_sync: WeightSync, worker: _Worker) -> None:
        key = weight_sync.key
        pods = [pod for pod in self._store.pods.values() if pod.key.namespace == key.namespace]
        neighbours = [each for each in self._store.weight_syncs.values() if each.key.namespace == key.namespace and not each.deleting]
        found = {each.key: find_engines(each, pods) for each in neighbours}
        owner = owners(neighbours, found)
        engines, trainers = found[key], find_trainers(weight_sync, pods)
        self._ask(weight_sync, engines, trainers, owner)
        answers = self._trainers.answers(key)
        verdicts = judge(
            weight_sync,
            engines,
            self._engines.answers(key),
            [answer for answer in answers.values() if isinstance(answer, TrainerFacts)],
            owner,
            {node.name: architecture for node, architecture in self._store.nodes.items()},
        )
        if self._too_early(key, verdicts, trainers):
            return
        outcome = await self._publish(weight_sync, _writers(trainers, answers), verdicts)
        synced = await self._gates(weight_sync, verdicts)
        now = timestamp(dt.datetime.now(dt.UTC))
        status = build_status(weight_sync, verdicts, trainers, answers, outcome, synced, now)
        if status != weight_sync.status:
            self._store.weight_syncs.put(await apply_status(self._kube, key, status))
        await self._tell(weight_sync, worker, verdicts, status, now)
        ready = next(condition for condition in status["conditions"] if condition["type"] == Condition.READY)
        self._metrics.describe(
            key,
            {"assigned": status["engines"]["assigned"], **{str(reason): n for reason, n in excluded_reasons(verdicts).items()}},
            {"found": len(trainers), "connected": status["trainers"]["connected"]},
            outcome.epoch,
            ready["status"] == "True",
        )

    def _ask(self, weight_sync: WeightSync, engines: Sequence[FoundEngine], trainers: Sequence[Pod], owner: Mapping[str, Key]) -> None:
        """Have exactly these pods asked."""
        key = weight_sync.key
        mine = [engine for engine in engines if engine.url and all(owner.get(pod.uid) == key for pod in engine.members)]
        self._engines.watch(key, {engine.id: Address(engine.url, engine.uid) for engine in mine})
        port = weight_sync.trainer_port
        self._trainers.watch(
            key, {pod.key.name: Address(Endpoint(pod.ip, port).url, f"{pod.uid}.{pod.restarts}") for pod in trainers if pod.ip}
        )

    def _too_early(self, key: Key, verdicts: Sequence[Verdict], trainers: Sequence[Pod]) -> bool:
        """Whether an engine or trainer in force was not asked yet (by a new operator): not knowing it is no reason to take it away.

        Each is asked within seconds, and whatever comes of it wakes the next reconcile.
        """
        published, answers = self._published(key), self._trainers.answers(key)
        in_force = {engine.id for document in published.values() for engine in document.engines}
        unasked = any(verdict.reason is Reason.PENDING and verdict.engine.id in in_force for verdict in verdicts)
        return unasked or any(pod.ip and pod.key.name in published and pod.key.name not in answers for pod in trainers)

    def _published(self, key: Key) -> dict[str, Assignment]:
        """Assignments in force, by trainer pod."""
        held = [each for each in self._store.held.values() if (each.key.namespace, each.weight_sync) == key]
        return {each.trainer: each.document for each in held if each.document is not None}

    async def _publish(self, weight_sync: WeightSync, trainers: Sequence[Pod], verdicts: Sequence[Verdict]) -> Outcome:
        published = self._published(weight_sync.key)
        epoch = max((document.epoch for document in published.values()), default=0)
        if not trainers:
            return Outcome(Why.NO_TRAINERS, "no running pod matches spec.trainer.selector; assignments stay as they are", epoch)
        if weight_sync.suspended:
            return Outcome(Why.SUSPENDED, "spec.suspend is true; assignments stay as they are", epoch)
        other = [verdict for verdict in verdicts if verdict.reason in MISMATCHES]
        if other and weight_sync.on_mismatch is OnMismatch.BLOCK:
            names = ", ".join(verdict.engine.id for verdict in other[:5])
            return Outcome(
                Why.BLOCKED, f"{len(other)} engines do not match ({names}) and onMismatch is Block; assignments stay as they are", epoch
            )
        wanted = assign(weight_sync, trainers, verdicts, published)
        if wanted.changed:
            texts = {name: document.dump() for name, document in wanted.documents.items()}
            name, text = max(texts.items(), key=lambda each: len(each[1]))
            if len(text) > ASSIGNMENT_LIMIT:
                return Outcome(
                    Why.TOO_LARGE,
                    f"the assignment of trainer {name} has {len(text)} bytes, at most {ASSIGNMENT_LIMIT} fit: use more trainer pods or a "
                    "second WeightSync; assignments stay as they are",
                    epoch,
                )
            try:
                await self._write(weight_sync, wanted, texts)
            except KubeError as error:
                if error.status in (0, 500, 503) or error.status == _NOT_FOUND:
                    raise
                return Outcome(Why.WRITE_FAILED, f"ConfigMaps could not be written: {error}", epoch)
        included = sum(verdict.included for verdict in verdicts)
        return Outcome(Why.PUBLISHED, f"{included} engines are shared out to {len(trainers)} trainer pods", wanted.epoch)

    async def _write(self, weight_sync: WeightSync, wanted: Publication, texts: Mapping[str, str]) -> None:
        namespace, name = weight_sync.key

        async def put(trainer: str, text: str) -> None:
            body = {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {
                    "name": assignment_name(name, trainer),
                    "namespace": namespace,
                    "labels": {MANAGED_BY_LABEL: MANAGED_BY, NAME_LABEL: name, TRAINER_LABEL: trainer},
                    "ownerReferences": [
                        {
                            "apiVersion": f"{GROUP}/{VERSION}",
                            "kind": KIND,
                            "name": name,
                            "uid": weight_sync.uid,
                            "controller": True,
                            "blockOwnerDeletion": False,
                        }
                    ],
                },
                "data": {ASSIGNMENT_KEY: text},
            }
            path = config_maps_path(namespace, assignment_name(name, trainer))
            if self._store.held.get(Key(namespace, assignment_name(name, trainer))) is None:
                await self._require_free(path)
            self._store.held.put(await self._kube.apply(path, body, OBJECTS_MANAGER))

        async def remove(trainer: str) -> None:
            path = config_maps_path(namespace, assignment_name(name, trainer))
            try:
                await self._kube.call("DELETE", path)
            except KubeError as error:
                if error.status != _NOT_FOUND:
                    raise
            self._store.held.drop(Key(namespace, assignment_name(name, trainer)))

        await asyncio.gather(*(put(trainer, text) for trainer, text in texts.items()), *(remove(trainer) for trainer in wanted.obsolete))
        asyncio.get_running_loop().call_later(_TAKEN_SECONDS, self._trainers.poke, weight_sync.key)
        log.info(
            "weightsync: weightsync=%s epoch=%d trainers=%d engines=%d handed out",
            weight_sync.key, wanted.epoch, len(texts), sum(len(document.engines) for document in wanted.documents.values()),
        )  # fmt: skip

    async def _require_free(self, path: str) -> None:
        """Raises: KubeError: somebody else's ConfigMap has the name; it is left alone."""
        try:
            found = await self._kube.call("GET", path)
        except KubeError as error:
            if error.status == _NOT_FOUND:
                return
            raise
        if (found["metadata"].get("labels") or {}).get(MANAGED_BY_LABEL) != MANAGED_BY:
            raise KubeError(f"{path} exists and is not the operator's: delete or rename it", _CONFLICT)

    async def _gates(self, weight_sync: WeightSync, verdicts: Sequence[Verdict]) -> int:
        """Set readiness gates; returns how many engines serve what their trainer brought last."""
        key = weight_sync.key
        writer = {engine.id: trainer for trainer, document in self._published(key).items() for engine in document.engines}
        synced, changes = 0, []
        for verdict in verdicts:
            holds = self._holds_current(weight_sync, verdict, writer.get(verdict.engine.id, ""))
            synced += bool(holds)
            if weight_sync.manage_gate and holds is not None:
                changes += [(pod, holds, verdict) for pod in verdict.engine.members if pod.gated and pod.gate != str(holds)]
        now = timestamp(dt.datetime.now(dt.UTC))

        async def change(pod: Pod, holds: bool, verdict: Verdict) -> None:
            words = f"serves version {verdict.facts.version}" if verdict.facts is not None else verdict.message
            try:
                await set_gate(self._kube, pod.key, pod.uid, holds, words, now)
            except KubeError as error:
                if error.status not in (_NOT_FOUND, _CONFLICT):  # gone, or another pod of that name
                    raise

        await asyncio.gather(*(change(*each) for each in changes))
        return synced

    def _holds_current(self, weight_sync: WeightSync, verdict: Verdict, writer: str) -> bool | None:
        """Whether an engine serves what its trainer brought last; None if that cannot be said now."""
        key, facts = weight_sync.key, verdict.facts
        if facts is None:
            return None
        if not verdict.included:
            return False if verdict.reason in MISMATCHES else None
        trainer = self._trainers.answers(key).get(writer)
        known = trainer if isinstance(trainer, TrainerFacts) else None
        version = (known.version if known is not None else "") or weight_sync.status.get("version", "")
        if not version:
            return True  # nobody brought anything yet: it serves what it was started with
        if facts.version == version or (known is not None and known.updating and facts.version == known.updating):
            return True
        if self._engines.asked_at(key, verdict.engine.id) <= self._trainers.asked_at(key, writer):
            self._engines.poke(key, {verdict.engine.id})  # its answer is older than the news of the version
            return None
        return False

    # -- telling

    async def _tell(
        self, weight_sync: WeightSync, worker: _Worker, verdicts: Sequence[Verdict], status: Mapping[str, Any], now: str
    ) -> None:
        """Events for what changed since the last reconcile; engines that are starting are not news."""
        news: list[tuple[bool, str, str]] = []
        current = {verdict.engine.id: str(verdict.reason or "") for verdict in verdicts if verdict.reason not in STARTING}
        for verdict in verdicts:
            reason = current.get(verdict.engine.id)
            if reason and worker.told.get(verdict.engine.id) != reason:
                news.append((True, f"Engine{reason}", f"{verdict.engine.id}: {verdict.message}"))
        worker.told = current
        ready = next(condition for condition in status["conditions"] if condition["type"] == Condition.READY)
        # Every new epoch passes through "Connecting" for a moment: no news.
        if ready["reason"] not in (worker.ready, Why.CONNECTING):
            news.append((ready["status"] != "True", str(ready["reason"]), str(ready["message"])))
            worker.ready = ready["reason"]
        for warning, reason, message in news:
            await events.post(self._kube, weight_sync, warning=warning, reason=reason, message=message, now=now)

    # -- tasks

    def _forget(self, key: Key) -> None:
        self._workers.pop(key, None)
        self._engines.watch(key, {})
        self._trainers.watch(key, {})
        self._metrics.forget(key)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Start a task whose death by an error is this process's problem, not a silence."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("weightsync: task=%s died", task.get_name(), exc_info=error)
            self._death = f"task {task.get_name()} died: {type(error).__name__}: {error}"


def _writers(trainers: Sequence[Pod], answers: Mapping[str, TrainerFacts | NoAnswer]) -> list[Pod]:
    """Trainer pods that engines are given to: those whose sender answers, or all with an address while none does.

    A pod that cannot be scheduled, or whose trainer is not up yet, would leave its engines without weights.
    """
    answering = [pod for pod in trainers if isinstance(answers.get(pod.key.name), TrainerFacts)]
    return answering or [pod for pod in trainers if pod.ip]
