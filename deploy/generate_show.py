"""One sample of `headrace generate`: its transcript for a person, and as one JSON object for a machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from broker.messages import Int32, Trajectory, VersionSpan
from deploy.printable import printable
from headrace.words import counted


@dataclass(frozen=True, slots=True)
class Part:
    """What was shown to the model at once, or one completion of it."""

    sampled: bool
    text: str
    tokens: int
    spans: tuple[VersionSpan, ...] = ()
    """Counted from its own first token."""
    logprob: float | None = None
    """The mean of its tokens'."""
    reward: float = 0.0
    """What the environment gave for this turn alone."""


@dataclass(frozen=True, slots=True)
class Shown:
    """One member of a task that was played."""

    environment: str
    split: str
    index: int
    member: int
    samples: int
    parts: tuple[Part, ...]
    reward: float | None
    """None where nothing was scored."""
    correct: bool | None
    finish_reason: str
    failure: str = ""
    """Why there is no sample; `parts` are as far as it came."""
    seconds: float = 0.0
    """In a slot of the engine."""
    summands: Mapping[str, float] = field(default_factory=dict)
    """Of a reward that is a weighted sum: what each part of it gave, by its name, before it was weighted."""

    @property
    def sampled_tokens(self) -> int:
        return sum(part.tokens for part in self.parts if part.sampled)


def parts_of(trajectory: Trajectory, text: Callable[[Int32], str], rewards: tuple[float, ...] = ()) -> tuple[Part, ...]:
    """The runs of tokens that were shown or sampled, in order; `rewards` are those of the turns."""
    mask_T, parts, turn = trajectory.loss_mask_T, [], 0
    ends = [*(np.flatnonzero(mask_T[1:] != mask_T[:-1]) + 1).tolist(), len(mask_T)]
    start = 0
    for end in ends if len(mask_T) else ():
        tokens, sampled = trajectory.token_ids_T[start:end], bool(mask_T[start])
        spans = tuple(
            span._replace(start=max(span.start, start) - start, end=min(span.end, end) - start)
            for span in trajectory.spans
            if span.start < end and start < span.end
        )
        mean = float(trajectory.logprobs_T[start:end].mean()) if sampled else None
        reward = rewards[turn] if sampled and turn < len(rewards) else 0.0
        parts.append(Part(sampled, text(tokens), end - start, spans, mean, reward))
        turn += sampled
        start = end
    return tuple(parts)


def line_of(sample: Shown) -> dict[str, Any]:
    """As JSON."""
    return {
        "environment": sample.environment,
        "split": sample.split,
        "index": sample.index,
        "member": sample.member,
        "reward": sample.reward,
        "summands": dict(sample.summands),
        "correct": sample.correct,
        "finish_reason": sample.finish_reason,
        "failure": sample.failure,
        "tokens": sum(part.tokens for part in sample.parts),
        "sampled_tokens": sample.sampled_tokens,
        "seconds": round(sample.seconds, 4),
        "parts": [_part(part) for part in sample.parts],
    }


def _part(part: Part) -> dict[str, Any]:
    if not part.sampled:
        return {"kind": "shown", "text": part.text, "tokens": part.tokens}
    spans = [{"start": span.start, "end": span.end, "version": str(span.version), "kv": span.kv} for span in part.spans]
    return {
        "kind": "sampled",
        "text": part.text,
        "tokens": part.tokens,
        "reward": part.reward,
        "logprob": part.logprob,
        "versions": spans,
    }


def show(sample: Shown) -> None:
    """On standard output."""
    console = Console(soft_wrap=True, highlight=False)
    console.print(Text(printable(_head(sample)), style="red" if sample.failure else "bold"))
    for part in sample.parts:
        lines = [printable(line) for line in part.text.split("\n")]
        console.print(Text("\n".join(f"  │ {line}" for line in lines), style="cyan" if part.sampled else "dim"))
        if part.sampled:
            console.print(Text(f"  ╰ {_foot(part)}", style="dim"))
    if sample.failure:
        console.print(Text(f"  failed: {printable(sample.failure)}", style="red"))
    console.print()


def _head(sample: Shown) -> str:
    place = f"{sample.environment}, {sample.split} prompt {sample.index}" if sample.environment else "your prompt"
    said = [f"{place}, sample {sample.member + 1} of {sample.samples}"]
    if sample.failure:
        return said[0]
    if sample.reward is not None:
        summands = ", ".join(f"{name} {value:.3g}" for name, value in sample.summands.items())
        said.append(f"reward {sample.reward:.3g}{summands and f' ({summands})'}")
    if sample.correct is not None:
        said.append("right" if sample.correct else "wrong")
    return ": ".join([said[0], ", ".join([*said[1:], f"ended by {sample.finish_reason}"])])


def _foot(part: Part) -> str:
    versions = ", ".join(f"{span.version}" + (" (kv kept)" if span.kv == "kept" else "") for span in part.spans)
    reward = f", turn's reward {part.reward:.3g}" if part.reward else ""
    return f"{counted(part.tokens, 'token')} of version {versions}, log-prob {part.logprob:.2f} each{reward}"
