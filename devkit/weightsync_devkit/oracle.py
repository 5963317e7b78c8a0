"""The oracle: an engine that was updated must hold and say what one does that was started from the same checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from weightsync_devkit.engines import EngineProcess

PROMPTS = ((5, 6, 7, 8, 9), (100, 3, 77), (42,), (9, 200, 31, 17, 8, 120, 64, 11))


@dataclass(frozen=True)
class Held:
    """What an engine holds, and what it says."""

    checksums: tuple[dict[str, str], ...]
    """By rank: sglang's checksums of all tensors, parameters and buffers."""
    tokens: tuple[tuple[int, ...], ...]
    """Greedy tokens of several prompts; empty where the model cannot generate here."""


def held_by(engine: EngineProcess, *, generate: bool = True) -> Held:
    """Ask an engine. Checksums alone do not show everything that tokens do, and the reverse."""
    tokens = tuple(tuple(engine.generate(prompt)) for prompt in PROMPTS) if generate else ()
    return Held(tuple(engine.checksums()), tokens)


def differences(seen: Held, expected: Held) -> list[str]:
    """``rank: tensor`` for every tensor that differs or that only one has, and ``tokens`` if those differ."""
    found = []
    for rank, (left, right) in enumerate(zip(seen.checksums, expected.checksums, strict=True)):
        found += [f"{rank}: {name}" for name in sorted(left.keys() | right.keys()) if left.get(name) != right.get(name)]
    if seen.tokens != expected.tokens:
        found.append("tokens")
    return found
