"""The command `headrace generate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from deploy.options import ConfigOption, EnvironmentOptions, ModelOption, SetOption

EngineOption = Annotated[str | None, typer.Option("--engine", metavar="NAME", help="One of producer.engine.")]
EnvironmentOption = Annotated[
    str | None, typer.Option("--env", "-e", metavar="NAME", help="Built in, package.module:object, or of the file.")
]
PromptOption = Annotated[str | None, typer.Option("--prompt", metavar="TEXT", help="One prompt of your own instead.")]
PassRatesOption = Annotated[
    Path | None, typer.Option("--pass-rates", metavar="FILE", help="Write how often each prompt was solved.")
]


def generate(
    config: ConfigOption = None,
    model: ModelOption = None,
    engine: EngineOption = None,
    environment: EnvironmentOption = None,
    options: EnvironmentOptions = None,
    prompt: PromptOption = None,
    tasks: Annotated[int, typer.Option("--tasks", "-n", min=1, max=1 << 40, help="Prompts of each environment.")] = 4,
    first: Annotated[int, typer.Option("--first", min=0, max=1 << 40, help="Index of the first one.")] = 0,
    samples: Annotated[int, typer.Option("--samples", "-m", min=1, max=4096, help="Of each prompt.")] = 2,
    held_out: Annotated[bool, typer.Option("--eval", help="Held-out prompts, which score 1 or 0.")] = False,
    pass_rates: PassRatesOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a line of JSON for each sample.")] = False,
    values: SetOption = None,
) -> None:
    """Sample from any engine and environment, without Redis or a trainer, and show the transcripts."""
    from deploy.asked import asked
    from deploy.generate import Wish, run
    from deploy.generate_show import Shown, line_of, show

    def print_one(sample: Shown) -> None:
        if as_json:
            typer.echo(json.dumps(line_of(sample), ensure_ascii=False))
        else:
            show(sample)

    chosen = asked(config, values or (), environment, options or (), model__path=model, producer__engine=engine)
    wish = Wish(chosen, prompt, tasks, first, samples, "eval" if held_out else "train", pass_rates)
    raise typer.Exit(run(wish, print_one))
