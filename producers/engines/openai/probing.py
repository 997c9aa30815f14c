"""Whether a completion server gives what is needed: asked at start, with a few tokens. Nothing is believed by name.

A log-prob must be that of the distribution that its token was sampled from. vLLM tells by default those of temperature
1 before top-k and top-p ("raw"); whether a server tells others is seen from its answers: under a temperature T the
difference between two tokens' log-probs is a T-th of what it is at 1, and with one token left its log-prob is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headrace.errors import EngineError
from producers.engines.api import SamplingParams
from producers.engines.openai.answers import Choice, Models
from producers.engines.openai.asking import PLAIN
from producers.engines.openai.client import CompletionsClient
from producers.engines.remote.http import ServerRefused

PROBE_S = 300.0
"""The first request may compile kernels."""
PROMPTS = ((1, 2, 3), (5, 4), (9, 8, 7))
"""Tokens that every vocabulary has. At the first one where the model is not all but certain, it is compared."""
UNSURE = -0.01
TEMPERATURE = 0.25
CERTAIN = 1e-3
COLDEST = 0.01
"""vLLM samples at this what is colder, but for 0."""
_PROCESSED = "start vLLM with --logprobs-mode processed_logprobs"


MOST_STOPS = 4
"""Of OpenAI's interface, which vLLM keeps to."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a server was seen to give."""

    model: str
    context_length: int | None
    """None where it does not say."""
    tempered: bool
    """Its log-probs are those at the temperature."""
    filtered: bool
    """They are those after top-k and top-p."""

    def fault(self, sampling: SamplingParams) -> str | None:
        """Why it cannot sample with these values and tell their log-probs, or None."""
        temperature = sampling.temperature
        if len(sampling.stop) > MOST_STOPS:
            return f"{len(sampling.stop)} stop strings: the interface takes {MOST_STOPS}; shorten sampling.stop"
        if 0 < temperature < COLDEST:
            return f"temperature {temperature:g}: a server would sample at {COLDEST}; set it to 0, or to that or more"
        if temperature == 0:
            return None
        if temperature != 1 and not self.tempered:
            return (
                f"temperature {temperature:g}: the server tells log-probs of temperature 1, not of the distribution "
                f"that it samples from; {_PROCESSED}, or set sampling.temperature = 1"
            )
        if (sampling.top_k > 0 or sampling.top_p < 1) and not self.filtered:
            return (
                f"top_k {sampling.top_k}, top_p {sampling.top_p:g}: the server tells log-probs before top-k and top-p, "
                f"or does not know them; {_PROCESSED}, or set sampling.top_k = 0 and sampling.top_p = 1"
            )
        return None


async def probe(client: CompletionsClient, model: str, *, salted: bool) -> Found:
    """Raises EngineError with all that is missing, and the way out of each; or what the client raises."""
    card_model, context = chosen(await client.models(timeout_s=PROBE_S), model, client.url)
    asking = _Asking(client, card_model, salted=salted)
    missing = await _missing(asking)
    if missing:
        raise EngineError(f"{client.url} ({card_model}) cannot be used: {'; '.join(missing)}")
    tempered, filtered = await _modes(asking)
    return Found(card_model, context, tempered, filtered)


def chosen(models: Models, model: str, url: str) -> tuple[str, int | None]:
    """Name and context length of the model to ask for. Raises EngineError."""
    names = [one.id for one in models.data]
    if not model and len(names) != 1:
        raise EngineError(
            f"{url} serves {len(names)} models ({', '.join(names)}); name one: producer.engine_options.model"
        )
    for one in models.data:
        if one.id == (model or names[0]):
            return one.id, one.max_model_len
    raise EngineError(f"producer.engine_options.model = {model!r}: {url} serves {', '.join(names) or 'none'}")


class _Asking:
    def __init__(self, client: CompletionsClient, model: str, *, salted: bool) -> None:
        self._client, self._model, self._salted = client, model, salted

    async def ask(self, prompt: Sequence[int], **changes: Any) -> Choice:
        body = {**PLAIN, "model": self._model, "prompt": list(prompt), "max_tokens": 1}
        body |= {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "stop": [], "stop_token_ids": []}
        if self._salted:
            body["cache_salt"] = "headrace-probe"
        return (await self._client.complete({**body, **changes}, timeout_s=PROBE_S)).choice


async def _missing(asking: _Asking) -> list[str]:
    """One sentence for each thing that is."""
    prompt = PROMPTS[0]
    try:
        got = await asking.ask(prompt, temperature=0.0, max_tokens=2)
    except ServerRefused as error:
        return [
            f"it refuses a prompt of token ids, or what is asked beside it ({error}); use a server whose "
            "/v1/completions takes what vLLM's takes"
        ]
    ids = got.ids()
    missing = []
    if ids is None:
        missing.append(
            "it returns no token ids; use vLLM 0.10.2 or newer, or start it with --return-tokens-as-token-ids"
        )
    logprobs = got.logprobs.token_logprobs if got.logprobs is not None else []
    if not logprobs or (ids is not None and len(logprobs) != len(ids)) or None in logprobs:
        missing.append("it returns no log-prob for each sampled token; start vLLM without --max-logprobs 0")
    if got.prompt_token_ids is not None and got.prompt_token_ids != list(prompt):
        missing.append(f"it computes other prompt tokens ({got.prompt_token_ids}) than were sent ({list(prompt)})")
    if ids:
        missing += await _no_stop(asking, prompt, ids[0])
    return missing


async def _no_stop(asking: _Asking, prompt: Sequence[int], token: int) -> list[str]:
    """It must end with, and name, the first stop token."""
    got = await asking.ask(prompt, temperature=0.0, max_tokens=4, stop_token_ids=[token])
    if got.ids() == [token] and got.finish_reason == "stop":
        return []
    return ["it does not end with the first of stop_token_ids; use a server that knows them, as vLLM does"]


async def _modes(asking: _Asking) -> tuple[bool, bool]:
    """Whether log-probs are those at the temperature, and after top-k and top-p. What cannot be seen is no."""
    for prompt in PROMPTS:
        plain = await asking.ask(prompt, temperature=0.0, logprobs=2)
        if _logprob(plain) < UNSURE:
            break
    else:
        return False, False
    tempered = _tempered(plain, await asking.ask(prompt, temperature=TEMPERATURE, logprobs=2))
    one = await asking.ask(prompt, top_k=1)
    nucleus = await asking.ask(prompt, top_p=1e-6)
    return tempered, min(_logprob(one), _logprob(nucleus)) > -CERTAIN


def _tempered(plain: Choice, at_temperature: Choice) -> bool:
    """By the difference between the two likeliest tokens."""
    before, now = _lead(plain), _lead(at_temperature)
    if before is None or now is None or before <= 0:
        return False
    return abs(now - before / TEMPERATURE) < abs(now - before)


def _lead(choice: Choice) -> float | None:
    tops = choice.logprobs.top_logprobs if choice.logprobs is not None else None
    if not tops or not tops[0] or len(tops[0]) < 2:
        return None
    first, second = sorted(tops[0].values())[:-3:-1]
    return first - second


def _logprob(choice: Choice) -> float:
    """Of the first sampled token."""
    found = choice.logprobs.token_logprobs[0] if choice.logprobs is not None else None
    return 0.0 if found is None else found
