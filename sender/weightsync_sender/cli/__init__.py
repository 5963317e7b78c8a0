"""The ``weightsync`` command: a thin user of :class:`weightsync_sender.WeightSender`."""

from weightsync_sender.cli._app import main

__all__ = ["main"]
