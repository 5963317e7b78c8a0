"""The whole product on a real cluster: helm install, kubectl apply, stock engines, trainer pods; then pods come and go.

The tests of this module follow one another on one installation.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from weightsync_devkit import host_pods, zoo
from weightsync_devkit.cluster import Cluster
from weightsync_devkit.engines import Engines
from weightsync_devkit.waiting import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.engines, pytest.mark.timeout(1500)]

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "kubernetes"
MODEL = "qwen3"
NAMESPACE = "rl"


class Installation:
    """The product in one namespace of the cluster."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.start = zoo.write(MODEL, folder / "start" / MODEL, 1)
        self.checkpoints = folder / "checkpoints"
        for seed, name in ((2, "a"), (3, "b")):
            zoo.write(MODEL, self.checkpoints / name, seed)

    def kubectl(self, *arguments: str, **options: Any) -> str:
        return self.cluster.kubectl("-n", NAMESPACE, *arguments, **options)

    def helm(self, *arguments: str) -> str:
        command = [str(self.cluster.places.bin / "helm"), "--kubeconfig", str(self.cluster.places.kubeconfig), "-n", NAMESPACE, *arguments]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def values(self) -> Path:
        path = self.folder / "values.yaml"
        accounts = [{"weightSync": "qwen3", "statefulSet": "trainer", "replicas": 2}]
        path.write_text(yaml.safe_dump({**host_pods.operator_values(), "senders": {"accounts": accounts}}))
        return path

    def apply(self, manifest: dict[str, Any]) -> None:
        self.kubectl("apply", "-f", "-", stdin=json.dumps(manifest))

    def engines(self, replicas: int) -> dict[str, Any]:
        manifest = yaml.safe_load((EXAMPLES / "engines.yaml").read_text())
        manifest["spec"]["replicas"] = replicas
        return host_pods.runnable(manifest, host_pods.engine_command(self.start, 30000), self.folder)

    def trainer(self) -> dict[str, Any]:
        manifest = yaml.safe_load((EXAMPLES / "trainer.yaml").read_text())
        command = [str(EXAMPLES / "trainer_loop.py"), str(self.checkpoints), "--every", "3"]
        return host_pods.runnable(manifest, command, self.folder)

    def status(self) -> dict[str, Any]:
        text = self.kubectl("get", "weightsync", "qwen3", "-o", "json", check=False)
        status: dict[str, Any] = json.loads(text).get("status", {}) if text else {}
        return status

    def ready(self) -> dict[str, Any]:
        return next((c for c in self.status().get("conditions", ()) if c["type"] == "Ready"), {})

    def pods(self, app: str) -> list[dict[str, Any]]:
        """Pods that are not being deleted."""
        items = json.loads(self.kubectl("get", "pods", "-l", f"app={app}", "-o", "json"))["items"]
        return [pod for pod in items if "deletionTimestamp" not in pod["metadata"]]

    def ask(self, ip: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """HTTP to a pod, from inside the cluster."""
        post = ["-X", "POST", "-H", "content-type: application/json", "-d", json.dumps(body)] if body is not None else []
        done = self.cluster.run("curl", "-s", "-m", "20", *post, f"http://{ip}:30000{path}", check=False)
        try:
            return json.loads(done.stdout)
        except ValueError:
            return {}

    def version(self, ip: str) -> str:
        return str(self.ask(ip, "/model_info").get("weight_version", ""))

    def log(self, *arguments: str) -> str:
        return self.kubectl("logs", "--tail=60", *arguments, check=False)


@pytest.fixture(scope="module")
def installation(node_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    folder = tmp_path_factory.mktemp("e2e")
    for parent in (folder, *folder.parents[:3]):
        parent.chmod(0o755)  # pods read it as another user
    installed = Installation(node_cluster, folder)
    node_cluster.kubectl("create", "namespace", NAMESPACE)
    yield installed
    node_cluster.kubectl("delete", "namespace", NAMESPACE, "--wait=false", check=False)


@pytest.fixture(scope="module")
def expected(installation: Installation, engines: Engines) -> dict[str, list[dict[str, str]]]:
    """What an engine holds that was started from each checkpoint."""
    held = {}
    for name in ("a", "b"):
        with engines.running((installation.checkpoints / name,)) as (fresh,):
            held[name] = fresh.checksums()
    return held


def synced(installation: Installation, expected: dict[str, Any], number: int) -> None:
    """``number`` engines are ready, get newer and newer versions, and hold those versions' bytes."""

    def why() -> str:
        return f"{installation.status()} {installation.kubectl('get', 'pods', '-o', 'wide')} {installation.log('statefulset/trainer')}"

    eventually(lambda: installation.status().get("engines", {}).get("summary") == f"{number}/{number}", 400, why)
    eventually(lambda: installation.ready().get("status") == "True", 60, why)
    addresses = [pod["status"]["podIP"] for pod in installation.pods("engine")]
    assert len(addresses) == number
    before = {ip: installation.version(ip) for ip in addresses}
    for ip in addresses:
        eventually(lambda ip=ip: installation.version(ip) not in ("", "default", before[ip]), 120, why)
        eventually(lambda ip=ip: holds(installation, expected, ip), 60, why)


def holds(installation: Installation, expected: dict[str, Any], ip: str) -> bool:
    """Whether an engine holds exactly what its version says; asked again if a new version came in between."""
    version = installation.version(ip)
    answer = installation.ask(ip, "/weights_checker", {"action": "checksum"})
    if not answer.get("ranks") or installation.version(ip) != version:
        return False
    return [rank["checksums"] for rank in answer["ranks"]] == expected[version.split("-")[0]]


def test_install_and_sync(installation: Installation, expected: dict[str, Any]) -> None:
    installation.helm("install", "p2p-weightsync", str(ROOT / "charts"), "-f", str(installation.values()), "--wait", "--timeout", "120s")
    installation.apply(installation.engines(2))
    installation.apply(installation.trainer())
    installation.kubectl("apply", "-f", str(EXAMPLES / "weightsync.yaml"))
    synced(installation, expected, 2)
    installation.helm("test", "p2p-weightsync")
    shown = installation.kubectl("get", "wsync")
    assert "2/2" in shown
    for pod in installation.pods("engine"):
        assert not set(pod["metadata"].get("annotations", {})) - {"kubectl.kubernetes.io/restartedAt"}
        assert "finalizers" not in pod["metadata"]


@pytest.mark.parametrize("replicas", [3, 1, 2])
def test_scaling_engines(replicas: int, installation: Installation, expected: dict[str, Any]) -> None:
    installation.kubectl("scale", "deployment/engine", f"--replicas={replicas}")
    synced(installation, expected, replicas)


def test_an_engine_pod_deleted(installation: Installation, expected: dict[str, Any]) -> None:
    name = installation.pods("engine")[0]["metadata"]["name"]
    installation.kubectl("delete", "pod", name, "--wait=false")
    eventually(lambda: name not in assigned(installation), 5, lambda: str(installation.status()))
    synced(installation, expected, 2)


def assigned(installation: Installation) -> dict[str, str]:
    """Engines in the assignments in force, and which process of each."""
    maps = json.loads(installation.kubectl("get", "configmap", "-l", "weightsync.dev/name=qwen3", "-o", "json"))["items"]
    return {engine["id"]: engine["uid"] for each in maps for engine in json.loads(each["data"]["assignment.json"])["engines"]}


def test_an_engine_restarted_in_place(installation: Installation, expected: dict[str, Any]) -> None:
    pod = installation.pods("engine")[0]["metadata"]["name"]
    before = assigned(installation)[pod]
    installation.kubectl("exec", pod, "--", "/bin/sh", "-c", "kill 1")

    def restarts() -> int:
        statuses = [each["status"]["containerStatuses"][0] for each in installation.pods("engine") if each["metadata"]["name"] == pod]
        return int(statuses[0]["restartCount"]) if statuses else 0

    # sglang first ends what it is at, which may be an update.
    eventually(lambda: restarts() == 1, 120, lambda: str(installation.status()), pause=0.5)
    synced(installation, expected, 2)
    assert assigned(installation)[pod] not in ("", before)
    assert restarts() == 1


def test_the_operator_restarted(installation: Installation, expected: dict[str, Any]) -> None:
    epoch = installation.status()["epoch"]
    installation.kubectl("delete", "pod", "-l", "app.kubernetes.io/name=p2p-weightsync", "--wait=false")
    synced(installation, expected, 2)
    assert installation.status()["epoch"] == epoch, "a new operator finds what is there and changes nothing"


def test_a_trainer_pod_deleted(installation: Installation, expected: dict[str, Any]) -> None:
    installation.kubectl("delete", "pod", "trainer-0", "--wait=false")
    eventually(lambda: len(installation.pods("trainer")) == 2 and installation.status()["trainers"]["summary"] == "2/2", 120)
    synced(installation, expected, 2)


def test_the_api_server_away_for_a_while(installation: Installation, expected: dict[str, Any]) -> None:
    addresses = [pod["status"]["podIP"] for pod in installation.pods("engine")]
    before = {ip: installation.version(ip) for ip in addresses}
    installation.cluster.stop("kube-apiserver")
    try:
        time.sleep(15)
        # syncs go on with the last assignment
        eventually(lambda: all(installation.version(ip) not in ("", before[ip]) for ip in addresses), 60, pause=0.5)
    finally:
        installation.cluster.start("kube-apiserver")
    eventually(lambda: installation.cluster.kubectl("get", "--raw", "/readyz", check=False) == "ok", 60)
    synced(installation, expected, 2)


def test_upgrade(installation: Installation, expected: dict[str, Any]) -> None:
    installation.helm(
        "upgrade",
        "p2p-weightsync",
        str(ROOT / "charts"),
        "-f",
        str(installation.values()),
        "--set",
        "verbose=true",
        "--wait",
        "--timeout",
        "120s",
    )
    synced(installation, expected, 2)


def test_a_weightsync_deleted_without_the_operator(installation: Installation) -> None:
    installation.kubectl("scale", "deployment/p2p-weightsync", "--replicas=0")
    installation.kubectl("delete", "weightsync", "qwen3", "--timeout=20s")
    eventually(lambda: not assigned(installation), 30)
    installation.kubectl("scale", "deployment/p2p-weightsync", "--replicas=1")


def test_the_namespace_deleted(installation: Installation) -> None:
    installation.cluster.kubectl("delete", "namespace", NAMESPACE, "--timeout=90s")
