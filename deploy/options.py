"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

RunOption = Annotated[str | None, typer.Option("--run", metavar="ID", help="Default: the newest live run here.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
