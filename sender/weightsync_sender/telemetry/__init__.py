"""What a sender tells about itself: metrics from update reports, and one HTTP port for the operator and Prometheus."""

from weightsync_sender.telemetry.recorder import Recorder

__all__ = ["Recorder"]
