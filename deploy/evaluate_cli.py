"""The command `headrace evaluate`."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Annotated

import typer

from deploy.options import ConfigOption, JsonOption, SetOption

FolderArgument = Annotated[
    Path | None, typer.Argument(metavar="[FOLDER]", help="A model folder, as exported; without, a run's version.")
]
VersionOption = Annotated[
    str | None, typer.Option("--version", metavar="VERSION", help="Of the run; default: its newest checkpoint.")
]


def evaluate(
    folder: FolderArgument = None,
    run: Annotated[
        str | None, typer.Option("--run", metavar="ID", help="Whose version and configuration; default: the newest.")
    ] = None,
    version: VersionOption = None,
    config: ConfigOption = None,
    prompts: Annotated[
        int | None, typer.Option("--prompts", "-n", min=1, max=1_000_000, help="Of each environment.")
    ] = None,
    as_json: JsonOption = False,
    values: SetOption = None,
) -> None:
    """Accuracy and pass@k of one version of a run, or of a model folder, on held-out prompts; no Redis is needed.

    Where neither --prompts nor evaluation.prompts says how many, all are asked.
    """
    from deploy.evaluate import Wish
    from deploy.evaluate import run as evaluate_once
    from deploy.evaluate_show import show
    from deploy.weights import version_of

    wanted = version_of(version) if version is not None else None
    found = evaluate_once(Wish(folder, config, run, wanted, prompts, tuple(values or ())))
    if found is None:
        raise typer.Exit(128 + signal.SIGTERM)
    if as_json:
        typer.echo(json.dumps(found.as_json(), indent=2))
    else:
        show(found)
    raise typer.Exit(0 if found.result.samples else 1)
