"""Fixtures for all tests: tiny checkpoints and real engines, each made once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MOONCAKE_PROTOCOL", "tcp")
os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")

from weightsync_devkit import zoo
from weightsync_devkit.cluster import Cluster
from weightsync_devkit.cluster.build import is_built, missing
from weightsync_devkit.engines import Engines

# A shell starts background jobs with interrupts ignored, which every child would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``checkpoint(name, seed)``: the folder of a zoo entry; equal calls give the same folder."""
    root = tmp_path_factory.mktemp("zoo")

    def make(name: str, seed: int = 1, shards: int = 1) -> Path:
        folder = root / f"seed-{seed}-{shards}" / name
        return folder if folder.exists() else zoo.write(name, folder, seed, shards=shards)

    return make


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Starts engines in seconds."""
    with Engines(tmp_path_factory.mktemp("engines")) as running:
        yield running


@pytest.fixture(scope="session")
def node_cluster() -> Iterator[Cluster]:
    """A real one-node Kubernetes, started here; built before (``make cluster``), since that takes longer than a test may."""
    if lacks := missing():
        pytest.skip(lacks)
    cluster = Cluster()
    if not is_built(cluster.places):
        pytest.skip("the test cluster is not built; make cluster")
    mine = not cluster.is_up()
    cluster.up()
    try:
        yield cluster
    finally:
        if mine:
            cluster.down()


@pytest.fixture(scope="session")
def kubeconfig(request: pytest.FixtureRequest) -> Iterator[str]:
    """KUBECONFIG's cluster if set, else one made here."""
    if "KUBECONFIG" in os.environ:
        yield os.environ["KUBECONFIG"]
        return
    cluster: Cluster = request.getfixturevalue("node_cluster")
    os.environ["KUBECONFIG"] = str(cluster.places.kubeconfig)
    yield str(cluster.places.kubeconfig)
    del os.environ["KUBECONFIG"]
