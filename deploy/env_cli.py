"""The commands of `headrace env`."""

from __future__ import annotations

import typer

env_app = typer.Typer(help="Environments: what they are like, and what is wrong with them.", no_args_is_help=True)
