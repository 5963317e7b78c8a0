"""The chart as helm renders it, its alerts as promtool evaluates them, its dashboard as Grafana's rules want it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from weightsync_devkit import dashboards
from weightsync_devkit.cluster import Cluster

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts"


def helm(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    program = shutil.which("helm") or str(Cluster().places.bin / "helm")
    if not Path(program).exists():
        pytest.skip("helm is neither installed nor built (make cluster)")
    done = subprocess.run([program, *arguments], capture_output=True, text=True)
    assert not check or done.returncode == 0, done.stderr
    return done


def render(*arguments: str) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all(helm("template", "demo", str(CHART), "-n", "rl", *arguments).stdout) if each]


def kinds(manifests: list[dict[str, Any]]) -> set[str]:
    return {manifest["kind"] for manifest in manifests}


EVERYTHING = (
    "--set=replicas=2,watch.allNamespaces=true,networkPolicy.enabled=true,grafana.dashboards.enabled=true,engineApiKey.secretName=keys,"
    "metrics.serviceMonitor.enabled=true,metrics.podMonitor.enabled=true,metrics.prometheusRule.enabled=true"
)


def test_lint() -> None:
    assert "0 chart(s) failed" in helm("lint", "--strict", str(CHART)).stdout


def test_the_chart_renders_the_crd_of_the_crds_folder() -> None:
    source = (ROOT / "crds" / "weightsync.dev_weightsyncs.yaml").read_text()
    assert (CHART / "files" / "weightsync.dev_weightsyncs.yaml").read_text() == source
    (rendered,) = [each for each in render() if each["kind"] == "CustomResourceDefinition"]
    assert rendered["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
    rendered["metadata"].pop("labels")
    assert rendered == yaml.safe_load(source)
    assert "CustomResourceDefinition" not in kinds(render("--set=crds.enabled=false"))


def test_a_namespaced_install_asks_for_nothing_cluster_wide() -> None:
    assert not {"ClusterRole", "ClusterRoleBinding", "PodDisruptionBudget"} & kinds(render())
    assert {"ClusterRole", "PodDisruptionBudget", "NetworkPolicy", "ServiceMonitor", "PodMonitor", "PrometheusRule"} <= kinds(
        render(EVERYTHING)
    )


def test_roles_are_least() -> None:
    for manifest in render(EVERYTHING, "--set=senders.accounts[0].weightSync=a,senders.accounts[0].pods={t-0}"):
        if manifest["kind"] in ("Role", "ClusterRole"):
            for rule in manifest["rules"]:
                assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
                assert not {"secrets", "pods/exec"} & set(rule["resources"])


def test_pods_meet_the_restricted_standard() -> None:
    for manifest in render():
        if manifest["kind"] not in ("Deployment", "Pod"):
            continue
        pod = manifest["spec"]["template"]["spec"] if manifest["kind"] == "Deployment" else manifest["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("bogus=1", "additional properties 'bogus' not allowed"),
        ("replicas=0", "minimum"),
        ("image.pullPolicy=Sometimes", "pullPolicy"),
        ("senders.accounts[0].weightSync=a", "anyOf"),
        ("metrics.podMonitor.interval=often", "does not match pattern"),
    ],
)
def test_values_are_checked(setting: str, words: str) -> None:
    done = helm("template", "demo", str(CHART), f"--set={setting}", check=False)
    assert done.returncode != 0
    assert words in done.stderr


def test_every_value_has_words() -> None:
    lines = (CHART / "values.yaml").read_text().splitlines()
    for index, line in enumerate(lines):
        leaf = re.match(r"^( *)([A-Za-z]+):(?: +\S.*)$", line)
        if leaf and index and not lines[index - 1].strip().startswith("#"):
            # a line of a block whose own first line has words
            block = next(above for above in reversed(lines[:index]) if len(above) - len(above.lstrip()) < len(leaf[1]))
            place = lines.index(block)
            assert lines[place - 1].strip().startswith("#"), line


def series(name: str, value: str = "0", **labels: str) -> dict[str, str]:
    given = {"namespace": "rl", "weightsync": "demo", **labels}
    text = ", ".join(f'{key}="{label}"' for key, label in given.items())
    return {"series": f"{name}{{{text}}}", "values": value}


SENDER, OPERATOR = "p2p_weightsync_", "p2p_weightsync_operator_"
BAD: dict[str, tuple[list[dict[str, str]], str]] = {
    "WeightSyncEngineWritesFail": ([series(f"{SENDER}engine_write_failures_total", "0+1x60", engine="e0", reason="transport")], "20m"),
    "WeightSyncStale": ([series(f"{SENDER}last_success_timestamp_seconds", "10x100")], "40m"),
    "WeightSyncUpdatesFail": ([series(f"{SENDER}updates_total", "0+1x60", result="failed")], "20m"),
    "WeightSyncWritesSlow": (
        [
            series(f"{SENDER}engine_write_duration_seconds_bucket", v, engine="e0", le=le)
            for le, v in (("30.0", "0x60"), ("60.0", "0+1x60"), ("+Inf", "0+1x60"))
        ],
        "30m",
    ),
    "WeightSyncEngineBehind": ([series(f"{SENDER}engine_updates_behind", "3x60", engine="e0")], "20m"),
    "WeightSyncEpochSkew": (
        [series(f"{SENDER}assignment_epoch", "3x60", pod="t-0"), series(f"{SENDER}assignment_epoch", "5x60", pod="t-1")],
        "20m",
    ),
    "WeightSyncNotReady": ([series(f"{OPERATOR}weightsync_ready", "0x60")], "20m"),
    "WeightSyncEnginesExcluded": ([series(f"{OPERATOR}engines", "2x60", state="SglangMismatch")], "20m"),
    "WeightSyncOperatorDown": ([series(f"{OPERATOR}leader", "0x60")], "20m"),
    "WeightSyncWatchSilent": ([series(f"{OPERATOR}watch_silent_total", "0+1x60", resource="pods")], "20m"),
    "WeightSyncReconcileErrors": ([series(f"{OPERATOR}reconciles_total", "0+1x60", result="error")], "20m"),
}
GOOD = [
    series(f"{SENDER}engine_write_failures_total", "4x60", engine="e0", reason="transport"),
    series(f"{SENDER}last_success_timestamp_seconds", "0+60x100"),
    series(f"{SENDER}updates_total", "0+1x60", result="ok"),
    series(f"{SENDER}engine_write_duration_seconds_bucket", "0+1x60", engine="e0", le="1.0"),
    series(f"{SENDER}engine_write_duration_seconds_bucket", "0+1x60", engine="e0", le="+Inf"),
    series(f"{SENDER}engine_updates_behind", "0x60", engine="e0"),
    series(f"{SENDER}assignment_epoch", "5x60", pod="t-0"),
    series(f"{SENDER}assignment_epoch", "5x60", pod="t-1"),
    series(f"{OPERATOR}weightsync_ready", "1x60"),
    series(f"{OPERATOR}engines", "8x60", state="assigned"),
    series(f"{OPERATOR}engines", "0x60", state="SglangMismatch"),
    series(f"{OPERATOR}leader", "1x60"),
    series(f"{OPERATOR}watch_silent_total", "0x60", resource="pods"),
    series(f"{OPERATOR}reconciles_total", "0+1x60", result="ok"),
]


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rendered alerts as a rules file."""
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian package prometheus)")
    (rendered,) = [each for each in render(EVERYTHING) if each["kind"] == "PrometheusRule"]
    path = tmp_path_factory.mktemp("rules") / "alerts.yaml"
    path.write_text(yaml.safe_dump(rendered["spec"]))
    return path


def promtool(rules: Path, name: str, given: list[dict[str, str]], at: str) -> str:
    """What promtool says about an expectation of no alert: it lists those that fire."""
    test = {
        "rule_files": [str(rules)],
        "evaluation_interval": "1m",
        "tests": [{"interval": "1m", "input_series": given, "alert_rule_test": [{"eval_time": at, "alertname": name, "exp_alerts": []}]}],
    }
    path = rules.parent / f"{name}.yaml"
    path.write_text(yaml.safe_dump(test))
    done = subprocess.run(["promtool", "test", "rules", str(path)], capture_output=True, text=True)
    return done.stdout + done.stderr


def test_every_alert_has_a_case_and_a_runbook(rules: Path) -> None:
    alerts = [rule for group in yaml.safe_load(rules.read_text())["groups"] for rule in group["rules"]]
    assert {alert["alert"] for alert in alerts} == set(BAD)
    headings = re.findall(r"^## (\w+)$", (ROOT / "docs" / "alerts.md").read_text(), re.MULTILINE)
    assert headings == [alert["alert"] for alert in alerts]
    for alert in alerts:
        assert alert["annotations"]["runbook_url"].endswith(f"docs/alerts.md#{alert['alert'].lower()}")


@pytest.mark.parametrize("name", BAD)
def test_an_alert_fires_when_it_should_and_not_otherwise(name: str, rules: Path) -> None:
    given, at = BAD[name]
    fired = promtool(rules, name, given, at)
    assert "got:[" in fired, fired
    assert "Labels:{" in fired
    assert "SUCCESS" in promtool(rules, name, GOOD, at)


def test_the_dashboard_is_the_one_that_is_made() -> None:
    assert json.loads(dashboards.OUT.read_text()) == dashboards.dashboard()
    (rendered,) = [each for each in render(EVERYTHING) if each["kind"] == "ConfigMap"]
    assert json.loads(rendered["data"]["p2p-weightsync.json"]) == dashboards.dashboard()


def test_grafanas_own_schema_knows_all_of_the_dashboard() -> None:
    plugins.register_default_plugins()
    made = dashboards.dashboard()
    read = json.loads(JSONEncoder().encode(Dashboard.from_json(made)))

    def lost(given: Any, kept: Any, path: str = "") -> list[str]:
        if isinstance(given, dict) and isinstance(kept, dict):
            return [each for key, value in given.items() for each in lost(value, kept.get(key), f"{path}.{key}")]
        if isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
            return [each for index, value in enumerate(given) for each in lost(value, kept[index], f"{path}[{index}]")]
        return [] if given == kept else [path]

    assert lost(made, read) == []


def test_the_dashboard_keeps_the_usual_rules() -> None:
    """Those of grafana/dashboard-linter."""
    made = dashboards.dashboard()
    assert made["editable"] is False
    assert made["uid"]
    assert "id" not in made
    assert "__inputs" not in made
    variables = {variable["name"]: variable for variable in made["templating"]["list"]}
    assert variables.pop("datasource")["label"] == "Data source"
    for variable in variables.values():
        assert (variable["refresh"], variable["multi"], variable["includeAll"], variable["allValue"]) == (2, True, True, ".*")
    panels = [panel for panel in made["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in made["panels"]}) == len(made["panels"])
    for panel in panels:
        assert panel["title"]
        assert panel["description"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == panel["datasource"]["uid"] == "${datasource}"
            for rate in re.findall(r"(?:rate|increase)\([^\[]*\[([^\]]*)\]", target["expr"]):
                assert rate == "$__rate_interval"
    places = [(p["gridPos"]["x"], p["gridPos"]["y"], p["gridPos"]["w"], p["gridPos"]["h"]) for p in made["panels"]]
    for index, (x, y, w, h) in enumerate(places):
        assert x + w <= 24
        for a, b, c, d in places[:index]:
            assert not (x < a + c and a < x + w and y < b + d and b < y + h), "panels overlap"
