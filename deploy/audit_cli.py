"""`headrace audit`, `headrace trace` and `headrace doctor`."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.options import JsonOption, RunOption
from headrace.errors import ConfigError, ServiceError

if TYPE_CHECKING:
    from audit.analysis import Audit

audit_app = typer.Typer()

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="A run of this folder, or the path of a run's folder.")]
FromOption = Annotated[float | None, typer.Option("--from", metavar="S", min=0, help="Seconds since the run began.")]
ToOption = Annotated[float | None, typer.Option("--to", metavar="S", min=0, help="Seconds since the run began.")]


@audit_app.command()
def audit(
    run: RunArgument,
    other: Annotated[str | None, typer.Argument(metavar="RUN", help="A second run, to compare with.")] = None,
    as_json: JsonOption = False,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a page with plots there.")] = None,
    begin: FromOption = None,
    end: ToOption = None,
) -> None:
    """Where a run's device-hours went, what holds it up, and what to change next; with two runs, whether it helped."""
    from dataclasses import asdict

    from rich.console import Console

    from audit.analysis import as_json as audit_fields
    from audit.compare import compare, shown
    from audit.text import report

    _check_window(begin, end)
    if other is not None and html is not None:
        raise ConfigError("--html shows one run; leave out the second one, or --html")
    first = _audited(run, begin, end)
    console = Console(highlight=False)
    if other is not None:
        comparison = compare(first, _audited(other, begin, end))
        typer.echo(json.dumps(asdict(comparison), indent=2)) if as_json else console.print(shown(comparison))
        return
    if html is not None:
        from audit.page import page

        _write(html, page(first))
    if as_json:
        typer.echo(json.dumps(audit_fields(first), indent=2))
    else:
        console.print(report(first))
    if html is not None and not as_json:
        typer.echo(f"\nwrote {html}")


@audit_app.command()
def trace(
    run: RunArgument,
    begin: FromOption = None,
    end: ToOption = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE", help="Default: RUN.trace.json.")] = None,
) -> None:
    """A run's timeline as one file for ui.perfetto.dev or chrome://tracing."""
    from audit.reading import read
    from audit.trace import trace as timeline

    _check_window(begin, end)
    folder = _folder(run)
    made = timeline(read(folder), begin, end)
    file = out or Path(f"{folder.name}.trace.json")
    _write(file, json.dumps(made, separators=(",", ":")))
    typer.echo(f"wrote {file}: {len(made['traceEvents'])} events; open it in https://ui.perfetto.dev")


@audit_app.command()
def doctor(run: RunOption = None, as_json: JsonOption = False) -> None:
    """Who waits on whom in a live run, since when, for which id; what is wrong, and what to type next."""
    from rich.console import Console

    from audit.doctor import Seen, findings, waits
    from deploy import doctor as looking
    from deploy.connections import open_operator

    async def ask() -> Seen:
        async with open_operator(run) as (run_id, port):
            return await looking.look(run_id, port)

    seen = asyncio.run(ask())
    told = waits(seen), findings(seen)
    if as_json:
        typer.echo(json.dumps(looking.as_json(seen, *told), indent=2))
    else:
        looking.show(Console(soft_wrap=True, highlight=False), seen, *told)


def _folder(run: str) -> Path:
    """Of a run by its name here, or of the folder itself."""
    from deploy.connections import local_run

    path = Path(run)
    return path.absolute() if "/" in run and path.is_dir() else local_run(run).path


def _check_window(begin: float | None, end: float | None) -> None:
    if begin is not None and end is not None and begin >= end:
        raise ConfigError(f"--from {begin:g} is not before --to {end:g}")


def _audited(run: str, begin: float | None, end: float | None) -> Audit:
    from audit.analysis import analyse
    from audit.reading import read

    return analyse(read(_folder(run)).between(begin, end))


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ServiceError(f"{file} cannot be written: {error.strerror}") from error
