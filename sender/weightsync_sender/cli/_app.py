"""Commands and their options; what they do stands in the modules beside this one."""

from __future__ import annotations

import logging
import os
import re
import sys
import warnings
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from weightsync_core.errors import WeightSyncError
from weightsync_sender.cli._console import make_console

app = typer.Typer(
    name="weightsync",
    help="Write new weights straight into the memory of running sglang engines.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

FAILED, BAD_INPUT = 1, 2
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


class TransportName(StrEnum):
    """Transports by name."""

    mooncake = "mooncake"
    nixl = "nixl"


class VerifyName(StrEnum):
    """Verifications by name."""

    off = "off"
    digest = "digest"
    snapshot = "snapshot"


class PauseName(StrEnum):
    """Pause modes by name."""

    abort = "abort"
    retract = "retract"
    in_place = "in-place"


Urls = Annotated[list[str], typer.Argument(metavar="URL...", help="Engines, e.g. http://10.0.0.7:30000")]
Transport = Annotated[TransportName, typer.Option(help="How bytes travel; the engines must publish it.")]
ApiKey = Annotated[str | None, typer.Option("--api-key-env", metavar="NAME", help="Environment variable with the engines' API key.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show what the libraries log.")]


_LARGEST_SIZE = 1 << 50
_VERIFY_HELP = (
    "Proof beyond counted bytes. off: none. digest: both ends sum up the raw bytes of every parameter, reading each once more. "
    "snapshot: writes twice and compares through sglang's own snapshot; for tests, at twice the time and host memory for a copy."
)
_PAUSE_HELP = (
    "What happens to running requests. abort: they end with what they have. retract: they are computed again under the new "
    "weights. in-place: they go on, with the old weights' KV cache."
)


def size_of(text: str) -> int:
    """Bytes from ``512MB``, ``1.5GiB``, ``1048576``.

    Raises:
        typer.BadParameter: anything else.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise typer.BadParameter(f"{text!r} is no size; expected e.g. 512MB, 1GiB or a number of bytes")
    size = float(match[1]) * _UNITS[match[2].upper()]
    if size > _LARGEST_SIZE:
        raise typer.BadParameter(f"{text!r} is more memory than any machine has")
    return int(size)


@app.command()
def push(
    checkpoint: Annotated[Path, typer.Argument(help="Folder with config.json and *.safetensors.")],
    urls: Urls,
    transport: Transport = TransportName.mooncake,
    version: Annotated[
        str | None, typer.Option(help="The weight_version that engines report afterwards; default: the folder's name.")
    ] = None,
    buffer_size: Annotated[
        str, typer.Option(help="Registered memory for bytes that must be packed before they travel, e.g. 512MB.")
    ] = "512MB",
    verify: Annotated[VerifyName, typer.Option(help=_VERIFY_HELP)] = VerifyName.off,
    pause_mode: Annotated[PauseName, typer.Option(help=_PAUSE_HELP)] = PauseName.abort,
    api_key_env: ApiKey = None,
    minimum_engines: Annotated[
        int | None, typer.Option(help="Exit with 0 if at least so many engines serve the version; default all.")
    ] = None,
    allow_unused: Annotated[
        list[str] | None, typer.Option(help="Pattern of checkpoint tensors that engines may leave out; repeatable.")
    ] = None,
    allow_cast: Annotated[bool, typer.Option(help="Let values be rounded to the engine's dtype.")] = False,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Bring a checkpoint into running engines and let them serve it."""
    from weightsync_sender.cli import _push
    from weightsync_sender.settings import PauseMode, SenderSettings, Verify

    settings = SenderSettings(
        transport=transport.value,
        buffer_size=size_of(buffer_size),
        verify=Verify(verify.value),
        pause_mode=PauseMode(pause_mode.value.replace("-", "_")),
        minimum_engines=minimum_engines,
        allow_unused=tuple(allow_unused or ()),
        allow_cast=allow_cast,
    )
    quiet(verbose)
    raise typer.Exit(
        _push.run(checkpoint, urls, checkpoint.resolve().name if version is None else version, settings, api_key(api_key_env), json=json)
    )


@app.command()
def plan(
    urls: Urls,
    transport: Transport = TransportName.mooncake,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Also compile this checkpoint: bytes that go directly, bytes that are packed.")
    ] = None,
    trainers: Annotated[int, typer.Option(min=1, help="Trainer ranks that would send.")] = 1,
    trainers_per_node: Annotated[int, typer.Option(min=1, help="Trainer ranks on one node.")] = 8,
    api_key_env: ApiKey = None,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Show who would write what, without touching an engine."""
    from weightsync_sender.cli import _plan

    quiet(verbose)
    raise typer.Exit(_plan.run(urls, transport.value, checkpoint, trainers, trainers_per_node, api_key(api_key_env), json=json))


@app.command()
def doctor(
    urls: Annotated[list[str] | None, typer.Argument(metavar="[URL...]", help="Engines to look at.")] = None,
    transport: Annotated[TransportName | None, typer.Option(help="Only what this transport needs.")] = None,
    api_key_env: ApiKey = None,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Say what is missing here, or at engines, and how to mend it."""
    from weightsync_sender.cli import _doctor

    quiet(verbose)
    raise typer.Exit(_doctor.run(urls or [], transport.value if transport else None, api_key(api_key_env), json=json))


def api_key(name: str | None) -> str | None:
    """The value of the environment variable that holds the API key.

    Raises:
        typer.BadParameter: named but not set.
    """
    if name is None:
        return None
    value = os.environ.get(name)
    if not value:
        raise typer.BadParameter(f"environment variable {name} is not set", param_hint="--api-key-env")
    return value


def quiet(verbose: bool) -> None:
    """Keep libraries' chatter off the terminal unless asked for."""
    logging.basicConfig(level=logging.INFO if verbose else logging.ERROR, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    if not verbose:
        os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
        warnings.simplefilter("ignore")


def main() -> None:
    """Entry point: exit 0 done, 1 failed, 2 bad input, 130 and 143 interrupted."""
    try:
        app(standalone_mode=True)
    except WeightSyncError as error:
        make_console(stderr=True).print(f"error: {error}", markup=False, soft_wrap=True)
        sys.exit(BAD_INPUT if isinstance(error, ValueError) else FAILED)
    except KeyboardInterrupt:
        sys.exit(130)
