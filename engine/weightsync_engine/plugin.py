"""Entry point ``sglang.srt.plugins``: where the package hooks into stock sglang 0.5.23.

======================================  =======================================================================
hook                                    what it does
======================================  =======================================================================
after ``ModelRunner.initialize``        registers the runner's parameters (target and draft)
after ``Scheduler.get_init_info``       sends this rank's identity to the HTTP process in the ready handshake
around ``WeightChecker.handle``         answers live tables, digests and revocations over ``POST /weights_checker``
before ``check_weights`` (manager)      learns the manager that knows open sessions and released memory
after ``begin``/``end_weight_update``   NIXL progress on and off, derived buffers refreshed
after ``resume_memory_occupation``      a new generation
before ``_setup_and_run_http_server``   mounts the identity and lease routes, refuses calls of a sender without the lease
======================================  =======================================================================

An engine that is not meant to publish (``WEIGHTSYNC_TRANSPORTS=none``) gets no hook at all and behaves as stock.
"""

from __future__ import annotations

import json
import multiprocessing
from typing import Any

from weightsync_core.protocol import ANSWER_KEY, DIGEST_ACTION, GENERATION_ACTION, REVOKE_ACTION, TABLE_ACTION

_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
_MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"


def register() -> None:
    """Register all hooks; called by sglang once in every process of an engine."""
    from weightsync_engine import platform
    from weightsync_engine.rank import EngineRank, wanted_transports

    if platform.activate() is not None:
        from weightsync_engine import cpu_support

        cpu_support.register()
    transports = wanted_transports()
    if transports:
        _register_rank_hooks(EngineRank(transports))
        if multiprocessing.parent_process() is None:
            _register_http_hook()


def _register_rank_hooks(rank: Any) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from weightsync_engine.rank import identity

    def initialized(result: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
        rank.add_runner(runner)
        return result

    def init_info(result: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        result[ANSWER_KEY] = {
            "identity": identity(),
            "placement": rank.placement,
            "generation": rank.generation,
            "bytes": rank.parameter_bytes(),
            "transports": list(rank.publishers),
            "unavailable": rank.unavailable,
        }
        return result

    def handle(original: Any, checker: Any, action: str, *args: Any, role: str, **kwargs: Any) -> Any:
        if action == TABLE_ACTION:
            text = rank.table(role, checker._get_model())
        elif action.startswith(DIGEST_ACTION + ":"):
            text = rank.digests(role, checker._get_model(), json.loads(action.removeprefix(DIGEST_ACTION + ":")))
        elif action == GENERATION_ACTION:
            text = json.dumps({"generation": rank.generation, "open_session": rank.open_session})
        elif action == REVOKE_ACTION:
            if role == "target":  # the roles of a rank share its sessions
                rank.revoke()
            text = "{}"
        else:
            return original(checker, action, *args, role=role, **kwargs)
        return {
            "checksums": {ANSWER_KEY: text},
            "per_gpu_checksum": "",
            "parallelism_info": checker._parallelism_info(role=role).model_dump(),
        }

    def know_manager(manager: Any, *args: Any, **kwargs: Any) -> None:
        rank.manager = manager

    def began(result: Any, updater: Any, *args: Any, **kwargs: Any) -> Any:
        rank.opened()
        return result

    def ended(result: Any, updater: Any, *args: Any, **kwargs: Any) -> Any:
        rank.closed(updater.get_model())
        return result

    def resumed(result: Any, manager: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        if not request.tags or "weights" in request.tags:
            rank.memory_resumed()
        return result

    HookRegistry.register("sglang.srt.model_executor.model_runner.ModelRunner.initialize", initialized, HookType.AFTER)
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.get_init_info", init_info, HookType.AFTER)
    HookRegistry.register("sglang.srt.utils.weight_checker.WeightChecker.handle", handle, HookType.AROUND)
    HookRegistry.register(f"{_MANAGER}.check_weights", know_manager, HookType.BEFORE)
    HookRegistry.register(f"{_MANAGER}.resume_memory_occupation", resumed, HookType.AFTER)
    HookRegistry.register(f"{_UPDATER}.begin_weight_update", began, HookType.AFTER)
    HookRegistry.register(f"{_UPDATER}.end_weight_update", ended, HookType.AFTER)


def _register_http_hook() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from weightsync_engine.routes import mount

    def before_http(server_args: Any, *args: Any, **kwargs: Any) -> None:
        from sglang.srt.entrypoints import http_server

        infos = kwargs["scheduler_infos"] if "scheduler_infos" in kwargs else args[3]
        records = [info.pop(ANSWER_KEY) for info in infos if ANSWER_KEY in info]
        if records:
            mount(http_server.app, records, server_args)

    HookRegistry.register("sglang.srt.entrypoints.http_server._setup_and_run_http_server", before_http, HookType.BEFORE)
