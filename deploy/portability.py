"""`headrace portability measure`: an engine under a steady load, with neither Redis nor a trainer.

Wait graph: each client waits for its completion, and asks for the next one; the measuring task waits until all clients
are warm, then until all of them have ended what they had begun in time, or for the first that fails.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from audit.portability_rates import Piece
from audit.portability_record import FORMAT, VERSION, Rate, Record, rate_of, read_record
from broker.messages import Int32
from deploy.printable import printable
from headrace.config import Config
from headrace.errors import ConfigError, EngineError
from headrace.hosts import host_name
from producers.chat import Chat
from producers.engines.api import Engine, Request, SamplingParams
from producers.engines.registry import engine_factory
from producers.engines.traits import Trait, Traits, traits_of
from producers.environments.api import Message
from producers.solo import open_player

SINGLE_S = 20.0
"""For the figure of one request alone, at most."""

Ask = Callable[[int], Request]
"""A request for a completion of so many tokens, with a prompt of its own."""
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Wish:
    """What is to be measured."""

    config: Config
    batches: tuple[int, ...]
    lengths: tuple[int, ...]
    """Of completions, in tokens."""
    prompt_tokens: int
    seconds: float
    """For each length at each batch."""
    label: str = ""
    """Default: the engine and its device."""


def measure(wish: Wish, say: Say) -> Record:
    """`say` hears a line whenever something was measured. Raises the errors of configuration, model and engine."""
    engine_factory(wish.config.producer.engine)  # before all that takes long
    return asyncio.run(_measure(wish, say))


def check_file(file: Path) -> None:
    """Whether a record can be written there, asked before what takes minutes. Raises ConfigError."""
    if not file.parent.is_dir():
        raise ConfigError(f"{file} cannot be written: there is no folder {file.parent}")
    if file.exists() or file.is_symlink():
        try:
            read_record(file)
        except ConfigError as error:
            raise ConfigError(f"{error}; it is not replaced: name another file, or remove it") from error


async def _measure(wish: Wish, say: Say) -> Record:
    async with AsyncExitStack() as stack:
        player = await open_player(_fitting(wish), stack)
        engine = player.engine
        _check_room(wish, engine)
        traits = _printable(await traits_of(engine))
        ask = _asking(wish, player.chat)
        single, sustained = [], []
        for length in wish.lengths:
            single.append(await _rate(engine, ask, 1, length, min(wish.seconds, SINGLE_S)))
            say(f"{length} tokens, one request: {single[-1].tokens_per_s:,.1f} tokens/s")
            for batch in wish.batches:
                sustained.append(await _rate(engine, ask, batch, length, wish.seconds))
                say(f"{length} tokens, batch {batch}: {sustained[-1].tokens_per_s:,.1f} tokens/s")
    name = wish.config.producer.engine
    return Record(
        format=FORMAT,
        version=VERSION,
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        label=printable(wish.label or (f"{name} on {traits.device}" if traits.device else name)),
        host=host_name(),
        engine=name,
        model=printable(wish.config.model.path),
        prompt_tokens=wish.prompt_tokens,
        traits=traits,
        single=single,
        sustained=sustained,
    )


async def hold(engine: Engine, ask: Ask, batch: int, length: int, seconds: float) -> tuple[list[Piece], float, float]:
    """Keep `batch` requests open, and return what was decoded, with begin and end of the time that counts.

    Before it, each client has one completion, of another length each: so that they do not all begin and end together.
    After it, the load stays until what was begun in time has ended. Raises EngineError.
    """
    pieces: list[Piece] = []
    warm, through = set[int](), set[int]()
    all_warm, all_through = asyncio.Event(), asyncio.Event()
    end = math.inf

    async def client(place: int) -> None:
        pieces.append(await _complete(engine, ask(-(-length * (place + 1) // batch))))
        warm.add(place)
        if len(warm) == batch:
            all_warm.set()
        while True:
            piece = await _complete(engine, ask(length))
            pieces.append(piece)
            if piece.end >= end:
                through.add(place)
                if len(through) == batch:
                    all_through.set()

    clients = [asyncio.create_task(client(place), name=f"load-{place}") for place in range(batch)]
    try:
        await _unless_failed(all_warm.wait(), clients)
        begin = time.perf_counter()
        end = begin + seconds
        await _unless_failed(all_through.wait(), clients)
    finally:
        for one in clients:
            one.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    return pieces, begin, end


async def _unless_failed(event: Coroutine[Any, Any, Any], clients: Sequence[asyncio.Task[None]]) -> None:
    """Wait for it; raises what a client has failed with."""
    waiting = asyncio.ensure_future(event)
    try:
        await asyncio.wait([waiting, *clients], return_when=asyncio.FIRST_COMPLETED)
        for one in clients:
            if one.done():
                one.result()
    finally:
        waiting.cancel()


async def _complete(engine: Engine, request: Request) -> Piece:
    done = await engine.generate(request)
    now = time.perf_counter()
    if done.finish_reason == "abort" or not len(done.token_ids_N):
        raise EngineError(f"the engine gave up a request of the measurement: {done.why or 'it does not say why'}")
    return Piece(now - done.decode_s, now, len(done.token_ids_N))


async def _rate(engine: Engine, ask: Ask, batch: int, length: int, seconds: float) -> Rate:
    pieces, begin, end = await hold(engine, ask, batch, length, seconds)
    rate = rate_of(pieces, begin, end, completion_tokens=length, batch=batch)
    if rate is None:
        raise EngineError(f"nothing was decoded within {seconds:g} s; raise --seconds")
    return rate


def _fitting(wish: Wish) -> Config:
    """Slots and context as large as is measured, and no larger: an engine lays out its cache for them."""
    config, longest = wish.config, wish.prompt_tokens + max(wish.lengths)
    producer = config.producer.model_copy(update={"slots": max(wish.batches)})
    model = config.model.model_copy(update={"context_length": longest})
    return config.model_copy(update={"producer": producer, "model": model})


def _check_room(wish: Wish, engine: Engine) -> None:
    """Raises ConfigError."""
    most, longest = max(wish.batches), wish.prompt_tokens + max(wish.lengths)
    if engine.slots < most:
        raise ConfigError(f"--batch {most}: the engine computes {engine.slots} requests at once; lower it")
    if engine.context_length < longest:
        raise ConfigError(
            f"--prompt {wish.prompt_tokens} and --length {max(wish.lengths)}: together they may have "
            f"{engine.context_length} tokens on this engine; lower one"
        )


def _asking(wish: Wish, chat: Chat) -> Ask:
    """Requests whose prompts have the same tokens in another order each: no cache of prefixes helps."""
    sampling = wish.config.sampling
    random = np.random.default_rng(wish.config.run.seed)
    digits = " ".join(random.choice(list("0123456789"), size=wish.prompt_tokens))
    # The end of it: what stands before is the template's, and always the same.
    tokens_P: Int32 = chat.prompt([Message("user", digits)])[-wish.prompt_tokens :]
    numbers = itertools.count()

    def ask(length: int) -> Request:
        params = SamplingParams(length, sampling.temperature, sampling.top_p, sampling.top_k)
        return Request(f"portability-{next(numbers)}", random.permutation(tokens_P), params)

    return ask


def _printable(traits: Traits) -> Traits:
    """What a server says of itself ends on terminals."""

    def said(trait: Trait) -> Trait:
        return Trait(trait.has, printable(trait.what))

    return msgspec.structs.replace(
        traits,
        device=printable(traits.device),
        software=printable(traits.software),
        native_backend=said(traits.native_backend),
        attention_kernel=said(traits.attention_kernel),
        paged_cache=said(traits.paged_cache),
    )
