"""The commands of `headrace env`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from deploy.options import ConfigOption, EnvironmentOptions, JsonOption, ModelOption, SetOption

env_app = typer.Typer(help="Environments: what is wrong with them.", no_args_is_help=True)

NameArgument = Annotated[
    str | None,
    typer.Argument(metavar="NAME", help="Built in, package.module:object, or of the file; default: all of the file."),
]


@env_app.callback()
def commands() -> None:
    """Environments: what is wrong with them."""


@env_app.command("check")
def check_environment(
    name: NameArgument = None,
    options: EnvironmentOptions = None,
    config: ConfigOption = None,
    model: ModelOption = None,
    as_json: JsonOption = False,
    values: SetOption = None,
) -> None:
    """Play an environment a few times against the scripted engine, and say what is wrong with it.

    Exit code 1 when something is.
    """
    from rich.console import Console

    from deploy.asked import asked
    from deploy.env_check import as_json as to_json
    from deploy.env_check import check, show, tokenizer_folder

    chosen = asked(config, values or (), name, options or (), model__path=model)
    folder = tokenizer_folder(chosen, named=model is not None)
    reports = [check(chosen, entry.called, folder) for entry in chosen.environments]
    if as_json:
        typer.echo(json.dumps([to_json(report) for report in reports], indent=2))
    else:
        for report in reports:
            show(report, Console(soft_wrap=True, highlight=False))
    raise typer.Exit(0 if all(report.fine for report in reports) else 1)
