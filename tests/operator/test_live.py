"""A live sync, watched: real engine, real sender, real operator, real Prometheus; every panel and alert finds its series."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from helpers import Operator, condition, read, weight_sync

from weightsync_core.errors import UpdateFailed
from weightsync_devkit.dashboards import panels
from weightsync_devkit.engines import Engines, free_port
from weightsync_devkit.pods import PodSpace
from weightsync_devkit.prometheus import Prometheus, draw
from weightsync_devkit.waiting import eventually
from weightsync_sender import CheckpointSource, SenderSettings, Timeouts, WeightSender

pytestmark = pytest.mark.engines

ROOT = Path(__file__).parents[2]


def test_every_query_of_dashboard_and_alerts_finds_series(
    space: PodSpace,
    operator: Operator,
    engines: Engines,
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    kubeconfig: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed (Debian package prometheus)")
    folders = [checkpoint("qwen3", seed) for seed in (1, 2)]
    engine_port, sender_port = free_port(), free_port()
    # The second engine has the same port on another loopback address.
    first = engines.start(folders[0], "--host", "127.0.0.1", port=engine_port)
    second = engines.start(folders[0], "--host", "127.0.0.2", port=engine_port, SGLANG_HOST_IP="127.0.0.2")
    engines.wait(first)
    eventually(lambda: "fired up" in second.log.read_text(errors="replace"), 240)
    for name, ip in (("engine-0", "127.0.0.1"), ("engine-1", "127.0.0.2")):
        space.pod(name, ip, {"app": "engine"})
    space.pod("trainer-0", "127.0.0.1", {"app": "trainer"})
    group = {"name": "rollout", "selector": {"matchLabels": {"app": "engine"}}, "port": engine_port}
    weight_sync(space, engineGroups=[group], trainer={"selector": {"matchLabels": {"app": "trainer"}}, "port": sender_port})
    for name, value in {
        "WEIGHTSYNC_NAME": "demo", "POD_NAME": "trainer-0", "POD_NAMESPACE": space.namespace, "POD_IP": "127.0.0.1",
        "WEIGHTSYNC_PORT": str(sender_port),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    targets = {
        f"127.0.0.1:{sender_port}": {"namespace": space.namespace, "pod": "trainer-0"},
        f"127.0.0.1:{operator.port}": {"pod": "operator"},
    }
    settings = SenderSettings(timeouts=Timeouts(pause=2.0, connect=3.0, resume=2.0))
    began = time.monotonic()
    with Prometheus(tmp_path, targets) as prometheus, WeightSender.from_environment(config=folders[0], settings=settings) as sender:
        eventually(lambda: condition(read(space), "Ready")["reason"] == "Ready", 30)
        for step in range(4):
            assert sender.update(CheckpointSource(folders[step % 2]), f"v{step}").ready == 2
            time.sleep(1.5)
        os.killpg(second.pid, signal.SIGSTOP)  # still there, but it does not answer
        with pytest.raises(UpdateFailed):
            sender.update(CheckpointSource(folders[0]), "v4")
        os.killpg(second.pid, signal.SIGCONT)
        time.sleep(3)
        empty = [(panel.title, query.expr) for panel in panels() for query in panel.queries if not prometheus.query(query.expr)]
        assert empty == []
        alerts = yaml.safe_load((ROOT / "charts" / "files" / "alerts.yaml").read_text().replace("STALE_AFTER_SECONDS", "1800"))
        for rule in (rule for each in alerts["groups"] for rule in each["rules"]):
            prometheus.query(rule["expr"])
            for name in re.findall(r"p2p_weightsync\w+", rule["expr"]):
                assert prometheus.query(name), f"{rule['alert']}: no series {name}"
        assert sender.update(CheckpointSource(folders[1]), "v5").ready == 2
        draw(prometheus, time.monotonic() - began, Path(os.environ.get("WEIGHTSYNC_DASHBOARD_PNG", tmp_path / "dashboard.png")))
        space.delete_pod("engine-1")
        eventually(lambda: not prometheus.query('p2p_weightsync_engine_writes_total{engine="engine-1"}'), 10)
        assert prometheus.query('p2p_weightsync_engine_writes_total{engine="engine-0"}')
    engines.stop(first)
    engines.stop(second)
