"""One control plane for all tests of the operator; every test has a namespace and an operator of its own."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers import Operator

from weightsync_core.labels import GROUP, PLURAL
from weightsync_devkit.cluster import Cluster
from weightsync_devkit.pods import FakeEngines, PodSpace
from weightsync_devkit.waiting import eventually

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def kubectl(kubeconfig: str) -> Callable[..., str]:
    """kubectl with the administrator's rights; the crds are installed."""

    def run(*arguments: str, stdin: str | None = None, check: bool = True) -> str:
        program = shutil.which("kubectl") or str(Cluster().places.bin / "kubectl")
        done = subprocess.run([program, "--kubeconfig", kubeconfig, *arguments], capture_output=True, text=True, input=stdin)
        assert not check or done.returncode == 0, done.stderr
        return done.stdout if check else done.stdout + done.stderr

    run("apply", "--server-side", "--force-conflicts", "-f", str(ROOT / "crds"))
    eventually(lambda: "condition met" in run("wait", "--for=condition=Established", f"crd/{PLURAL}.{GROUP}", check=False))
    return run


@pytest.fixture(scope="session")
def fake_engines() -> Iterator[FakeEngines]:
    with FakeEngines() as servers:
        yield servers


@pytest.fixture
def space(kubectl: Callable[..., str], kubeconfig: str, fake_engines: FakeEngines, request: pytest.FixtureRequest) -> Iterator[PodSpace]:
    """A namespace of its own."""
    name = f"t-{abs(hash(request.node.nodeid)) % 10**8}-{int(time.time() * 1000) % 10**6}"
    kubectl("create", "namespace", name)
    pods = PodSpace(name, kubeconfig, fake_engines)
    try:
        yield pods
    finally:
        pods.close()


@pytest.fixture
def operator(space: PodSpace, kubeconfig: str, tmp_path: Path) -> Iterator[Operator]:
    """One operator for the test's namespace."""
    started = Operator(kubeconfig, tmp_path, f"--namespace={space.namespace}")
    started.start()
    yield started
    if started.process.poll() is None:
        started.stop()
    print(started.log.read_text()[-6000:])
