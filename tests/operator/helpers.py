"""What tests of the operator share: its process and WeightSyncs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from weightsync_core.labels import GROUP, PLURAL, VERSION
from weightsync_devkit.engines import free_port
from weightsync_devkit.pods import PodSpace


class Operator:
    """The operator as a process."""

    def __init__(self, kubeconfig: str, folder: Path, *arguments: str) -> None:
        self.port = free_port()
        self.log = folder / f"operator-{self.port}.log"
        self._command = [sys.executable, "-m", "weightsync_operator", f"--port={self.port}", *arguments]
        self._environment = {**os.environ, "KUBECONFIG": kubeconfig, "PYTHONUNBUFFERED": "1"}

    def start(self) -> None:
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(self._command, env=self._environment, stdout=out, stderr=out)

    def stop(self, seconds: float = 10.0) -> float:
        """SIGTERM; returns how long it took to end."""
        began = time.monotonic()
        self.process.terminate()
        try:
            self.process.wait(seconds)
        finally:
            self.process.kill()
            self.process.wait(10)
        return time.monotonic() - began

    def get(self, path: str) -> tuple[int, str]:
        answer = httpx.get(f"http://127.0.0.1:{self.port}{path}", timeout=5)
        return answer.status_code, answer.text


def weight_sync(space: PodSpace, name: str = "demo", **spec: Any) -> dict[str, Any]:
    """Create a WeightSync over the namespace's engines and trainers."""
    body = {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "WeightSync",
        "metadata": {"name": name},
        "spec": {
            "trainer": {"selector": {"matchLabels": {"app": "trainer"}}},
            "engineGroups": [{"name": "rollout", "selector": {"matchLabels": {"app": "engine"}}}],
            **spec,
        },
    }
    created: dict[str, Any] = space.custom.create_namespaced_custom_object(GROUP, VERSION, space.namespace, PLURAL, body)
    return created


def read(space: PodSpace, name: str = "demo") -> dict[str, Any]:
    found: dict[str, Any] = space.custom.get_namespaced_custom_object(GROUP, VERSION, space.namespace, PLURAL, name)
    return found


def condition(body: dict[str, Any], kind: str) -> dict[str, Any]:
    return next((each for each in body.get("status", {}).get("conditions", ()) if each["type"] == kind), {"status": "", "reason": ""})
