"""Turns manifests made for images into ones that run this checkout's environment on the test cluster's node.

The node shares this machine's file system, so a pod gets the machine's /usr, its Python and the checkout by hostPath, and no
image has to be built. What a manifest says otherwise (probes, gates, environment, labels) stays as it is.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weightsync_devkit.cluster.images import HOST
from weightsync_devkit.engines import CPU_ARGUMENTS, cpu_environment

CHECKOUT = Path(__file__).parents[2]

_CPU_ONLY = {"HOME": "/tmp", "TMPDIR": "/tmp", "PYTHONUNBUFFERED": "1", "LD_LIBRARY_PATH": "", **cpu_environment()}


def volumes(*more: Path) -> list[dict[str, Any]]:
    """What this machine gives to a pod, and more folders of it."""
    shared = {
        "usr": "/usr", "python": sys.base_prefix, "checkout": str(CHECKOUT), "ld-cache": "/etc/ld.so.cache", "alternatives": "/etc/alternatives",
        **{f"folder-{index}": str(folder) for index, folder in enumerate(more)},
    }  # fmt: skip
    return [{"name": name, "hostPath": {"path": path}} for name, path in shared.items()]


def volume_mounts(*more: Path) -> list[dict[str, Any]]:
    """The same, read-only, at the same places."""
    return [{"name": volume["name"], "mountPath": volume["hostPath"]["path"], "readOnly": True} for volume in volumes(*more)]


def environment(without: Sequence[str] = ()) -> list[dict[str, str]]:
    """What the CPU needs."""
    return [{"name": name, "value": value} for name, value in _CPU_ONLY.items() if name not in without]


def runnable(manifest: dict[str, Any], command: Sequence[str], *folders: Path, memory: str = "6Gi") -> dict[str, Any]:
    """A workload whose first container runs ``command`` with this checkout's Python.

    Args:
        folders: more folders of this machine that it reads.
        memory: its limit.
    """
    made = copy.deepcopy(manifest)
    pod = made["spec"]["template"]["spec"]
    container = pod["containers"][0]
    given = [
        entry for entry in container.get("env", ()) if "fieldRef" in entry.get("valueFrom", {}) or entry["name"].startswith("WEIGHTSYNC")
    ]
    kept = [volume for volume in pod["volumes"] if "persistentVolumeClaim" not in volume]
    names = {volume["name"] for volume in kept}
    pod["dnsPolicy"] = "Default"
    pod["terminationGracePeriodSeconds"] = 5
    pod["volumes"] = [*kept, *volumes(*folders)]
    container.update(
        image=HOST,
        imagePullPolicy="Never",
        command=[sys.executable, *command],
        resources={"limits": {"memory": memory}, "requests": {"memory": "64Mi"}},
    )
    container.pop("args", None)
    container.pop("securityContext", None)
    container["env"] = [*environment([entry["name"] for entry in given]), *given]
    container["volumeMounts"] = [*(mount for mount in container["volumeMounts"] if mount["name"] in names), *volume_mounts(*folders)]
    return made


def engine_command(model: Path, port: int, *arguments: str) -> list[str]:
    """Stock sglang on the CPU, reachable from outside its pod."""
    cpu = [*CPU_ARGUMENTS]
    cpu[cpu.index("--host") + 1] = "0.0.0.0"
    return ["-m", "sglang.launch_server", "--model-path", str(model), *cpu, "--port", str(port), *arguments]


def operator_values() -> dict[str, Any]:
    """Values of the chart with which the operator runs from this checkout."""
    return {
        "image": {"repository": HOST.rsplit(":", 1)[0], "tag": HOST.rsplit(":", 1)[1], "pullPolicy": "Never"},
        "command": [sys.executable, "-P", "-m", "weightsync_operator"],
        "extraVolumes": volumes(),
        "extraVolumeMounts": volume_mounts(),
        "extraEnv": [{"name": "PYTHONUNBUFFERED", "value": "1"}, {"name": "PYTHONDONTWRITEBYTECODE", "value": "1"}],
        "dnsPolicy": "Default",
    }
