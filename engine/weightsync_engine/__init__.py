"""sglang plugin: what an engine says about its own parameters, and how peers may write them.

Installed beside stock sglang, found through entry points, nothing patched on disk:

- ``sglang.srt.plugins``: ``weightsync_engine.plugin.register`` publishes live parameter tables, registers
  parameter memory for one-sided writes, answers digests and refreshes derived buffers after an update;
- ``sglang.srt.platforms``: ``weightsync_engine.platform.activate`` lets stock sglang serve on a machine that has
  no accelerator (tests and the demo).

An engine works without this package too, with what sglang's own Mooncake seeding publishes.
"""
