"""Write new weights straight into the memory of sglang engines, from a trainer or from a checkpoint.

    sender = WeightSender(engines=["http://10.0.0.7:30000"], config="Qwen/Qwen3-8B")
    report = sender.update(model.state_dict(), version="42")

A weight's way through this package: ``sources`` (named Hugging Face tensors) -> ``replica`` (which bytes of which
parameter they become) -> ``staging`` (packing what is not already contiguous) -> ``transports`` (one-sided writes).
``engine_client`` and ``update`` hold the control calls and their order.
"""

from weightsync_sender.report import EngineReport, EngineState, UpdateReport
from weightsync_sender.sender import WeightSender
from weightsync_sender.settings import PauseMode, SenderSettings, Timeouts, Verify
from weightsync_sender.sources import CheckpointSource, Source, TensorMeta

__all__ = [
    "CheckpointSource",
    "EngineReport",
    "EngineState",
    "PauseMode",
    "SenderSettings",
    "Source",
    "TensorMeta",
    "Timeouts",
    "UpdateReport",
    "Verify",
    "WeightSender",
]
