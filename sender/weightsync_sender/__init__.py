"""Write new weights straight into the memory of sglang engines, from a trainer or from a checkpoint.

    sender = WeightSender(engines=["http://10.0.0.7:30000"], config="/models/Qwen3-8B")
    report = sender.update(model.state_dict(), version="42")

A weight's way through this package: ``sources`` (named Hugging Face tensors) -> ``replica`` (which bytes of which
parameter they become) -> ``staging`` (packing what is not already contiguous) -> ``transports`` (one-sided writes).
``update`` holds the order of an update, ``engine_update`` that of one engine's control calls, ``engine_client`` the calls.
"""

from weightsync_core.errors import SourceError, UpdateFailed, WeightSyncError
from weightsync_sender.party import PartyError
from weightsync_sender.report import EngineReport, EngineState, Failure, UpdateReport
from weightsync_sender.sender import WeightSender
from weightsync_sender.settings import PauseMode, SenderSettings, Timeouts, Verify
from weightsync_sender.sources import CheckpointSource, ShardedSource, Source, TensorMeta

__all__ = [
    "CheckpointSource",
    "EngineReport",
    "EngineState",
    "Failure",
    "PartyError",
    "PauseMode",
    "SenderSettings",
    "ShardedSource",
    "Source",
    "SourceError",
    "TensorMeta",
    "Timeouts",
    "UpdateFailed",
    "UpdateReport",
    "Verify",
    "WeightSender",
    "WeightSyncError",
]
