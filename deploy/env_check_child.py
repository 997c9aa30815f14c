"""The process that plays an environment for `headrace env check`: `python -m deploy.env_check_child FD`.

It reads the question on stdin, and writes lines of JSON to the file descriptor FD: what it calls next and how long that
may take, what it found, what it learned, and that it came to its end.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import IO, Any

from broker.messages import Task, TaskDelivery
from deploy.env_check_visits import Visitor
from headrace.config import Config
from headrace.errors import EnvironmentLoadError, HeadraceError
from headrace.objects import shortened
from producers.chat import ByteChat, Chat, TemplateChat
from producers.engines.registry import build_engine
from producers.environments.api import Environment
from producers.environments.lifetime import SETUP_S, set_up
from producers.environments.registry import build_environment, environments_of, sizes_of
from producers.group import play_group
from producers.in_play import InPlay
from producers.solo import FIRST, open_stage
from producers.start import player_of

LOAD_S = 300.0
"""For imports and data sets."""
GROUPS, MEMBERS = 2, 2


class Teller:
    """What is said to the process that asked."""

    def __init__(self, out: IO[str]) -> None:
        self._out = out
        self._said: set[str] = set()
        self.errors = 0

    def at(self, what: str, limit_s: float) -> None:
        self._say({"at": what, "limit_s": limit_s})

    def found(self, level: str, sentence: str) -> None:
        """Each sentence once."""
        if sentence not in self._said:
            self._said.add(sentence)
            self.errors += level == "error"
            self._say({"level": level, "sentence": sentence})

    def facts(self, **facts: Any) -> None:
        self._say({"facts": facts})

    def end(self) -> None:
        self._say({"end": True})

    def _say(self, line: dict[str, Any]) -> None:
        print(json.dumps(line), file=self._out, flush=True)


async def check(tell: Teller, config: Config, name: str, model: str) -> None:
    """Build it, set it up, visit it, and play it against the scripted engine."""
    entry = environments_of(config)[name]
    async with AsyncExitStack() as stack:
        tell.at("loading it", LOAD_S)
        try:
            environment = build_environment(entry)
            sizes = sizes_of(name, environment)
            tell.at("its setup", SETUP_S)
            await set_up({name: environment}, stack)
        except EnvironmentLoadError as error:
            tell.found("error", str(error))
            return
        tell.facts(prompts=f"{sizes[0]} to train on, {sizes[1]} held out")
        if not sizes[0]:
            tell.found("error", "it has no training prompts (__len__ is 0), so no task can be made of it")
            return
        tell.at("loading the tokenizer", LOAD_S)
        chat: Chat = TemplateChat.load(Path(model), config.model.tool_format) if model else ByteChat()
        visitor = Visitor(tell, config, entry, environment, chat)
        await visitor.visit_all(*sizes)
        if not tell.errors:
            await _play(tell, config, name, environment, chat, model, stack)
        tell.at("its teardown", SETUP_S)


async def _play(
    tell: Teller,
    config: Config,
    name: str,
    environment: Environment,
    chat: Chat,
    model: str,
    stack: AsyncExitStack,
) -> None:
    """A few groups as a producer plays them, scored by its rewards in their own processes."""
    deadline_s = config.producer.reward_deadline_s
    options = {"vocabulary": _vocabulary(model)}
    scripted = config.model_copy(
        update={
            "producer": config.producer.model_copy(update={"engine": "scripted", "engine_options": options}),
            # The others' rewards need no processes here.
            "environments": (environments_of(config)[name],),
        }
    )
    tell.at("loading its reward", LOAD_S)
    engine = build_engine("scripted", scripted, Path(), config.run.seed)
    stack.push_async_callback(engine.close)
    await engine.start()
    await engine.commit(FIRST)
    stage = open_stage(scripted, player_of(scripted, engine, chat), {name: environment}, stack)
    for index in range(min(GROUPS, len(environment))):
        tell.at(f"a rollout of train prompt {index}", LOAD_S + 4 * deadline_s)
        task = Task(f"check/{index}", "train", name, index, index, MEMBERS, FIRST, 0)
        group = await play_group(stage, TaskDelivery("", 1, task), InPlay(MEMBERS), LOAD_S)
        for failure in group.failures:
            tell.found("error", f"a rollout of train prompt {index} against the scripted engine failed: {failure}")


def _vocabulary(model: str) -> int:
    if not model:
        return 256
    from headrace.policy.loading import load_tokenizer

    return len(load_tokenizer(Path(model)))


def main() -> int:
    question = json.load(sys.stdin)
    with open(int(sys.argv[1]), "w", encoding="utf-8") as out:  # noqa: PTH123 - a descriptor
        tell = Teller(out)
        try:
            asyncio.run(
                check(tell, Config.model_validate_json(question["config"]), question["name"], question["model"])
            )
        except HeadraceError as error:
            tell.found("error", shortened(str(error)))
        tell.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
