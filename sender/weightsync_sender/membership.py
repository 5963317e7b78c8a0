"""Which engines this trainer pod writes: its assignment, watched through the API, read from the mounted file where it fails.

In: ConfigMap events and file texts. Out: the last good assignment, which stays in force whatever arrives or fails to
arrive. Runs in one daemon thread; never touches an engine.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightsync_core.assignment import Assignment, accept
from weightsync_core.errors import DeadlineExceeded, DocumentError, WeightSyncError
from weightsync_core.labels import ASSIGNMENT_KEY, SENDER_PORT, assignment_name
from weightsync_sender.settings import SettingsError

log = logging.getLogger(__name__)

_WATCH_SECONDS = 240
"""The server ends a watch after this time; the next one starts where it ended."""
_CONNECT_SECONDS = 5.0
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.2, 10.0
_FILE_SECONDS = 1.0
"""Between looks at the mounted file while the API cannot be watched."""


@dataclass(frozen=True)
class PodEnvironment:
    """What a trainer pod's environment says about its place."""

    weight_sync: str
    """WEIGHTSYNC_NAME: the WeightSync resource."""
    pod: str
    """POD_NAME, from the downward API."""
    namespace: str
    """POD_NAMESPACE, from the downward API."""
    file: Path | None = None
    """WEIGHTSYNC_ASSIGNMENT_FILE: the mounted ConfigMap's ``assignment.json``; the fallback where the API cannot be watched."""
    port: int = SENDER_PORT
    """WEIGHTSYNC_PORT: /identity, /status, /metrics, /healthz."""
    host: str | None = None
    """POD_IP: this pod's address as engines see it."""
    api_key: str | None = None
    """WEIGHTSYNC_ENGINE_API_KEY: of engines that were started with ``--api-key``."""

    @staticmethod
    def read(environ: Mapping[str, str] = os.environ) -> PodEnvironment:
        """Read the variables above.

        Raises:
            SettingsError: one is missing or no number.
        """
        missing = [name for name in ("WEIGHTSYNC_NAME", "POD_NAME", "POD_NAMESPACE") if not environ.get(name)]
        if missing:
            raise SettingsError(
                f"not set: {', '.join(missing)}. A trainer pod's environment needs WEIGHTSYNC_NAME (the WeightSync resource) and, from "
                "the downward API, POD_NAME (metadata.name), POD_NAMESPACE (metadata.namespace) and POD_IP (status.podIP); see "
                "examples/kubernetes/trainer.yaml. Outside Kubernetes use WeightSender(engines=[...])"
            )
        port = environ.get("WEIGHTSYNC_PORT", str(SENDER_PORT))
        if not port.isdigit() or not 0 < int(port) < 65536:
            raise SettingsError(f"WEIGHTSYNC_PORT is {port!r}, expected a port number")
        file = environ.get("WEIGHTSYNC_ASSIGNMENT_FILE")
        return PodEnvironment(
            environ["WEIGHTSYNC_NAME"],
            environ["POD_NAME"],
            environ["POD_NAMESPACE"],
            Path(file) if file else None,
            int(port),
            environ.get("POD_IP") or None,
            environ.get("WEIGHTSYNC_ENGINE_API_KEY") or None,
        )


class Membership:
    """The assignment in force."""

    def __init__(self, place: PodEnvironment, changed: Callable[[Assignment], None] = lambda assignment: None) -> None:
        """Args: changed: called from the watching thread with every new assignment; must not block."""
        self._place, self._notify = place, changed
        self._condition = threading.Condition()
        self._current: Assignment | None = None
        self._retired: frozenset[str] = frozenset()
        self._closed = threading.Event()
        self._trouble = "nothing was read yet"

    def start(self) -> None:
        """Begin to watch."""
        threading.Thread(target=self._keep_watching, name="weightsync-membership", daemon=True).start()

    def close(self) -> None:
        """Stop watching; the thread ends at its next news."""
        self._closed.set()

    @property
    def current(self) -> Assignment | None:
        """The assignment in force; None before the first."""
        with self._condition:
            return self._current

    def wait(self, seconds: float) -> Assignment:
        """The assignment in force, waiting for the first.

        Raises:
            DeadlineExceeded: none came in time; says why as far as known.
        """
        with self._condition:
            if not self._condition.wait_for(lambda: self._current is not None, seconds):
                name = assignment_name(self._place.weight_sync, self._place.pod)
                raise DeadlineExceeded(
                    f"no assignment in {seconds:g} s: ConfigMap {self._place.namespace}/{name} ({self._trouble}). Is the operator running, "
                    f"does WeightSync {self._place.weight_sync} select this pod, and may its service account watch that ConfigMap?"
                )
            assert self._current is not None
            return self._current

    def wait_until(self, holds: Callable[[Assignment], bool], seconds: float) -> bool:
        """Wait until the assignment in force satisfies a condition; whether it did."""
        with self._condition:
            return self._condition.wait_for(lambda: self._current is not None and holds(self._current), seconds)

    def offer(self, text: str, origin: str) -> None:
        """A text that may replace the assignment; one that may not is logged and dropped."""
        with self._condition:
            try:
                new = accept(self._current, text, retired=self._retired)
                here = (self._place.namespace, self._place.weight_sync, self._place.pod)
                if (new.weight_sync.namespace, new.weight_sync.name, new.trainer) != here:
                    raise DocumentError(
                        f"assignment is for {new.weight_sync.namespace}/{new.weight_sync.name} {new.trainer}, this is {here}"
                    )
            except DocumentError as error:
                self._trouble = str(error)
                log.warning("assignment refused origin=%s error=%r", origin, str(error))
                return
            if new == self._current:
                return
            if self._current is not None and self._current.weight_sync.uid != new.weight_sync.uid:
                self._retired |= {self._current.weight_sync.uid}
            self._current = new
            self._condition.notify_all()
        log.info("assignment taken origin=%s epoch=%d engines=%d", origin, new.epoch, len(new.engines))
        self._notify(new)

    # -- the watching thread

    def _keep_watching(self) -> None:
        pause, version = _FIRST_PAUSE_SECONDS, ""
        while not self._closed.is_set():
            try:
                core = self._connect()
                while not self._closed.is_set():
                    version = self._watch(core, version)
                    pause = _FIRST_PAUSE_SECONDS
            except WeightSyncError as error:
                self._trouble = str(error)
                log.warning("assignment not watched, again in %.1f s: %s", pause, error)
                version = ""
            self._read_file(pause * random.uniform(0.8, 1.2))
            pause = min(pause * 2, _LONGEST_PAUSE_SECONDS)

    def _connect(self) -> Any:
        from kubernetes import client, config

        settings = client.Configuration()
        try:
            config.load_incluster_config(client_configuration=settings)
        except config.ConfigException:
            try:
                config.load_kube_config(os.environ.get("KUBECONFIG"), client_configuration=settings)
            except config.ConfigException as error:
                raise MembershipError(f"no service account and no kubeconfig: {error}") from error
        settings.retries = False
        return client.CoreV1Api(client.ApiClient(settings))

    def _watch(self, core: Any, version: str) -> str:
        """Watch until the server ends it; returns where to go on.

        Raises:
            MembershipError: the API server cannot be reached or refuses.
        """
        from kubernetes import client, watch
        from urllib3.exceptions import HTTPError

        name = assignment_name(self._place.weight_sync, self._place.pod)
        where: dict[str, Any] = {"namespace": self._place.namespace, "field_selector": f"metadata.name={name}"}
        try:
            if not version:
                listed = core.list_namespaced_config_map(**where, _request_timeout=(_CONNECT_SECONDS, _CONNECT_SECONDS))
                for item in listed.items:
                    self.offer((item.data or {}).get(ASSIGNMENT_KEY, ""), "api")
                if not listed.items:
                    self._trouble = "it does not exist"
                version = listed.metadata.resource_version
            events = watch.Watch().stream(
                core.list_namespaced_config_map, **where, resource_version=version, allow_watch_bookmarks=True,
                timeout_seconds=_WATCH_SECONDS, _request_timeout=(_CONNECT_SECONDS, _WATCH_SECONDS + 10),
            )  # fmt: skip
            for event in events:
                if self._closed.is_set():
                    return version
                body = event["raw_object"]
                version = body["metadata"]["resourceVersion"]
                if event["type"] in ("ADDED", "MODIFIED"):
                    self.offer((body.get("data") or {}).get(ASSIGNMENT_KEY, ""), "api")
            return version
        except client.ApiException as error:
            raise MembershipError(
                f"the API server answered {error.status} {error.reason} for ConfigMap {self._place.namespace}/{name}"
            ) from error
        except (HTTPError, OSError) as error:
            raise MembershipError(f"the API server cannot be reached: {type(error).__name__}: {error}") from error

    def _read_file(self, seconds: float) -> None:
        """While the API cannot be watched: look at the mounted file."""
        until = time.monotonic() + seconds
        while not self._closed.is_set():
            if self._place.file is not None:
                try:
                    text = self._place.file.read_text(encoding="utf-8")
                except OSError as error:
                    log.debug("assignment file not read: %s", error)
                else:
                    if self._current is None or text != self._current.dump():
                        self.offer(text, "file")
            left = until - time.monotonic()
            if left <= 0:
                return
            self._closed.wait(min(left, _FILE_SECONDS))


class MembershipError(WeightSyncError):
    """The assignment cannot be watched now; the last one stays in force."""
