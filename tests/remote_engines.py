"""What tests of engines over servers share: what is asked, what is loaded, and what the model itself says of tokens."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest
import torch

from broker.messages import Float32
from headrace.policy.loading import layout_of
from headrace.version import PolicyVersion
from producers.engines.api import Completion, Engine, Request, SamplingParams
from producers.engines.remote.staged import Staged
from tests.launches import Launches
from tests.support import wait_here
from weightsync.manifest import Layout

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

ROOT = Path(__file__).parents[1]
FIRST, SECOND = PolicyVersion(1, 0), PolicyVersion(1, 1)
PROMPT = tuple(range(10, 40))
GROUPS = 2
"""Of each step."""
PATIENCE_S = 800.0
"""For a whole run."""


def server_python(kind: str) -> str:
    """The interpreter that has that kind of server. Skips the test where there is none; fails it where all servers must
    be there."""
    venv = ROOT / ".servers" / kind
    if not (venv / ".ready").exists():
        reason = f"no {kind} in {venv}: run .ci/{kind}"
        if os.environ.get("HEADRACE_TEST_ALL_SERVERS") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return str(venv / "bin" / "python")


def ask(name: str, prompt: tuple[int, ...] = PROMPT, **sampling: object) -> Request:
    params = SamplingParams(**{"max_new_tokens": 12, **sampling})  # type: ignore[arg-type]
    return Request(name, np.array(prompt, np.int32), params)


def letters(token_ids: list[int]) -> str:
    """As the tiny model's tokenizer, for letters of ASCII."""
    return "".join(chr(token) for token in token_ids)


def spans_of(done: Completion) -> list[tuple[Any, ...]]:
    return [tuple(span) for span in done.spans]


def fill(buffer: np.ndarray, layout: Layout, model: LlamaForCausalLM) -> None:
    """A model's weights, in the layout's dtypes."""
    named = dict(model.named_parameters())
    for spec in layout.tensors:
        wire = named[spec.name].detach().to(getattr(torch, spec.dtype))
        buffer[spec.offset : spec.end] = wire.contiguous().reshape(-1).view(torch.uint8).numpy()


def stage(engine: Engine, model: LlamaForCausalLM) -> None:
    """Put a model's weights, in float32, where the engine takes its next version from."""
    layout = Layout.of(layout_of(model, "float32"))
    fill(engine.back_buffer(layout), layout, model)


@contextmanager
def sealed(model: LlamaForCausalLM, folder: Path, version: PolicyVersion = FIRST) -> Iterator[Staged]:
    """The same as a folder, ready to be loaded. `folder` has the model's other files."""
    layout = Layout.of(layout_of(model, "float32"))
    staged = Staged(layout, folder, "tests")
    try:
        fill(staged.buffer, layout, model)
        staged.seal(version)
        yield staged
    finally:
        staged.close()


def scored(model: LlamaForCausalLM, prompt: Sequence[int], tokens: Sequence[int], temperature: float = 1.0) -> Float32:
    """Log-prob of each of N tokens behind a prompt, by one forward pass."""
    with torch.no_grad():
        logits_TV = model(torch.tensor([[*prompt, *tokens]])).logits[0].float() / temperature
    logprobs_NV = torch.log_softmax(logits_TV[len(prompt) - 1 : -1], -1)
    found: Float32 = logprobs_NV[torch.arange(len(tokens)), torch.tensor(tokens)].numpy()
    return found


def replayed(models: Sequence[LlamaForCausalLM], prompt: Sequence[int], tokens: Sequence[int]) -> Float32:
    """Log-prob of each of N tokens by a decoder that keeps its keys and values, and has another model for each."""
    cache, rows = None, list(prompt)
    found = []
    for model, token in zip(models, tokens, strict=True):
        with torch.no_grad():
            out = model(torch.tensor([rows]), past_key_values=cache, use_cache=True)
        cache, rows = out.past_key_values, [token]
        found.append(float(torch.log_softmax(out.logits[0, -1].float(), -1)[token]))
    return np.array(found, np.float32)


def apart(done: Completion, model: LlamaForCausalLM, prompt: Sequence[int] = PROMPT, temperature: float = 1.0) -> float:
    """The most that a log-prob is off what the model has for it."""
    return float(np.abs(done.logprobs_N - scored(model, prompt, done.token_ids_N.tolist(), temperature)).max())


@contextmanager
def launching(folder: Path) -> Iterator[Launches]:
    """Whole runs, of which nothing is left at the end."""
    made = Launches(folder)
    try:
        yield made
    finally:
        made.close()


def trained(launched: Launches, config: str, steps: int, server: str = "") -> None:
    """A whole run makes its steps with the log-probs that a server gave, and leaves nothing behind.

    `server`: a word in the command of a server that the run starts.
    """
    file = launched.folder / "run.toml"
    file.write_text(config)
    process = launched.up("--config", str(file))
    if server:
        # Else it would not be missed at the end.
        wait_here(lambda: runs(launched, server), "it is there", PATIENCE_S)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (err, process.returncode) == ("", 0), out
    assert launched.steps() == list(range(1, steps + 1))
    lines = [json.loads(line) for line in (launched.run / "steps.jsonl").read_text().splitlines()]
    # The server's log-probs and the trainer's are of the same weights: hardly a ratio leaves the clip range.
    assert max(line["clipped"] for line in lines) < 0.05
    # The first step's rollouts are of the very weights that it starts from.
    assert lines[0]["mismatch"] < 1e-4
    assert launched.summary()["balance"]["train"]["verdicts"]["trained"] == GROUPS * steps
    wait_here(lambda: launched.processes() == [], "the server went with its producer")
    assert launched.segments == []


def runs(launched: Launches, word: str) -> bool:
    """Whether a process with that word in its command does."""
    for process in launched.processes():
        with suppress(psutil.NoSuchProcess):
            if word in process.cmdline():
                return True
    return False


def run_config(model: Path, engine: str, steps: int, max_lag: int, options: str) -> str:
    """Of a short run in float32, so that the server's log-probs and the trainer's are the same. `options`: lines of the
    engine's."""
    return f"""
[run]
steps = {steps}
[model]
path = "{model}"
dtype = "float32"
wire_dtype = "float32"
device = "cpu"
context_length = 160
[[environments]]
name = "arithmetic"
[sampling]
max_new_tokens = 48
temperature = 0.8
[producer]
engine = "{engine}"
slots = 16
[producer.engine_options]
{options}
[trainer]
groups_per_step = {GROUPS}
group_size = 4
learning_rate = 1e-4
autocast = "off"  # else it is measured, and the trainer's own log-probs may be those of bfloat16
[staleness]
max_lag = {max_lag}
"""
