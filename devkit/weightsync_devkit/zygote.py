"""A process that has stock sglang imported and forks engines from it: seconds instead of half a minute to each.

``python -m weightsync_devkit.zygote SOCKET`` listens on a Unix socket; one JSON line per connection,
``{"arguments": [...], "environment": {...}, "log": PATH}``, is answered with ``{"pid": N}``. The engine is the leader of
a session of its own, so that it can be ended with all its children. Starting by ``spawn``, as users do, is tested apart.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import psutil

_PARENT_SECONDS = 1.0
"""Between looks whether the process that started this one is still there."""


def preload() -> None:
    """Import what an engine's processes import."""
    import sglang.launch_server
    import sglang.srt.entrypoints.http_server
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler
    import sglang.srt.managers.tp_worker
    import sglang.srt.model_executor.model_runner  # noqa: F401
    from sglang.srt.models.registry import ModelRegistry
    from sglang.srt.platforms import current_platform

    ModelRegistry.get_supported_archs()
    _ = current_platform.device_name


def run_engine(request: dict[str, Any]) -> None:
    """In the forked child: become an engine."""
    os.setsid()
    log = os.open(request["log"], os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(request["environment"])
    _default_signals()
    real_method = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda method, force=False: real_method("fork", force=True)
    _reset_context_in_children()
    # Plugins read the environment, so they load only now.
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    sys.argv = ["launch_server", *request["arguments"]]
    try:
        run_server(prepare_server_args(request["arguments"]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def _reset_context_in_children() -> None:
    """sglang's processes expect fresh globals, as a spawned interpreter has them."""
    from sglang.srt import runtime_context

    run = multiprocessing.Process.run

    def clean(process: Any) -> None:
        runtime_context.reset_context()
        _default_signals()
        run(process)

    multiprocessing.Process.run = clean  # type: ignore[assignment, method-assign]
    multiprocessing.process.BaseProcess.run = clean  # type: ignore[assignment, method-assign]


def _default_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)


def serve(path: Path) -> None:
    """Fork engines on request until the process that started this one is gone; its engines go with it."""
    parent = os.getppid()
    engines: list[psutil.Process] = []
    preload()
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(8)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener.settimeout(_PARENT_SECONDS)
    while os.getppid() == parent:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        connection.setblocking(True)
        request = json.loads(connection.makefile().readline())
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(OSError):
                listener.close()
                connection.close()
            try:
                run_engine(request)
            except BaseException:
                import traceback

                traceback.print_exc()
            os._exit(1)
        engines.append(psutil.Process(pid))
        connection.sendall((json.dumps({"pid": pid}) + "\n").encode())
        connection.close()
    for engine in engines:
        if engine.is_running():  # and not another process with its number
            with contextlib.suppress(ProcessLookupError):
                os.killpg(engine.pid, signal.SIGKILL)


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
