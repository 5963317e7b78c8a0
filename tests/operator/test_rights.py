"""What the chart's service accounts may do, against the API server: what the code does, and no more."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import Operator, condition, read, weight_sync

from weightsync_core.labels import assignment_name
from weightsync_devkit.cluster import Cluster
from weightsync_devkit.pods import PodSpace
from weightsync_devkit.waiting import eventually

ROOT = Path(__file__).parents[2]

OPERATOR_MAY = {
    (resource, verb)
    for resource, verbs in {
        "weightsyncs.weightsync.dev": "get list watch",
        "weightsyncs.weightsync.dev/status": "patch",
        "pods": "get list watch",
        "pods/status": "patch",
        "configmaps": "get list watch create patch delete",
        "events": "get create patch",
    }.items()
    for verb in verbs.split()
}


@pytest.fixture
def accounts(space: PodSpace, kubectl: Callable[..., str]) -> Iterator[dict[str, str]]:
    """The chart's service accounts in the test's namespace: role -> name."""
    helm = Cluster().places.bin / "helm"
    if not helm.exists():
        pytest.skip("helm is not built (make cluster)")
    values = {"senders": {"accounts": [{"weightSync": "demo", "statefulSet": "trainer", "replicas": 1}]}}
    rendered = subprocess.run(
        [str(helm), "template", "op", str(ROOT / "charts"), "-n", space.namespace, "-f", "-"],
        input=yaml.safe_dump(values), capture_output=True, text=True, check=True,
    )  # fmt: skip
    wanted = [m for m in yaml.safe_load_all(rendered.stdout) if m and m["kind"] in ("ServiceAccount", "Role", "RoleBinding")]
    kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(wanted))
    return {"operator": "op-p2p-weightsync", "sender": "demo-sender"}


def kubeconfig_of(account: str, space: PodSpace, kubectl: Callable[..., str], folder: Path) -> str:
    """A kubeconfig with nothing but a service account's token."""
    given = yaml.safe_load(Path(space.kubeconfig).read_text())
    token = kubectl("create", "token", account, "-n", space.namespace).strip()
    given["users"] = [{"name": given["users"][0]["name"], "user": {"token": token}}]
    path = folder / f"{account}.kubeconfig"
    path.write_text(yaml.safe_dump(given))
    return str(path)


def may(account: str, space: PodSpace, kubectl: Callable[..., str]) -> set[tuple[str, str]]:
    """(resource, verb) beyond what every account may."""
    review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectRulesReview", "spec": {"namespace": space.namespace}}
    user = f"--as=system:serviceaccount:{space.namespace}:{account}"
    answer = json.loads(kubectl("create", "--validate=false", "-f", "-", "-o", "json", user, stdin=json.dumps(review)))
    rights: set[tuple[str, str]] = set()
    for rule in answer["status"]["resourceRules"]:
        for group in rule["apiGroups"]:
            if group in ("authorization.k8s.io", "authentication.k8s.io"):
                continue
            for resource in rule["resources"]:
                head, _, sub = resource.partition("/")
                whole = f"{head}.{group}" if group else head
                names = ",".join(rule.get("resourceNames") or ())
                for verb in rule["verbs"]:
                    rights.add((f"{whole}{'/' + sub if sub else ''}{':' + names if names else ''}", verb))
    return rights


def test_accounts_may_no_more_than_they_need(accounts: dict[str, str], space: PodSpace, kubectl: Callable[..., str]) -> None:
    assert may(accounts["operator"], space, kubectl) == OPERATOR_MAY
    own = f"configmaps:{assignment_name('demo', 'trainer-0')}"
    assert may(accounts["sender"], space, kubectl) == {(own, verb) for verb in ("get", "list", "watch")}


def test_the_operator_works_with_just_its_rights(
    accounts: dict[str, str], space: PodSpace, kubectl: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator = Operator(kubeconfig_of(accounts["operator"], space, kubectl, tmp_path), tmp_path, f"--namespace={space.namespace}")
    # The trainers watch with the sender's rights.
    monkeypatch.setitem(os.environ, "KUBECONFIG", kubeconfig_of(accounts["sender"], space, kubectl, tmp_path))
    trainer = space.trainer("trainer-0", "demo")
    second = space.trainer("trainer-1", "demo")
    space.engine("engine-0", gated=True)
    space.engine("odd", sglang="0.1")
    weight_sync(space)
    operator.start()
    try:
        eventually(lambda: trainer.membership.current and trainer.membership.current.engines, 30)
        assert second.membership.current is None, "its ConfigMap is not among those that the Role names"
        space.delete_pod("trainer-1")
        eventually(lambda: condition(read(space), "Ready")["status"] == "True")
        eventually(lambda: space.gate("engine-0") == "True")
        eventually(
            lambda: len(space.core.list_namespaced_config_map(space.namespace, label_selector="weightsync.dev/name=demo").items) == 1
        )
        eventually(lambda: [e for e in space.core.list_namespaced_event(space.namespace).items if e.reason == "EngineSglangMismatch"])
        time.sleep(2)
    finally:
        operator.stop()
    said = operator.log.read_text()
    assert "403" not in said
    assert "orbidden" not in said


def patched(**spec: Any) -> dict[str, Any]:
    body: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "kubernetes" / "weightsync.yaml").read_text())
    body["spec"].update(spec)
    return body


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (patched(trainer={"selector": {}}), "an empty selector would take every pod"),
        (patched(engineGroups=[]), "should have at least 1 items"),
        (patched(engineGroups=[{"name": "a", "selector": {"matchLabels": {"a": "b"}}}] * 2), "Duplicate value"),
        (patched(engineGroups=[{"name": "A!", "selector": {"matchLabels": {"a": "b"}}}]), "should match"),
        (patched(engineGroups=[{"name": "a", "selector": {"matchLabels": {"a": "b"}}, "port": 0}]), "greater than or equal to 1"),
        (patched(transport={"backend": "Carrier"}), "Unsupported value"),
        (patched(update={"bufferSizeMegabytes": 0}), "greater than or equal to 1"),
        (patched(compatibility={"gpuArchitecture": "hopper"}), "should match"),
        (
            patched(trainer={"selector": {"matchExpressions": [{"key": "a", "operator": "In"}]}}),
            "In and NotIn need values",
        ),
        ({**patched(), "metadata": {"name": "a.b"}}, "may have no dots"),
        ({**patched(), "metadata": {"name": "a" * 64}}, "at most 63 characters"),
        (patched(bogus=1), "unknown field"),
    ],
)
def test_the_api_server_refuses_with_words(body: dict[str, Any], words: str, kubectl: Callable[..., str]) -> None:
    said = kubectl("apply", "--dry-run=server", "--validate=strict", "-f", "-", stdin=json.dumps(body), check=False)
    assert words in said


@pytest.mark.parametrize("name", ["weightsync.yaml", "engines.yaml", "trainer.yaml"])
def test_examples_apply(name: str, kubectl: Callable[..., str]) -> None:
    kubectl("apply", "--dry-run=server", "--validate=strict", "-f", str(ROOT / "examples" / "kubernetes" / name))


def test_the_leaderworkerset_example_applies(kubectl: Callable[..., str]) -> None:
    """Against LeaderWorkerSet's own CRD, out of its Go module."""
    if shutil.which("go") is None:
        pytest.skip("go is not installed, which fetches LeaderWorkerSet's CRD")
    done = subprocess.run(["go", "mod", "download", "-json", "sigs.k8s.io/lws@v0.7.0"], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stdout + done.stderr
    crds = Path(json.loads(done.stdout)["Dir"]) / "config" / "crd" / "bases"
    kubectl("apply", "--server-side", "-f", str(crds))
    crd = "crd/leaderworkersets.leaderworkerset.x-k8s.io"
    eventually(lambda: "condition met" in kubectl("wait", "--for=condition=Established", crd, check=False))
    kubectl("apply", "--dry-run=server", "--validate=strict", "-f", str(ROOT / "examples" / "kubernetes" / "engines-lws.yaml"))


def test_columns(space: PodSpace, kubectl: Callable[..., str]) -> None:
    weight_sync(space)
    header = kubectl("get", "wsync", "-n", space.namespace).splitlines()[0].split()
    assert header == ["NAME", "READY", "REASON", "ENGINES", "TRAINERS", "EPOCH", "AGE"]
