"""Where the new weights come from: named Hugging Face tensors, whole (not sharded), in any order.

A source states names, shapes and dtypes up front, so that an update can be proven complete before its first byte, and
then hands the tensors out one after the other. A tensor must keep its bytes until the update has returned.
"""

from weightsync_sender.sources._base import Source, TensorMeta, is_collective, meta_of, require_plain
from weightsync_sender.sources.checkpoint import CheckpointSource
from weightsync_sender.sources.memory import MemorySource, as_source
from weightsync_sender.sources.sharded import ShardedSource

__all__ = [
    "CheckpointSource",
    "MemorySource",
    "ShardedSource",
    "Source",
    "TensorMeta",
    "as_source",
    "is_collective",
    "meta_of",
    "require_plain",
]
