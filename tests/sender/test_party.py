"""Trainer ranks agree, and notice each other's failures; real processes, real stores."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp

from weightsync_devkit.engines import free_port
from weightsync_sender.party import SILENCE_SECONDS, Alone, PartyError, TorchParty


def run(ranks: int, work: Callable[[TorchParty], Any]) -> dict[int, Any]:
    """What ``work`` returns on each rank, or the error it raised; a rank that is killed is missing."""
    port = free_port()
    context = mp.get_context("fork")
    answers = context.SimpleQueue()
    processes = [context.Process(target=_rank, args=(rank, ranks, port, work, answers), daemon=True) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(90)
        assert process.exitcode is not None, "a rank hangs"
    found = {}
    while not answers.empty():
        rank, answer = answers.get()
        found[rank] = answer
    return found


def _rank(rank: int, ranks: int, port: int, work: Callable[[TorchParty], Any], answers: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    party = TorchParty(dist.group.WORLD)
    party.begin()
    try:
        answers.put((rank, work(party)))
        party.end()
    except PartyError as error:
        answers.put((rank, f"error: {error}"))
    finally:
        if party.rank == 0:
            time.sleep(4)  # it holds the store, which the others may still read
        party.close()
        os._exit(0)


def test_alone() -> None:
    assert Alone().exchange("x", 5, 1.0) == [5]


def test_everybody_gets_everybodys_value_again_and_again() -> None:
    def work(party: TorchParty) -> Any:
        seen = []
        for _update in range(2):
            party.begin()
            seen += [party.exchange(f"step {step}", (party.rank, step), 20.0) for step in range(20)]
        return seen

    expected = [[(rank, step) for rank in range(4)] for step in range(20)] * 2
    assert run(4, work) == dict.fromkeys(range(4), expected)


@pytest.mark.parametrize("failing", [0, 2])
def test_a_failure_is_everybodys_at_once(failing: int) -> None:
    def work(party: TorchParty) -> Any:
        party.exchange("first", None, 20.0)
        if party.rank == failing:
            party.fail("out of paper")
            return "told"
        began = time.monotonic()
        with pytest.raises(PartyError, match=f"rank {failing} failed: out of paper"):
            party.exchange("second", None, 60.0)
        assert time.monotonic() - began < 5
        return "heard"

    assert sorted(run(3, work).values()) == ["heard", "heard", "told"]


@pytest.mark.parametrize(("killed", "number"), [(0, signal.SIGKILL), (1, signal.SIGKILL)])
def test_a_rank_that_dies_is_noticed(killed: int, number: int) -> None:
    def work(party: TorchParty) -> Any:
        party.exchange("first", None, 20.0)
        if party.rank == killed:
            time.sleep(1)  # the others have read the first answer
            os.kill(os.getpid(), number)
        began = time.monotonic()
        with pytest.raises(PartyError, match=f"rank {killed}"):
            party.exchange("second", None, 600.0)
        return time.monotonic() - began < SILENCE_SECONDS + 15

    assert run(3, work) == {rank: True for rank in range(3) if rank != killed}


def test_a_rank_that_comes_late_is_named() -> None:
    def work(party: TorchParty) -> Any:
        if party.rank == 1:
            time.sleep(3)
        return party.exchange("meeting", None, 1.0)

    found = run(2, work)
    assert found[0] == found[1] == "error: trainer ranks 1 did not come to 'meeting' in 1 s"


def test_ranks_at_different_calls_are_told() -> None:
    def work(party: TorchParty) -> Any:
        return party.exchange("left" if party.rank else "right", None, 10.0)

    assert all("all must make the same calls" in answer for answer in run(2, work).values())
