"""Rolls out the tasks of a run until the run ends. Needs only the URL of the run's broker and the run's id.

Set them as HEADRACE_REDIS_URL and HEADRACE_RUN, or pass flags. A URL with a password belongs into the environment:
command lines can be read by everybody on the machine, so that one in --redis-url is refused.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys

from headrace.errors import ConfigError
from headrace.service import Service, main

FLAGS = {
    "--redis-url": "redis://host:port without a password (default: $HEADRACE_REDIS_URL, where it may have one)",
    "--run": "the run's id (default: $HEADRACE_RUN)",
    "--name": "of this producer, one of its kind in the run (default: $HEADRACE_NAME, or from host and process)",
    "--metrics-port": "of /metrics and /healthz; 0 takes a free one (default: $HEADRACE_METRICS_PORT, or 0)",
}


def run(arguments: list[str]) -> int:
    """Run a producer to its end; returns the exit code."""
    parser = argparse.ArgumentParser("python -m producers", description=__doc__, allow_abbrev=False)
    for flag, meaning in FLAGS.items():
        parser.add_argument(flag, help=meaning)
    flags = vars(parser.parse_args(arguments))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    from producers.start import Settings, start

    try:
        settings = Settings.of(flags, os.environ)
    except ConfigError as error:
        print(f"producer: {error}", file=sys.stderr)
        return error.exit_code

    async def begin(service: Service) -> None:
        await start(service, settings)

    return main(settings.name, begin)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
