"""`headrace portability measure` and `headrace portability compare`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated

import typer

from deploy.options import ConfigOption, JsonOption, ModelOption, SetOption
from headrace.errors import ConfigError

portability_app = typer.Typer(
    help="An engine on a target: measure it under sustained load, and compare two.", no_args_is_help=True
)

OutArgument = Annotated[Path, typer.Argument(metavar="OUT", help="JSON file to write; only a record is replaced.")]
EngineOption = Annotated[str | None, typer.Option("--engine", metavar="NAME", help="One of producer.engine.")]
BatchOption = Annotated[
    list[int] | None,
    typer.Option("--batch", "-b", min=1, max=4096, help="Requests at once; may be repeated. Default: producer.slots."),
]
LengthOption = Annotated[
    list[int] | None,
    typer.Option(
        "--length",
        "-l",
        min=1,
        max=1 << 20,
        help="Tokens of each completion; may be repeated. Default: sampling.max_new_tokens.",
    ),
]
RecordArgument = Annotated[Path, typer.Argument(help="A record of `headrace portability measure`.")]


@portability_app.command()
def measure(
    out: OutArgument,
    config: ConfigOption = None,
    model: ModelOption = None,
    engine: EngineOption = None,
    batches: BatchOption = None,
    lengths: LengthOption = None,
    prompt: Annotated[int, typer.Option("--prompt", min=1, max=1 << 20, help="Tokens of each prompt.")] = 64,
    seconds: Annotated[float, typer.Option("--seconds", help="For each length at each batch.")] = 180.0,
    label: Annotated[str, typer.Option("--label", metavar="TEXT", help="Default: the engine and its device.")] = "",
    as_json: JsonOption = False,
    values: SetOption = None,
) -> None:
    """Record an engine on this target: sustained decode tokens/s beside one request alone, and what it runs on."""
    from rich.console import Console

    from audit.portability_record import to_json
    from audit.portability_text import measured
    from deploy import portability
    from deploy.asked import asked
    from headrace.files import write_json

    if not 0 < seconds <= 86_400:
        raise ConfigError(f"--seconds {seconds:g} must be more than 0 and at most 86400")
    portability.check_file(out)
    chosen = asked(config, values or (), None, (), model__path=model, producer__engine=engine)
    wish = portability.Wish(
        config=chosen,
        batches=tuple(sorted(set(batches or [chosen.producer.slots]))),
        lengths=tuple(sorted(set(lengths or [chosen.sampling.max_new_tokens]))),
        prompt_tokens=prompt,
        seconds=seconds,
        label=label,
    )
    record = portability.measure(wish, lambda line: typer.echo(line, err=True))
    write_json(out, to_json(record))
    if as_json:
        typer.echo(json.dumps(to_json(record), indent=2))
    else:
        Console(highlight=False).print(measured(record))
        typer.echo(f"\nwrote {out}")


@portability_app.command()
def compare(
    baseline: RecordArgument,
    candidate: RecordArgument,
    baseline_price: Annotated[float | None, typer.Option("--baseline-price", help="Of an hour of its target.")] = None,
    candidate_price: Annotated[float | None, typer.Option("--candidate-price", help="The same, as currency.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Five questions about a port, with numbers; with hourly prices also what a million tokens cost."""
    from dataclasses import asdict

    from rich.console import Console

    from audit.portability_compare import compare as compare_records
    from audit.portability_record import read_record
    from audit.portability_text import compared

    for name, price in (("--baseline-price", baseline_price), ("--candidate-price", candidate_price)):
        if price is not None and not (price > 0 and math.isfinite(price)):
            raise ConfigError(f"{name} {price:g} is no price; give what an hour costs, as a number above 0")
    found = compare_records(read_record(baseline), read_record(candidate), baseline_price, candidate_price)
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=2))
    else:
        Console(highlight=False).print(compared(found))
