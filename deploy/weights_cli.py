"""The commands of `headrace weights`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from deploy.options import JsonOption, RunOption

if TYPE_CHECKING:
    from broker.connect import Run

weights_app = typer.Typer(help="Versions of the weights: see, keep, export or go back to them.", no_args_is_help=True)

VersionArgument = Annotated[str, typer.Argument(metavar="VERSION", help="As `headrace weights list` names it.")]
Result = TypeVar("Result")


@weights_app.command("list")
def list_versions(run: RunOption = None, as_json: JsonOption = False) -> None:
    """Versions, the newest first: where they lie, who reads them, which are kept."""
    from rich.console import Console

    from deploy.weights import listed, table

    found = _of_run(run, listed)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    elif found:
        Console(highlight=False).print(table(found))
    else:
        typer.echo("no weight version was published yet")


@weights_app.command()
def pin(
    version: Annotated[str, typer.Argument(metavar="VERSION", help="As `headrace weights list` names it, or `head`.")],
    run: RunOption = None,
) -> None:
    """Keep a version in memory while the run lives."""
    from deploy import weights

    kept = None if version == "head" else weights.version_of(version)
    typer.echo(_of_run(run, lambda run_id, port: weights.pin(run_id, port, kept)))


@weights_app.command()
def unpin(version: VersionArgument, run: RunOption = None) -> None:
    """Let a version go that was pinned."""
    from deploy import weights

    kept = weights.version_of(version)
    typer.echo(_of_run(run, lambda run_id, port: weights.unpin(run_id, port, kept)))


@weights_app.command()
def rollback(version: VersionArgument, run: RunOption = None) -> None:
    """Let training go on from an earlier version's weights, and wait until it does."""
    from deploy.ordering import rollback as order_rollback
    from deploy.weights import version_of

    typer.echo(asyncio.run(order_rollback(run, version_of(version))))


@weights_app.command()
def export(
    version: VersionArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write; replaced when an export made it.")],
    run: RunOption = None,
) -> None:
    """Write a version in this host's memory as a Hugging Face folder that transformers loads."""
    from deploy.weights import version_of
    from deploy.weights_export import export as export_version

    wanted, place = version_of(version), out.absolute()
    typer.echo(f"exported {_of_run(run, lambda run_id, port: export_version(run_id, port, wanted, place))}")


def _of_run(run: str | None, work: Callable[[str, Run], Awaitable[Result]]) -> Result:
    """What the work answers that is given the id and port of the run that is meant."""
    from deploy.connections import open_operator

    async def ask() -> Result:
        async with open_operator(run) as (run_id, port):
            return await work(run_id, port)

    return asyncio.run(ask())
