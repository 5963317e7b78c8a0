"""The operator against a real API server: pods come, go and break; what trainers hold follows."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from helpers import Operator, condition, read, weight_sync

from weightsync_core.assignment import Assignment, WeightSyncRef
from weightsync_core.labels import ASSIGNMENT_KEY, GROUP, PLURAL, VERSION, assignment_name
from weightsync_devkit.pods import FakeTrainer, PodSpace
from weightsync_devkit.relay import Relay
from weightsync_devkit.waiting import eventually

OUT_SECONDS = 5.0


def held(*trainers: FakeTrainer) -> set[str]:
    """Engines that the trainers' assignments name; each by one of them."""
    names = [engine.id for trainer in trainers for engine in (trainer.membership.current or EMPTY).engines]
    assert len(names) == len(set(names)), f"an engine has two writers: {names}"
    return set(names)


EMPTY = Assignment(weight_sync=None, epoch=-1, trainer="", engines=(), targets={})  # type: ignore[arg-type]


def test_engines_are_shared_out_and_follow_what_pods_do(space: PodSpace, operator: Operator) -> None:
    trainers = [space.trainer(f"trainer-{index}", "demo") for index in range(2)]
    for index in range(3):
        space.engine(f"engine-{index}")
    weight_sync(space)
    eventually(lambda: held(*trainers) == {"engine-0", "engine-1", "engine-2"})
    assert sorted(len(trainer.membership.current.engines) for trainer in trainers if trainer.membership.current) == [1, 2]
    body = eventually(lambda: condition(read(space), "Ready")["status"] == "True" and read(space))
    assert body["status"]["engines"] == {"summary": "3/3", "found": 3, "assigned": 3, "synced": 3, "excluded": 0}
    assert body["status"]["trainers"]["summary"] == "2/2"
    assert {trainer.recorder.status.epoch for trainer in trainers} == {body["status"]["epoch"]}
    assert {each["reason"] for each in body["status"]["conditions"]} == {"Ready", "Discovered", "Compatible", "Published", "Connected"}

    epoch = body["status"]["epoch"]
    space.engine("engine-3")
    eventually(lambda: held(*trainers) == {f"engine-{index}" for index in range(4)}, 5)
    space.delete_pod("trainer-1")
    eventually(lambda: held(trainers[0]) == {f"engine-{index}" for index in range(4)}, 10)
    assert read(space)["status"]["epoch"] > epoch
    maps = space.core.list_namespaced_config_map(space.namespace, label_selector="weightsync.dev/name=demo").items
    assert [each.metadata.name for each in maps] == [assignment_name("demo", "trainer-0")]
    assert maps[0].metadata.owner_references[0].uid == body["metadata"]["uid"]


WAYS = {
    "deleted": lambda space, engine, name: space.delete_pod(name),
    "failed": lambda space, engine, name: space.status(name, phase="Failed"),
    "lost its address": lambda space, engine, name: space.status(name, podIP=None, podIPs=None),
    "lost its label": lambda space, engine, name: space.core.patch_namespaced_pod(
        name, space.namespace, {"metadata": {"labels": {"app": None}}}
    ),
    "process ended": lambda space, engine, name: space.engines.refuse(engine.ip),
    "restarted in place": lambda space, engine, name: space.engines.refuse(engine.ip),
}


@pytest.mark.parametrize("way", WAYS)
def test_an_engine_that_is_gone_in_whatever_way_leaves_the_next_assignment(way: str, space: PodSpace, operator: Operator) -> None:
    trainer = space.trainer("trainer-0", "demo")
    going = space.engine("going")
    space.engine("staying")
    weight_sync(space)
    eventually(lambda: held(trainer) == {"going", "staying"})
    WAYS[way](space, going, "going")
    began = time.monotonic()
    eventually(lambda: held(trainer) == {"staying"}, OUT_SECONDS)
    print(f"way={way!r} seconds={time.monotonic() - began:.2f}")
    if way == "restarted in place":
        assert trainer.membership.current is not None
        before = trainer.membership.current.epoch
        going.generation = "g1"
        space.engines.listen(going)
        eventually(lambda: held(trainer) == {"going", "staying"}, OUT_SECONDS)
        assert trainer.membership.current.epoch > before
        assert next(engine for engine in trainer.membership.current.engines if engine.id == "going").generation == "g1"


@pytest.mark.parametrize(
    ("says", "reason", "words"),
    [
        ({"sglang": "0.4.0"}, "SglangMismatch", ("0.4.0", "0.5.23")),
        ({"arch": "sm_80"}, "ArchitectureMismatch", ("sm_80", "sm_90")),
        ({"transports": ("nixl",)}, "TransportMismatch", ("nixl", "mooncake")),
        ({"plugin": False, "seeding": False}, "NoWeightTable", ("install p2p-weightsync",)),
        ({"api_key": "secret"}, "Unauthorized", ("401", "engineApiKey")),
    ],
)
def test_an_engine_that_does_not_fit_is_left_out_with_both_values_and_comes_back_when_mended(
    says: dict[str, Any], reason: str, words: tuple[str, ...], space: PodSpace, operator: Operator
) -> None:
    trainer = space.trainer("trainer-0", "demo")
    odd = space.engine("odd", **says)
    space.engine("good")
    weight_sync(space)
    body = eventually(lambda: any(e["reason"] == reason for e in read(space).get("status", {}).get("excludedEngines", ())) and read(space))
    assert all(word in body["status"]["excludedEngines"][0]["message"] for word in words)
    eventually(lambda: held(trainer) == {"good"})
    ready = eventually(lambda: condition(read(space), "Ready")["status"] == "True" and condition(read(space), "Ready"))
    assert ready["reason"] == "EnginesExcluded"
    events = eventually(lambda: [e for e in space.core.list_namespaced_event(space.namespace).items if e.reason == f"Engine{reason}"])
    assert len(events) == 1
    for name in says:
        setattr(odd, name, getattr(type(odd)(odd.ip), name))
    eventually(lambda: held(trainer) == {"good", "odd"}, 10)
    eventually(lambda: condition(read(space), "EnginesCompatible")["status"] == "True")


def test_a_stock_engine_is_found_without_the_plugin(space: PodSpace, operator: Operator) -> None:
    trainer = space.trainer("trainer-0", "demo")
    space.engine("stock", plugin=False, size=2)
    weight_sync(space)
    eventually(lambda: held(trainer) == {"stock"})
    assert trainer.membership.current is not None
    assert trainer.membership.current.engines[0].size == 2


def test_a_server_that_is_not_there_is_named_as_such(space: PodSpace, operator: Operator) -> None:
    space.trainer("trainer-0", "demo")
    space.pod("local-only", "127.99.0.1", {"app": "engine"})
    weight_sync(space)
    excluded = eventually(lambda: [e for e in read(space).get("status", {}).get("excludedEngines", ()) if "127.0.0.1" in e["message"]])
    assert excluded[0]["reason"] == "ConnectionRefused"
    assert "--host 0.0.0.0" in excluded[0]["message"]


def test_engines_of_several_pods_count_their_ranks(space: PodSpace, operator: Operator) -> None:
    trainer = space.trainer("trainer-0", "demo")
    group, index = "leaderworkerset.sigs.k8s.io/group-key", "leaderworkerset.sigs.k8s.io/worker-index"
    space.engine("lws-0", labels={group: "a", index: "0"}, size=16, nodes=2)
    spec = [{"name": "lws", "selector": {"matchLabels": {"app": "engine"}}, "podGroup": {}}]
    weight_sync(space, engineGroups=spec)
    excluded = eventually(lambda: [e for e in read(space).get("status", {}).get("excludedEngines", ()) if e["reason"] == "IncompleteRanks"])
    assert excluded[0]["message"] == "8 of 16 ranks have published, missing 8..15"
    assert held(trainer) == set()
    space.engine("lws-0-1", labels={group: "a", index: "1"})
    eventually(lambda: held(trainer) == {"lws-0"})
    assert trainer.membership.current is not None
    assert len(trainer.membership.current.targets[0]) == 16


def test_mismatch_can_block_the_hand_off(space: PodSpace, operator: Operator) -> None:
    trainer = space.trainer("trainer-0", "demo")
    space.engine("good")
    weight_sync(space, compatibility={"onMismatch": "Block"})
    eventually(lambda: held(trainer) == {"good"})
    odd = space.engine("odd", sglang="0.4.0")
    eventually(lambda: condition(read(space), "AssignmentsPublished")["reason"] == "Blocked")
    assert held(trainer) == {"good"}
    assert condition(read(space), "Ready")["status"] == "False"
    odd.sglang = "0.5.23"
    eventually(lambda: held(trainer) == {"good", "odd"}, 10)


NONSENSE = {
    "html": "<html></html>",
    "nothing": "null",
    "no-ranks": '{"model_path": "/m", "weight_version": "v", "ranks": [], "size": 0, "nodes": 0}',
    "no-nodes": '{"weight_version": "v", "ranks": [{"identity": {"sglang": "0.5.23", "arch": "cpu"}, "generation": "g", '
    '"bytes": {"target": 1}, "transports": [], "unavailable": {}}], "size": 8, "nodes": 0}',
    "other-types": '{"weight_version": {}, "ranks": "many", "size": -3}',
    "long": json.dumps({"weight_version": "v" * 10000}),
    "deep": "[" * 100_000 + "]" * 100_000,
    "endless": json.dumps({"weight_version": "v", "more": "x" * (8 << 20)}),
}


def test_pods_that_answer_nonsense_are_named_and_end_nothing(space: PodSpace, operator: Operator) -> None:
    trainer = space.trainer("trainer-0", "demo")
    space.engine("good")
    for name, text in NONSENSE.items():
        space.engine(name, nonsense=text)
    weight_sync(space)

    def excluded() -> dict[str, str]:
        return {each["engine"]: each["reason"] for each in read(space).get("status", {}).get("excludedEngines", ())}

    eventually(lambda: excluded() == dict.fromkeys(NONSENSE, "NotAnEngine"))
    assert held(trainer) == {"good"}
    time.sleep(3)
    assert operator.process.poll() is None
    assert len(json.dumps(read(space)["status"])) < 16384


def test_somebody_elses_configmap_is_left_alone(space: PodSpace, operator: Operator) -> None:
    trainer = space.trainer("trainer-0", "demo")
    space.engine("engine-0")
    name = assignment_name("demo", "trainer-0")
    space.core.create_namespaced_config_map(space.namespace, {"metadata": {"name": name}, "data": {"mine": "x"}})
    weight_sync(space)
    eventually(lambda: condition(read(space), "AssignmentsPublished")["reason"] == "WriteFailed")
    assert "is not the operator's" in condition(read(space), "AssignmentsPublished")["message"]
    found = space.core.read_namespaced_config_map(name, space.namespace)
    assert (found.data, found.metadata.owner_references) == ({"mine": "x"}, None)
    space.core.delete_namespaced_config_map(name, space.namespace)
    eventually(lambda: held(trainer) == {"engine-0"}, 40)


def test_one_hung_engine_delays_no_other(space: PodSpace, operator: Operator) -> None:
    trainer = space.trainer("trainer-0", "demo")
    for index in range(12):
        space.engine(f"hung-{index}", hangs=True)
    weight_sync(space)
    time.sleep(1)
    space.engine("good")
    began = time.monotonic()
    eventually(lambda: held(trainer) == {"good"}, 3)
    print(f"seconds={time.monotonic() - began:.2f}")


def test_a_busy_engine_is_kept(space: PodSpace, operator: Operator) -> None:
    trainer = space.trainer("trainer-0", "demo")
    busy = space.engine("busy")
    weight_sync(space)
    eventually(lambda: held(trainer) == {"busy"})
    busy.hangs = True
    time.sleep(8)
    assert held(trainer) == {"busy"}
    busy.hangs = False


def test_the_readiness_gate_waits_for_the_current_version(space: PodSpace, operator: Operator) -> None:
    trainer = space.trainer("trainer-0", "demo")
    first = space.engine("first", gated=True)
    weight_sync(space)
    eventually(lambda: space.gate("first") == "True")
    trainer.recorder.status.updating = "v1"
    first.version = "v1"
    trainer.brought("v1", time.time())
    trainer.recorder.status.updating = ""
    eventually(lambda: read(space)["status"].get("version") == "v1")
    new = space.engine("new", gated=True)
    eventually(lambda: held(trainer) == {"first", "new"})
    eventually(lambda: space.gate("new") == "False")
    time.sleep(3)
    assert (space.gate("first"), space.gate("new")) == ("True", "False")
    assert read(space)["status"]["engines"]["synced"] == 1
    new.version = "v1"
    eventually(lambda: space.gate("new") == "True", 10)


def test_two_weightsyncs_do_not_share_an_engine(space: PodSpace, operator: Operator) -> None:
    space.trainer("trainer-0", "older")
    space.engine("engine-0")
    weight_sync(space, "older")
    eventually(lambda: condition(read(space, "older"), "Ready")["status"] == "True")
    time.sleep(1.1)  # creation times have whole seconds
    weight_sync(space, "younger")
    excluded = eventually(lambda: read(space, "younger").get("status", {}).get("excludedEngines"))
    assert excluded[0]["reason"] == "Conflict"
    assert "/older" in excluded[0]["message"]
    assert read(space, "older")["status"]["engines"]["summary"] == "1/1"
    space.custom.delete_namespaced_custom_object(GROUP, VERSION, space.namespace, PLURAL, "older")
    eventually(lambda: read(space, "younger")["status"]["engines"]["summary"] == "1/1")


def test_suspended_means_that_assignments_stay(space: PodSpace, operator: Operator) -> None:
    trainer = space.trainer("trainer-0", "demo")
    space.engine("engine-0")
    weight_sync(space)
    eventually(lambda: held(trainer) == {"engine-0"})
    space.custom.patch_namespaced_custom_object(
        GROUP, VERSION, space.namespace, PLURAL, "demo", {"spec": {"suspend": True}}, _content_type="application/merge-patch+json"
    )
    eventually(lambda: condition(read(space), "Ready")["reason"] == "Suspended")
    space.engine("engine-1")
    time.sleep(1)
    assert held(trainer) == {"engine-0"}


def test_a_restarted_operator_goes_on_where_the_cluster_stands(space: PodSpace, operator: Operator) -> None:
    trainers = [space.trainer(f"trainer-{index}", "demo") for index in range(2)]
    for index in range(4):
        space.engine(f"engine-{index}")
    weight_sync(space)
    eventually(lambda: condition(read(space), "Ready")["status"] == "True" and len(held(*trainers)) == 4)
    before = [trainer.membership.current for trainer in trainers]
    assert operator.stop() < 5
    operator.start()
    eventually(lambda: operator_ready(operator))
    time.sleep(3)
    assert [trainer.membership.current for trainer in trainers] == before
    space.delete_pod("engine-3")
    eventually(lambda: len(held(*trainers)) == 3, OUT_SECONDS)
    assert all(trainer.membership.current.epoch > before[0].epoch for trainer in trainers if trainer.membership.current and before[0])


def operator_ready(operator: Operator) -> bool:
    import httpx

    try:
        return operator.get("/readyz")[0] == 200
    except httpx.HTTPError:
        return False


def test_a_weightsync_made_anew_is_taken_by_running_trainers(space: PodSpace, operator: Operator) -> None:
    trainer = space.trainer("trainer-0", "demo")
    space.engine("engine-0")
    first = weight_sync(space)
    eventually(lambda: held(trainer) == {"engine-0"})
    space.custom.delete_namespaced_custom_object(GROUP, VERSION, space.namespace, PLURAL, "demo")
    weight_sync(space)
    eventually(lambda: trainer.membership.current and trainer.membership.current.weight_sync.uid != first["metadata"]["uid"])
    eventually(lambda: held(trainer) == {"engine-0"})


def test_an_assignment_that_somebody_spoils_is_written_anew(space: PodSpace, operator: Operator) -> None:
    trainer = space.trainer("trainer-0", "demo")
    space.engine("engine-0")
    weight_sync(space)
    eventually(lambda: held(trainer) == {"engine-0"})
    name = assignment_name("demo", "trainer-0")
    space.core.patch_namespaced_config_map(
        name, space.namespace, {"data": {"assignment.json": "{}"}}, _content_type="application/merge-patch+json"
    )
    whole = eventually(lambda: len(space.core.read_namespaced_config_map(name, space.namespace).data["assignment.json"]) > 2)
    assert whole
    space.core.delete_namespaced_config_map(name, space.namespace)
    eventually(lambda: space.core.list_namespaced_config_map(space.namespace, label_selector="weightsync.dev/name=demo").items)
    assert held(trainer) == {"engine-0"}


def test_nothing_is_left_on_foreign_objects(space: PodSpace, operator: Operator) -> None:
    space.trainer("trainer-0", "demo")
    space.engine("engine-0", gated=True)
    weight_sync(space)
    eventually(lambda: condition(read(space), "Ready")["status"] == "True")
    for pod in space.core.list_namespaced_pod(space.namespace).items:
        assert not pod.metadata.annotations
        assert not pod.metadata.finalizers
    assert "finalizers" not in read(space)["metadata"]
    assert "annotations" not in read(space)["metadata"]


def test_two_replicas_take_turns(space: PodSpace, kubeconfig: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = space.trainer("trainer-0", "demo")
    space.engine("engine-0")
    weight_sync(space)
    replicas = []
    for name in ("a", "b"):
        monkeypatch.setenv("POD_NAME", name)
        monkeypatch.setenv("POD_NAMESPACE", space.namespace)
        replicas.append(Operator(kubeconfig, tmp_path, f"--namespace={space.namespace}", "--lease=op"))
        replicas[-1].start()
        eventually(lambda: operator_ready(replicas[-1]))
    try:
        eventually(lambda: held(trainer) == {"engine-0"})
        leading = [replica for replica in replicas if "p2p_weightsync_operator_leader 1.0" in replica.get("/metrics")[1]]
        assert len(leading) == 1
        leading[0].process.kill()
        space.engine("engine-1")
        eventually(lambda: held(trainer) == {"engine-0", "engine-1"}, 40)
    finally:
        for replica in replicas:
            replica.process.kill()
            print(replica.log.read_text()[-3000:])


def test_hand_off_is_fast(space: PodSpace, operator: Operator) -> None:
    """From a pod that runs and answers to the sender that holds it."""
    trainer = space.trainer("trainer-0", "demo")
    weight_sync(space)
    eventually(lambda: trainer.membership.current)
    took = []
    for index in range(30):
        began = time.monotonic()
        space.engine(f"engine-{index}")
        eventually(lambda name=f"engine-{index}": name in held(trainer), 5)
        took.append(time.monotonic() - began)
    took.sort()
    print(json.dumps({"p50": round(took[15], 3), "p99": round(took[-1], 3)}))


def test_a_written_assignment_reaches_its_sender_fast(space: PodSpace) -> None:
    trainer = space.trainer("trainer-0", "demo")
    took = []
    for epoch in range(1, 31):
        document = Assignment(WeightSyncRef(space.namespace, "demo", "uid"), epoch, "trainer-0", engines=(), targets={})
        body = {"metadata": {"name": assignment_name("demo", "trainer-0")}, "data": {ASSIGNMENT_KEY: document.dump()}}
        began = time.monotonic()
        if epoch == 1:
            space.core.create_namespaced_config_map(space.namespace, body)
        else:
            space.core.replace_namespaced_config_map(body["metadata"]["name"], space.namespace, body)
        eventually(lambda epoch=epoch: trainer.membership.current and trainer.membership.current.epoch == epoch, 5, pause=0.002)
        took.append(time.monotonic() - began)
    took.sort()
    print(json.dumps({"p50": round(took[15], 3), "p99": round(took[-1], 3)}))


def test_an_engine_that_does_not_say_its_architecture_has_that_of_its_node(
    space: PodSpace, kubectl: Callable[..., str], kubeconfig: str, tmp_path: Path
) -> None:
    """Stock engines, where the operator may read nodes; ``sm_90`` are the trainers."""
    node = f"gpu-{space.namespace}"
    labels = {"nvidia.com/gpu.compute.major": "8", "nvidia.com/gpu.compute.minor": "0"}
    kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "Node", "metadata": {"name": node, "labels": labels}}))
    operator = Operator(kubeconfig, tmp_path, "--all-namespaces", "--read-nodes")
    try:
        trainer = space.trainer("trainer-0", "demo")
        space.engine("odd", plugin=False, node=node)
        space.engine("good", plugin=False)
        weight_sync(space)
        operator.start()
        excluded = eventually(
            lambda: [e for e in read(space).get("status", {}).get("excludedEngines", ()) if e["reason"] == "ArchitectureMismatch"]
        )
        assert all(value in excluded[0]["message"] for value in ("sm_80", "sm_90"))
        eventually(lambda: held(trainer) == {"good"})
        kubectl("label", "node", node, "nvidia.com/gpu.compute.major=9", "--overwrite")
        eventually(lambda: held(trainer) == {"good", "odd"}, 10)
    finally:
        operator.stop()
        print(operator.log.read_text()[-3000:])
        kubectl("delete", "node", node, "--wait=false")


def test_a_watch_that_falls_silent_is_repaired_by_lists_and_ends_the_process(space: PodSpace, kubeconfig: str, tmp_path: Path) -> None:
    settings = yaml.safe_load(Path(kubeconfig).read_text())
    server = urlsplit(settings["clusters"][0]["cluster"]["server"])
    with Relay(server.hostname or "", server.port or 443) as relay:
        settings["clusters"][0]["cluster"].update(server=f"https://127.0.0.1:{relay.port}", **{"tls-server-name": server.hostname})
        (tmp_path / "kubeconfig").write_text(yaml.safe_dump(settings))
        operator = Operator(str(tmp_path / "kubeconfig"), tmp_path, f"--namespace={space.namespace}", "--resync=2")
        operator.start()
        try:
            trainer = space.trainer("trainer-0", "demo")
            space.engine("engine-0")
            weight_sync(space)
            eventually(lambda: held(trainer) == {"engine-0"})
            relay.silence()
            for index in range(1, 40):
                space.engine(f"engine-{index}")
                if operator.process.poll() is not None:
                    break
                time.sleep(2)
            assert operator.process.poll() == 1
            assert {"engine-0", "engine-1"} <= held(trainer), "lists have brought what the watch did not"
            assert "brings no changes although lists find some" in operator.log.read_text()
        finally:
            operator.stop()
            print(operator.log.read_text()[-3000:])


def test_the_installed_crd_is_compared(kubectl: Callable[..., str], space: PodSpace, kubeconfig: str, tmp_path: Path) -> None:
    from weightsync_operator import crd

    openapi = json.loads(kubectl("get", "--raw", crd.OPENAPI_PATH))
    crd.check(openapi)
    schema = next(each for name, each in openapi["components"]["schemas"].items() if name.endswith(".WeightSync"))
    del schema["properties"]["spec"]["properties"]["suspend"]
    with pytest.raises(crd.CrdError, match=r"lacks spec\.suspend"):
        crd.check(openapi)
    with pytest.raises(crd.CrdError, match="knows no WeightSync"):
        crd.check(None)
