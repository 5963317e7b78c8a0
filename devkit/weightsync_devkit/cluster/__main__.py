"""The test cluster's command line."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from weightsync_devkit.cluster.build import BuildError, missing
from weightsync_devkit.cluster.build import build as build_programs
from weightsync_devkit.cluster.cluster import Cluster, ClusterError

app = typer.Typer(no_args_is_help=True, add_completion=False, help="A real one-node Kubernetes on this machine.")


@app.command()
def build(
    optional: Annotated[bool, typer.Option("--optional", help="Where it cannot be built, say why and succeed.")] = False,
) -> None:
    """Build programs and images that are missing."""
    if optional and (lacks := missing()):
        typer.echo(f"no test cluster, its tests will be skipped: {lacks}", err=True)
        return
    build_programs(Cluster().places, typer.echo)


@app.command()
def up(control_plane: Annotated[bool, typer.Option(help="No node: API server and controllers only.")] = False) -> None:
    """Build what is missing, start, print KUBECONFIG."""
    build()
    cluster, began = Cluster(), time.monotonic()
    cluster.up(control_plane_only=control_plane)
    typer.echo(f"ready after {time.monotonic() - began:.1f} s", err=True)
    typer.echo(f"export KUBECONFIG={cluster.places.kubeconfig} PATH={cluster.places.bin}:$PATH")


@app.command()
def down() -> None:
    """End everything."""
    Cluster().down()


@app.command(context_settings={"ignore_unknown_options": True})
def run(command: Annotated[list[str], typer.Argument(help="Default: a shell.")] = []) -> None:  # noqa: B006 typer reads it only
    """Run a command inside the namespaces, where pods have addresses."""
    raise typer.Exit(subprocess.run([*Cluster().enter(), *(command or ["bash"])]).returncode)


@app.command("import")
def import_images(archives: list[Path]) -> None:
    """Give the node image archives (OCI)."""
    for archive in archives:
        Cluster().import_image(archive.absolute())


@app.command()
def stop(part: str) -> None:
    """End one part, e.g. kube-apiserver."""
    Cluster().stop(part)


@app.command()
def start(part: str) -> None:
    """Start a stopped part."""
    Cluster().start(part)


@app.command()
def status() -> None:
    """Whether it runs, and which parts."""
    cluster = Cluster()
    typer.echo(json.dumps({"up": cluster.is_up(), "kubeconfig": str(cluster.places.kubeconfig)}))


if __name__ == "__main__":
    try:
        app()
    except (BuildError, ClusterError) as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(1)
