"""``python -m weightsync_sender.cli``."""

from weightsync_sender.cli import main

main()
