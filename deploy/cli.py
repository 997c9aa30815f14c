"""The command `headrace`. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import sys
import traceback
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from deploy.audit_cli import audit_app
from deploy.env_cli import env_app
from deploy.evaluate_cli import evaluate
from deploy.generate_cli import generate
from deploy.options import ConfigOption, JsonOption, RunOption, SetOption
from deploy.portability_cli import portability_app
from deploy.weights_cli import weights_app
from headrace.errors import HeadraceError

DEBUG = "HEADRACE_DEBUG"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Of a disk, or what one may have of it."""

app = typer.Typer(
    name="headrace",
    help="Asynchronous, streaming RL post-training for language models on Redis Streams.",
    epilog=f"Exit codes: 2 configuration or model, 3 broker, 4 engine, 5 weights, 6 checkpoint, 7 a process or port, "
    f"8 fenced by a newer trainer, 130 interrupted. {DEBUG}=1 shows tracebacks.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
runs_app = typer.Typer(help="List and delete runs.", no_args_is_help=True)
app.add_typer(runs_app, name="runs")
dead_app = typer.Typer(help="Entries that nobody could use: see, replay or drop them.", no_args_is_help=True)
app.add_typer(dead_app, name="dead")
app.add_typer(weights_app, name="weights")
app.add_typer(env_app, name="env")
app.add_typer(audit_app)
app.add_typer(portability_app, name="portability")
app.command()(generate)
app.command()(evaluate)

Result = TypeVar("Result")

LettersArgument = Annotated[list[str] | None, typer.Argument(metavar="ID…", help="Ids of `headrace dead list`.")]
AllOption = Annotated[bool, typer.Option("--all", help="All that there are.")]


@app.command()
def up(
    config: ConfigOption = None,
    run: Annotated[str | None, typer.Option("--run", metavar="ID", help="Default: made from the time.")] = None,
    model: Annotated[str | None, typer.Option(metavar="PATH", help="Local folder or hub id.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps of the whole run.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with --run, or with the newest run.")] = False,
    values: SetOption = None,
) -> None:
    """Start a run on this machine and see it to its end.

    A Redis of its own is started, unless HEADRACE_REDIS_URL names one.
    """
    from deploy.plan import Wish
    from deploy.up import up as run_up

    overrides = list(values or ())
    if model is not None:
        overrides.append(f"model.path={json.dumps(model, ensure_ascii=False)}")
    if steps is not None:
        overrides.append(f"run.steps={steps}")
    raise typer.Exit(run_up(Wish(config, run, tuple(overrides), resume)))


@app.command()
def register(
    config: ConfigOption = None,
    run: Annotated[str | None, typer.Option("--run", metavar="ID", help="Default: HEADRACE_RUN.")] = None,
    values: SetOption = None,
) -> None:
    """Make a run's folder and record, for services that something else starts (compose, Kubernetes, SLURM)."""
    from datetime import datetime

    from deploy.plan import Wish
    from deploy.register import register as register_run

    wish = Wish(config, run or os.environ.get("HEADRACE_RUN"), tuple(values or ()))
    typer.echo(register_run(wish, os.environ, datetime.now()))


@app.command()
def scale(
    role: Annotated[str, typer.Argument(metavar="producer", help="What to have more or fewer of.")],
    count: Annotated[int, typer.Argument(metavar="COUNT", min=0, max=1024, help="How many there are to be.")],
    run: RunOption = None,
) -> None:
    """Start more producers or drain the newest, and wait until that has happened."""
    from deploy.ordering import scale as order_scale

    if role != "producer":
        raise typer.BadParameter(f"{role!r} cannot be scaled; only producer can", param_hint="role")
    typer.echo(_wait(order_scale(run, count)))


@app.command()
def status(run: RunOption = None, as_json: JsonOption = False) -> None:
    """Processes, versions, lag, queues and the balance sheet."""
    from rich.console import Console

    from deploy.connections import open_operator
    from deploy.status import gather, show

    async def ask() -> dict[str, Any]:
        async with open_operator(run) as (run_id, operator):
            return await gather(run_id, operator)

    found = _wait(ask())
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        show(Console(soft_wrap=True, highlight=False), found)


@app.command()
def rollouts(
    run: RunOption = None,
    count: Annotated[int, typer.Option("-n", min=1, max=10_000, help="The newest so many.")] = 10,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new ones as they come.")] = False,
) -> None:
    """Finished rollouts: prompt, completion, reward, lag; the newest 64 groups, also of a run that has ended."""
    from rich.console import Console

    from deploy.past import open_past
    from deploy.rollouts import stream

    async def read() -> None:
        async with open_past(run) as (_, operator, goes_on):
            console = Console(soft_wrap=True, highlight=False)
            await stream(operator, console, count=count, follow=follow and goes_on)

    _wait(read())


@app.command()
def stop(
    run: RunOption = None,
    patience: Annotated[float, typer.Option(min=0, help="Seconds before force is used.")] = 150.0,
) -> None:
    """Stop a run: its producers drain, its trainer writes a checkpoint."""
    from deploy.ordering import stop as order_stop

    typer.echo(_wait(order_stop(run, patience)))


@app.command("config")
def show_config(config: ConfigOption = None, values: SetOption = None, as_json: JsonOption = False) -> None:
    """The resolved configuration, with where each value came from."""
    from deploy.config_table import table
    from headrace.config_sources import resolve

    resolved = resolve(config, os.environ, values or ())
    if as_json:
        typer.echo(
            json.dumps({"config": resolved.config.model_dump(mode="json"), "origins": resolved.origins}, indent=2)
        )
        return
    from rich.console import Console

    Console(highlight=False).print(table(resolved))


@app.command()
def prepare() -> None:
    """Convert the small model that quickstart trains into the cache folder, once."""
    from deploy.inspection import prepare as prepare_small

    typer.echo(f"the small model is in {prepare_small()}")


@app.command()
def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run of this folder.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write; replaced when an export made it.")],
) -> None:
    """Write a run's newest checkpoint as a Hugging Face folder that transformers loads."""
    from deploy.connections import local_run
    from deploy.exporting import export_newest

    typer.echo(f"exported {export_newest(local_run(run), out)}")


@app.command("scripts")
def write_scripts(folder: Annotated[Path, typer.Argument(metavar="DIR", help="Made when it is not there.")]) -> None:
    """Write the wire's Lua scripts, for a producer in another language (docs/wire-protocol.md)."""
    from deploy.scripts import write_scripts as write

    typer.echo(write(folder))


@runs_app.command("list")
def list_runs(as_json: JsonOption = False) -> None:
    """Runs of this folder, and of the broker that HEADRACE_REDIS_URL names."""
    from rich.console import Console

    from deploy.connections import living, open_runs, runs_folder
    from deploy.runs import RunRow, rows, table, to_json

    async def ask() -> list[RunRow]:
        async with open_runs() as broker:
            return await rows(runs_folder(), broker, living)

    found = _wait(ask())
    if as_json:
        typer.echo(to_json(found))
    elif found:
        Console(highlight=False).print(table(found))
    else:
        typer.echo(f"no runs in {runs_folder()}")


@runs_app.command("delete")
def delete_run(run_id: Annotated[str, typer.Argument(metavar="ID")]) -> None:
    """Delete a run's folder and keys. A live run is refused."""
    from deploy.connections import living, open_runs, runs_folder
    from deploy.run_folder import check_run_id
    from deploy.runs import delete

    async def ask() -> str:
        async with open_runs() as broker:
            return await delete(check_run_id(run_id), runs_folder(), broker, await living(run_id))

    typer.echo(f"deleted {_wait(ask())}")


@dead_app.command("list")
def list_dead(run: RunOption = None, as_json: JsonOption = False) -> None:
    """Dead letters, the oldest first; also of a run that has ended."""
    from rich.console import Console

    from deploy.dead import listed, table
    from deploy.past import open_past

    async def ask() -> list[dict[str, Any]]:
        async with open_past(run) as (_, operator, _):
            return await listed(operator)

    found = _wait(ask())
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    elif found:
        Console(highlight=False).print(table(found))
    else:
        typer.echo("no dead letters")


@dead_app.command("show")
def show_dead(
    letter: Annotated[str, typer.Argument(metavar="ID", help="An id of `headrace dead list`.")],
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the bytes that were kept there.")] = None,
    run: RunOption = None,
) -> None:
    """All that is known of one letter, and its body as far as it can be read."""
    from rich.console import Console

    from broker.looks import DeadLetter
    from deploy.dead import check_id, save, show
    from deploy.past import open_past

    check_id(letter)

    async def ask() -> tuple[DeadLetter, int]:
        async with open_past(run) as (_, operator, _):
            return await operator.dead_letter(letter), await operator.now_ms()

    found, now_ms = _wait(ask())
    show(Console(soft_wrap=True, highlight=False), found, now_ms)
    if output is not None:
        typer.echo(save(found, output))


@dead_app.command("replay")
def replay_dead(letters: LettersArgument = None, everything: AllOption = False, run: RunOption = None) -> None:
    """Put letters back as they were, as tasks that are admitted anew."""
    from deploy.connections import open_operator
    from deploy.dead import check_choice, chosen, replay

    check_choice(letters, everything)

    async def put_back() -> None:
        async with open_operator(run) as (run_id, operator):
            await replay(run_id, operator, await chosen(operator, letters, everything))

    _wait(put_back())


@dead_app.command("drop")
def drop_dead(letters: LettersArgument = None, everything: AllOption = False, run: RunOption = None) -> None:
    """Forget letters; their tasks were counted as dead, and stay so."""
    from deploy.connections import open_operator
    from deploy.dead import check_choice, chosen, drop

    check_choice(letters, everything)

    async def forget() -> str:
        async with open_operator(run) as (run_id, operator):
            return await drop(run_id, operator, await chosen(operator, letters, everything))

    typer.echo(_wait(forget()))


def main() -> None:
    """Entry point of the console script: errors become one sentence on stderr and an exit code of their class."""
    # What libraries and services log is for log files; a command's own words are its output.
    logging.getLogger().addHandler(logging.StreamHandler() if debug() else logging.NullHandler())
    try:
        app()
    except HeadraceError as error:
        if debug():
            traceback.print_exc()
        print(f"headrace: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our output (`| head`) has enough.
        _write_no_more()
        sys.exit(0)
    except OSError as error:
        if error.errno not in FULL:
            raise
        if debug():
            traceback.print_exc()
        print(f"headrace: {error.filename or 'the output'} cannot be written ({error.strerror})", file=sys.stderr)
        _write_no_more()
        sys.exit(1)


def _write_no_more() -> None:
    """Python would complain once more at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def debug() -> bool:
    return os.environ.get(DEBUG) == "1"


def _wait(work: Coroutine[Any, Any, Result]) -> Result:
    return asyncio.run(work)


if __name__ == "__main__":
    main()
