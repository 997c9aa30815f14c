"""`headrace env check`: each fault is found, and told in a sentence with the way out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import deploy.env_check as env_check
from deploy.env_check import Report, check
from deploy.env_check_visits import Visitor
from headrace.config import Config
from producers.chat import ByteChat, Chat, TemplateChat
from tests import checked
from tests.tiny import save_tiny_llama


class Heard:
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.findings: list[tuple[str, str]] = []
        self.known: dict[str, Any] = {}

    def at(self, what: str, limit_s: float) -> None:
        self.calls.append(what)

    def found(self, level: str, sentence: str) -> None:
        if (level, sentence) not in self.findings:
            self.findings.append((level, sentence))

    def facts(self, **facts: Any) -> None:
        self.known.update(facts)


async def visited(environment: checked.Fine, chat: Chat | None = None, **entry: Any) -> Heard:
    config = Config.model_validate(
        {
            "environments": [{"name": "it", **entry}],
            "producer": {"reward_deadline_s": 0.5},
            "model": {"context_length": 512},
        }
    )
    heard = Heard()
    visitor = Visitor(heard, config, config.environments[0], environment, chat or ByteChat())  # type: ignore[arg-type]
    await visitor.visit_all(len(environment), environment.eval_size())
    return heard


async def test_nothing_is_wrong_with_one_that_is_fine() -> None:
    heard = await visited(checked.Fine())
    assert heard.findings == []
    assert heard.known["first prompt"] == "Say train 0."
    assert (heard.known["rewards seen"], heard.known["turns"]) == ("0, 1", "1")
    game = await visited(checked.Game())
    assert game.findings == []
    assert (game.known["rewards seen"], game.known["turns"]) == ("1", "3")


@pytest.mark.parametrize(
    ("kind", "level", "sentence"),
    [
        (
            checked.Unending,
            "error",
            "has not ended after 64 turns, and would go on until the context is full; let `step`",
        ),
        (checked.Fickle, "warning", "train prompt 0 is another one when it is made again with the same seed"),
        (checked.Overlapping, "error", "3 held-out prompts are training prompts, too (eval 0 is train 0)"),
        (checked.WrongReset, "error", "reset of train prompt 0: environment gave str where an Observation belongs"),
        (checked.WrongStep, "error", "step of train prompt 0: environment gave float where an Observation belongs"),
        (checked.NoClose, "error", "its episodes (object) have no reset, step, close, answer; give them these"),
        (checked.RaisingClose, "error", "close of train prompt 0: environment raised OSError: the container is gone"),
        (checked.Waiting, "error", "reset of train prompt 0: environment took longer than 0.5 s; answer sooner, or"),
        (checked.Blocking, "error", "reset blocks the event loop for 0.15 s at each call"),
        (checked.Unpicklable, "error", "the answer of train prompt 0 cannot be pickled"),
        (checked.NotANumber, "error", "score of train prompt 0: reward is nan, not a finite number"),
        (checked.Text, "error", "score of train prompt 0: reward returned str, not a number"),
        (checked.Random, "warning", "for the same rollout; what is learned from such a reward is its noise"),
        (checked.NoVerdict, "warning", "correct of train prompt 0 gave str; return True or False"),
        (checked.Long, "error", "leave no room for an answer in model.context_length = 512; raise that, or"),
        (checked.Tight, "warning", "of sampling.max_new_tokens = 64 in model.context_length = 512"),
        (checked.Huge, "error", "train prompt 0 has 1000000 letters, which leave no room for an answer"),
    ],
)
async def test_a_fault_is_told_in_a_sentence(kind: type[checked.Fine], level: str, sentence: str) -> None:
    heard = await visited(kind())
    matching = [one for one in heard.findings if sentence in one[1]]
    assert matching, heard.findings
    assert {one[0] for one in matching} == {level}
    assert all("\n" not in one[1] for one in heard.findings)
    if level == "warning":
        assert {one[0] for one in heard.findings} == {"warning"}, heard.findings


async def test_what_an_episode_gave_is_seen_by_its_verdict() -> None:
    assert (await visited(checked.Given())).findings == []


async def test_an_episode_that_the_run_ends_need_not_end_itself() -> None:
    assert (await visited(checked.Unending(), max_turns=4)).findings == []


async def test_the_models_template_is_asked_too(tmp_path: Path) -> None:
    """That of the tiny model round-trips; one that drops what came before does not."""
    folder = save_tiny_llama(tmp_path / "model")
    assert (await visited(checked.Game(), TemplateChat.load(folder))).findings == []
    chat = TemplateChat.load(folder)
    chat._tokenizer.chat_template = "{% for m in messages %}{{ m.role + ': ' + m.content.replace('<think>', '') + '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"  # noqa: E501
    ((level, sentence),) = (await visited(checked.Game(), chat)).findings
    assert level == "warning"
    assert sentence.startswith("the model's chat template does not round-trip: after an answer that thinks first")
    chat._tokenizer.chat_template = "{{ raise_exception('only system') }}"
    heard = await visited(checked.Fine(), chat)
    assert all("the chat template does not take messages of user" in sentence for _, sentence in heard.findings)


def asked(name: str, deadline_s: float = 20.0) -> Report:
    config = Config.model_validate(
        {"environments": [{"name": name, "label": "it"}], "producer": {"reward_deadline_s": deadline_s}}
    )
    return check(config, "it", "")


def test_all_of_it_goes_on_in_a_process_of_its_own() -> None:
    report = asked("tests.checked:Game")
    assert (report.findings, report.fine) == ([], True)
    assert report.facts["prompts"] == "5 to train on, 3 held out"
    assert json.dumps(env_check.as_json(report))


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("no.such:thing", "does not import"),
        ("tests.checked:Nothing", "has no object 'Nothing'"),
        ("tests.checked:_count", "is count, not a function"),
        ("builtins:object", "is not an environment: it has no __len__, eval_size, episode, score, correct"),
        ("tests.checked:Empty", "it has no training prompts (__len__ is 0)"),
        ("tests.checked:Killing", "its process was killed by SIGKILL where episode of train prompt 0"),
        ("tests.checked:Scribbling", "its process exited with 3 where episode of train prompt 0"),
        ("tests.checked:ScoredElsewhere", "against the scripted engine failed: reward raised FileNotFoundError"),
    ],
)
def test_what_is_found_there(name: str, sentence: str) -> None:
    report = asked(name)
    assert not report.fine
    assert any(sentence in finding.sentence for finding in report.findings), report.findings


def test_one_that_stands_still_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env_check, "GRACE_S", 1.0)
    report = asked("tests.checked:Standing", deadline_s=1.0)
    (finding,) = report.findings
    assert finding.sentence.startswith(
        "episode of train prompt 0 has blocked everything for 2 s, and a producer with it"
    )
