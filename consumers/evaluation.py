"""Evaluation: how right one version of the policy is on held-out prompts. Pure; `consumers/evaluations.py` asks.

A result is of exactly one version: a rollout of which a token is another version's, or that was begun on another one's
keys and values, is refused. What every prompt answered is written down before its task is settled, so that a trainer
that takes over asks only what is missing, and counts nothing twice.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from broker.messages import Group, Verdict
from headrace.errors import CheckpointError
from headrace.version import PolicyVersion

JOURNAL = "evaluations.jsonl"
"""In the run's folder: what was begun, what each prompt answered, and the results."""
MOST_EXAMPLES = 6
"""Completions that are kept with their text."""
MOST_ASKED = 4
"""So often a prompt is asked at most, until it has an answer."""

Decode = Callable[[npt.NDArray[np.int32]], str]
"""Token ids to text."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Held-out prompt `index` of an environment, asked for the `again`th time after the first."""

    environment: str
    index: int
    again: int = 0


@dataclass(frozen=True, slots=True)
class Example:
    """The first rollout of one prompt of the first environment."""

    index: int
    prompt: str
    completion: str
    reward: float


@dataclass(frozen=True, slots=True)
class Answer:
    """What one prompt answered."""

    environment: str
    index: int
    right: int
    samples: int
    """Rollouts that were played to their end."""
    example: Example | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """What one evaluation, or one environment of it, has found."""

    samples: int
    accuracy: float
    """Share of right rollouts; 0 without samples."""
    failed: int
    """Prompts without a sample."""
    pass_at: dict[str, float]
    """k to pass@k, the mean over prompts with at least k samples."""
    examples: tuple[Example, ...] = ()
    environments: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The same by environment, where there are several."""


@dataclass(frozen=True, slots=True)
class Judged:
    """What becomes of a group."""

    verdict: Verdict
    reason: str = ""
    answer: Answer | None = None
    again: Prompt | None = None
    """To be asked instead, before this one is settled."""


UNKNOWN = Judged("superseded", "it belongs to no evaluation that goes on")


class Evaluation:
    """One evaluation of one version, until each of its prompts has answered or was asked in vain."""

    def __init__(
        self, when: str, version: PolicyVersion, prompts: Mapping[str, int], samples: int, *, pinned: bool
    ) -> None:
        """`when` is "before", "step" or "after"; `prompts` says how many each environment is asked, each `samples`
        times. `pinned`: the version is kept in memory for this alone."""
        self.when, self.version, self.samples, self.pinned = when, version, samples, pinned
        self.prompts = dict(prompts)
        self._open = {(environment, index): 0 for environment, count in prompts.items() for index in range(count)}
        """How often each prompt without an answer has been asked again."""
        self._answers: dict[tuple[str, int], Answer] = {}

    @property
    def missing(self) -> int:
        """Prompts that have not answered yet."""
        return len(self._open)

    @property
    def total(self) -> int:
        return len(self._open) + len(self._answers)

    def asks(self) -> list[Prompt]:
        """What is to be asked, or has been and did not answer."""
        return [Prompt(environment, index, again) for (environment, index), again in self._open.items()]

    def task_id(self, prompt: Prompt) -> str:
        place = list(self.prompts).index(prompt.environment)
        return f"eval-{self.version}-{place}-{prompt.index:06d}" + (f".{prompt.again}" if prompt.again else "")

    def judge(self, group: Group, decode: Decode) -> Judged:
        """What becomes of a group, or of what stands for one; nothing is entered by that."""
        key = group.environment, group.index
        prompt = self._prompt_of(group.task_id)
        if prompt is None:
            return UNKNOWN
        if (prompt.environment, prompt.index) not in self._open:
            return Judged("evaluated")
        if fault := self._fault(group, prompt):
            verdict: Verdict = "filtered" if group.outcome == "played" and group.trajectories else "failed"
            if prompt.again < self._open[prompt.environment, prompt.index]:
                return Judged(verdict, fault)
            if prompt.again + 1 < MOST_ASKED:
                return Judged(verdict, fault, again=Prompt(prompt.environment, prompt.index, prompt.again + 1))
            return Judged(verdict, fault, Answer(prompt.environment, prompt.index, 0, 0))
        right = sum(trajectory.reward > 0 for trajectory in group.trajectories)
        example = self._example(group, decode)
        return Judged("evaluated", answer=Answer(*key, right, len(group.trajectories), example))

    def enter(self, answer: Answer) -> None:
        """A second answer of a prompt changes nothing."""
        if self._open.pop((answer.environment, answer.index), None) is not None:
            self._answers[answer.environment, answer.index] = answer

    def ask_again(self, prompt: Prompt) -> None:
        key = prompt.environment, prompt.index
        if key in self._open:
            self._open[key] = max(self._open[key], prompt.again)

    def result(self) -> Result:
        answers = [self._answers[key] for key in sorted(self._answers, key=self._place)]
        several = len(self.prompts) > 1
        return result_of(
            answers, {name: [a for a in answers if a.environment == name] for name in self.prompts if several}
        )

    def _place(self, key: tuple[str, int]) -> tuple[int, int]:
        return list(self.prompts).index(key[0]), key[1]

    def _prompt_of(self, task_id: str) -> Prompt | None:
        """The inverse of `task_id`; None for a task of another evaluation."""
        name, _, again = task_id.partition(".")[2].partition("-")[2].partition(".")
        place, _, index = name.partition("-")
        if not (place.isdecimal() and index.isdecimal() and int(place) < len(self.prompts)):
            return None
        prompt = Prompt(list(self.prompts)[int(place)], int(index), int(again) if again.isdecimal() else 0)
        known = prompt.index < self.prompts[prompt.environment]
        return prompt if known and self.task_id(prompt) == task_id else None

    def _fault(self, group: Group, prompt: Prompt) -> str:
        """Why a group is no answer; empty for one that is."""
        if group.outcome != "played" or not group.trajectories:
            return (group.error or "the group is empty")[:200]
        if (group.environment, group.index) != (prompt.environment, prompt.index):
            return "it answers another prompt"
        if not all(math.isfinite(trajectory.reward) for trajectory in group.trajectories):
            return "a reward is not finite"
        return mixture(group, self.version)

    def _example(self, group: Group, decode: Decode) -> Example | None:
        """Of the smallest indices, so that two evaluations show the same prompts."""
        if group.index >= MOST_EXAMPLES or group.environment != next(iter(self.prompts)):
            return None
        trajectory = group.trajectories[0]
        first = int(np.argmax(trajectory.loss_mask_T))
        shown = decode(trajectory.token_ids_T[:first]).strip(), decode(trajectory.token_ids_T[first:]).strip()
        return Example(group.index, *shown, trajectory.reward)


def mixture(group: Group, version: PolicyVersion) -> str:
    """Why its tokens are not those of `version` alone; empty when they are."""
    spans = [span for trajectory in group.trajectories for span in trajectory.spans]
    if any(span.version != version for span in spans):
        return "it was not sampled on one version alone"
    if any(span.kv == "kept" for span in spans):
        return "it has keys and values of another version"
    return ""


def pass_at_k(samples: int, right: int, k: int) -> float:
    """The probability that one of k samples is right, where `right` of `samples` were: 1 - C(n-c, k) / C(n, k).

    Unbiased, unlike 1 - (1 - c/n)^k: Chen et al., "Evaluating Large Language Models Trained on Code", 2021
    (https://arxiv.org/abs/2107.03374), equation 1. As there, a product of ratios, which never overflows. k is from 1 to
    `samples`; raises ValueError for any other.
    """
    if not 1 <= k <= samples or not 0 <= right <= samples:
        raise ValueError(f"pass@{k} of {right} right ones in {samples} samples is nothing")
    if samples - right < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / n for n in range(samples - right + 1, samples + 1))


def ks_of(samples: int) -> list[int]:
    """The powers of two up to `samples`, and `samples` itself."""
    return sorted({1 << n for n in range(samples.bit_length())} | {samples}) if samples else []


def result_of(answers: Sequence[Answer], environments: Mapping[str, Sequence[Answer]] | None = None) -> Result:
    """What these answers amount to, and those of each environment."""
    samples = sum(answer.samples for answer in answers)
    most = max((answer.samples for answer in answers), default=0)
    pass_at = {}
    for k in ks_of(most):
        rates = [pass_at_k(answer.samples, answer.right, k) for answer in answers if answer.samples >= k]
        pass_at[str(k)] = round(sum(rates) / len(rates), 6)
    by_name = {name: asdict(result_of(theirs)) for name, theirs in (environments or {}).items()}
    for row in by_name.values():
        del row["examples"], row["environments"]
    return Result(
        samples=samples,
        accuracy=sum(answer.right for answer in answers) / samples if samples else 0.0,
        failed=sum(not answer.samples for answer in answers),
        pass_at=pass_at,
        examples=tuple(answer.example for answer in answers if answer.example is not None)[:MOST_EXAMPLES],
        environments=by_name,
    )


def paired(before: Result | None, after: Result | None) -> list[dict[str, Any]]:
    """Prompt, and what was answered before and after, for prompts that either evaluation kept."""
    rows: dict[int, dict[str, Any]] = {}
    for when, result in (("before", before), ("after", after)):
        for example in result.examples if result else ():
            row = rows.setdefault(example.index, {"prompt": example.prompt})
            row[when] = example.completion
            row[f"reward_{when}"] = example.reward
    return [rows[index] for index in sorted(rows)]


@dataclass(frozen=True, slots=True)
class Done:
    """An evaluation that is over: its result, without the answers."""

    when: str
    version: PolicyVersion
    prompts: dict[str, int]
    result: Result

    @classmethod
    def of(cls, evaluation: Evaluation) -> Done:
        return cls(evaluation.when, evaluation.version, evaluation.prompts, evaluation.result())

    def shown(self) -> dict[str, Any]:
        """As heartbeats, lines and summaries say it."""
        result = self.result
        return {
            "when": self.when,
            "version": str(self.version),
            "step": self.version.step,
            "prompts": self.prompts,
            "accuracy": round(result.accuracy, 6),
            "samples": result.samples,
            "failed": result.failed,
            "pass_at": result.pass_at,
            "environments": result.environments,
        }


@dataclass(slots=True)
class Kept:
    """What the journal says."""

    done: list[Done] = field(default_factory=list)
    going: Evaluation | None = None
    """The one that has no result yet."""


def kept_in(folder: Path) -> Kept:
    """What earlier trainers of the run have written. Raises CheckpointError for what cannot be read."""
    file, kept = folder / JOURNAL, Kept()
    try:
        for line in file.read_text(encoding="utf-8").splitlines():
            _follow(kept, json.loads(line))
    except FileNotFoundError:
        return kept
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}; remove it to evaluate again") from error
    return kept


def _follow(kept: Kept, line: Mapping[str, Any]) -> None:
    """One line of the journal."""
    event, going = line["event"], kept.going
    if event == "begin":
        version = PolicyVersion.parse(line["version"])
        kept.going = Evaluation(line["when"], version, line["prompts"], line["samples"], pinned=line["pinned"])
    elif going is None or line["version"] != str(going.version):
        return
    elif event == "again":
        going.ask_again(Prompt(line["environment"], line["index"], line["again"]))
    elif event == "answer":
        example = line.get("example")
        fields = (line["environment"], line["index"], line["right"], line["answered"])
        going.enter(Answer(*fields, Example(**example) if example else None))
    elif event == "given_up":
        kept.going = None
    elif event == "result":
        kept.done.append(Done.of(going))
        kept.going = None


def results_in(lines: Iterable[str]) -> list[dict[str, Any]]:
    """The results in a journal's lines, as `Done.shown` made them; what is no result, or is torn, is left out."""
    found = []
    for text in lines:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and line.get("event") == "result":
            found.append({name: value for name, value in line.items() if name not in ("event", "time")})
    return found
