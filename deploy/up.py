"""The shell around the launcher: what is started before its event loop and must be gone after it."""

from __future__ import annotations

import logging
import os
import signal
import sys
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path

from rich.console import Console

from deploy.connections import connect, told_url
from deploy.launcher import Launcher
from deploy.output import outlive_readers
from deploy.plan import Plan, Wish, make_plan
from deploy.redis_server import RedisServer
from deploy.report import print_report
from deploy.run_folder import Connection
from deploy.screen import Screen
from headrace.errors import ServiceError
from headrace.files import write_json
from headrace.service import Service, main

log = logging.getLogger(__name__)

LONGEST_STOP_S = 3600.0
"""The launcher bounds each part's stop itself; this is only the backstop over all of them."""


def up(wish: Wish) -> int:
    """Run to the end; returns the exit code. Raises HeadraceError when it cannot even start."""
    # Until the event loop handles signals, SIGTERM unwinds as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    outputs = outlive_readers()
    console = Console(soft_wrap=True, highlight=False)
    console.print("looking at model and environments", style="dim")
    plan = make_plan(wish, os.environ, datetime.now(), told_url())
    _log_to(plan.folder.log("launcher"))
    for output in outputs:
        output.tell_log()
    with ExitStack() as stack:
        stack.callback(plan.folder.unlock)
        redis, url = _broker(plan, stack)
        plan.folder.write_connection(Connection(plan.folder.run_id, url, os.getpid()))
        stack.callback(plan.folder.forget_connection)
        code, launcher = _launch(plan, url, redis, console, stack)
    _conclude(plan, launcher, console)
    return code


def _log_to(file: Path) -> None:
    handler = logging.FileHandler(file, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    # On a full disk a line is lost; the terminal is not the place to say so by a traceback for each.
    logging.raiseExceptions = False
    logging.getLogger().addHandler(handler)
    logging.getLogger().setLevel(logging.INFO)


def _broker(plan: Plan, stack: ExitStack) -> tuple[RedisServer | None, str]:
    """The broker that the environment names, else one of the run's own."""
    if url := told_url():
        return None, url
    redis = RedisServer(plan.folder.redis_folder, plan.folder.log("redis"))
    stack.callback(redis.stop)
    redis.start()
    return redis, redis.url


def _launch(
    plan: Plan, url: str, redis: RedisServer | None, console: Console, stack: ExitStack
) -> tuple[int, Launcher]:
    screen = stack.enter_context(Screen(console))
    screen.line(f"run {plan.folder.run_id} in {plan.folder.path}", "bold")
    if redis is not None:
        screen.line(f"Redis on {redis.place}, its data in {redis.folder}", "dim")
    launcher = Launcher(plan, url, redis, screen)
    stack.callback(launcher.abandon)

    async def start(service: Service) -> None:
        runs, operator = await connect(url, plan.folder.run_id, plan.config.broker)
        await launcher.start(service, runs, operator)

    code = main("headrace", start, drain_s=LONGEST_STOP_S)
    return code or launcher.outcome.code, launcher


def _conclude(plan: Plan, launcher: Launcher, console: Console) -> None:
    outcome = launcher.outcome
    if outcome.killed and outcome.code in (0, 130):
        print(f"had to be killed: {', '.join(outcome.killed)}", file=sys.stderr)
    if outcome.reason == "finished":
        if summary := launcher.summarize():
            print_report(console, summary)
        console.print(f"everything of this run is in {plan.folder.path}")
    elif outcome.code in (0, 130):
        console.print(f"{outcome.reason}; `headrace up --resume --run {plan.folder.run_id}` goes on with it")
    elif outcome.reason:
        try:
            write_json(plan.folder.failure_file, {"reason": outcome.reason})
        except ServiceError as error:
            log.warning("`headrace runs list` will not know that the run failed: %s", error)
