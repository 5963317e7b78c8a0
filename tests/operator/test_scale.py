"""Many pods, and many that come and go: what one operator needs for them."""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from helpers import Operator, condition, read, weight_sync

from weightsync_core.labels import ASSIGNMENT_LIMIT
from weightsync_devkit.pods import PodSpace
from weightsync_devkit.waiting import eventually

pytestmark = pytest.mark.timeout(900)

ENGINES, TRAINERS = 200, 64
CHURN, AT_ONCE = 2000, 40
MEMORY_LIMIT = 250 << 20


def memory(operator: Operator) -> int:
    """Resident bytes of the operator's process."""
    return int(psutil.Process(operator.process.pid).memory_info().rss)


def reconciles(operator: Operator) -> dict[str, float]:
    """Upper bounds in seconds -> reconciles that took no longer."""
    text = operator.get("/metrics")[1]
    found = re.findall(r'reconcile_duration_seconds_bucket\{le="([^"]+)".*?\} (\S+)', text)
    return {bound: float(count) for bound, count in found}


def test_two_hundred_engines_and_sixty_four_trainers(space: PodSpace, operator: Operator) -> None:
    trainers = [space.trainer(f"trainer-{index}", "demo") for index in range(TRAINERS)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda index: space.engine(f"engine-{index}", size=8), range(ENGINES)))
    began = time.monotonic()
    weight_sync(space)
    body = eventually(
        lambda: (
            condition(read(space), "Ready")["reason"] == "Ready" and read(space)["status"]["engines"]["assigned"] == ENGINES and read(space)
        ),
        120,
    )
    seconds = time.monotonic() - began
    assert body["status"]["trainers"]["summary"] == f"{TRAINERS}/{TRAINERS}"
    documents = [trainer.membership.current for trainer in trainers]
    loads = [len(document.engines) for document in documents if document is not None]
    assert (sum(loads), max(loads) - min(loads)) == (ENGINES, 1)
    largest = max(len(document.dump()) for document in documents if document is not None)
    assert largest < ASSIGNMENT_LIMIT
    assert memory(operator) < MEMORY_LIMIT
    print(json.dumps({"ready_s": round(seconds, 1), "rss_mib": memory(operator) >> 20, "largest_bytes": largest, **reconciles(operator)}))


def test_two_thousand_pods_of_churn_leave_nothing_behind(space: PodSpace, operator: Operator) -> None:
    trainer = space.trainer("trainer-0", "demo")
    weight_sync(space)
    eventually(lambda: trainer.membership.current)
    sizes: list[int] = []
    pool = ThreadPoolExecutor(8)
    for first in range(0, CHURN, AT_ONCE):
        names = [f"engine-{first + index}" for index in range(AT_ONCE)]
        made = list(pool.map(space.engine, names))
        eventually(lambda names=names: {e.id for e in trainer.membership.current.engines} >= set(names), 60)  # type: ignore[union-attr]
        list(pool.map(space.delete_pod, names))
        for engine in made:
            space.engines.refuse(engine.ip)
        sizes.append(memory(operator))
    pool.shutdown()
    eventually(lambda: trainer.membership.current is not None and trainer.membership.current.engines == (), 30)
    status = read(space)["status"]
    assert status["excludedEngines"] == []
    settled, last = max(sizes[len(sizes) // 4 : len(sizes) // 2]), max(sizes[-5:])
    print(json.dumps({"rss_mib": [size >> 20 for size in (sizes[0], settled, last)], "status_bytes": len(json.dumps(status))}))
    assert last < settled * 1.15
    assert last < MEMORY_LIMIT
