"""A trainer's place in a cluster without the training: brings checkpoints to the engines, the newest again and again.

``python trainer_loop.py FOLDER [--every SECONDS]``: every folder in FOLDER with a config.json is a checkpoint; its name is its
version. A real trainer calls ``sender.update(named_tensors, version)`` after each step instead.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import time
from pathlib import Path

from weightsync_core.errors import WeightSyncError
from weightsync_sender import CheckpointSource, WeightSender

log = logging.getLogger("trainer")


def main() -> None:
    """Go round for ever."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two updates")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    checkpoints = sorted(path.parent for path in options.folder.glob("*/config.json"))
    with WeightSender.from_environment(config=checkpoints[0]) as sender:
        for step, checkpoint in zip(itertools.count(1), itertools.cycle(checkpoints), strict=False):
            version = f"{checkpoint.name}-{step}"
            try:
                report = sender.update(CheckpointSource(checkpoint), version)
                log.info("updated version=%s engines=%d seconds=%.2f", version, report.ready, report.seconds)
            except WeightSyncError as error:
                log.error("not updated version=%s: %s", version, error)
            time.sleep(options.every)


if __name__ == "__main__":
    main()
