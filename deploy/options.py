"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RunOption = Annotated[str | None, typer.Option("--run", metavar="ID", help="Default: the newest live run here.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
ConfigOption = Annotated[Path | None, typer.Option("--config", "-c", metavar="FILE", help="TOML file.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="One configuration value; may be repeated.")
]
EnvironmentOptions = Annotated[
    list[str] | None,
    typer.Option("--option", "-o", metavar="KEY=VALUE", help="One option of the environment; may be repeated."),
]
ModelOption = Annotated[str | None, typer.Option("--model", metavar="PATH", help="Local folder or hub id.")]
