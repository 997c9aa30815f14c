"""What a run shows: step lines, the panel, the report at the end, and how rollouts read."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from broker.messages import Group, Trajectory, VersionSpan
from deploy.progress import Follower, newest_step, step_line
from deploy.report import balance_line, last_part, print_report, without_shared_lines
from deploy.rollouts import Decoder, Shown, rollouts_of, show
from deploy.screen import PartView, RunView, Screen, panel
from headrace.errors import ServiceError
from headrace.version import PolicyVersion


def console(*, terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), width=120, force_terminal=terminal, highlight=False, soft_wrap=True)


def text_of(target: Console) -> str:
    assert isinstance(target.file, io.StringIO)
    return target.file.getvalue()


def test_a_step_is_one_line() -> None:
    fields = {
        "step": 7,
        "reward": 0.5,
        "accuracy": 0.25,
        "lag": 1.26,
        "generated_tokens_per_s": 320.0,
        "trained_tokens_per_s": 240.4,
        "idle_wait": {"trainer": 0.041, "producers": 0.2},
    }
    line = step_line(fields, 40)
    assert " ".join(line.split()) == (
        "step 7/40 reward 0.50 accuracy 25% lag 1.3 tokens/s: generated 320 trained 240 idle: producers 20% trainer 4%"
    )


def test_what_is_not_known_is_a_dash() -> None:
    line = step_line({"step": 1, "accuracy": None}, 5)
    assert line.count(" -") == 7
    assert "0%" not in line


def test_a_follower_sees_whole_lines_once(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    follower = Follower(file)
    assert follower.read() == []
    file.write_text('{"step": 1}\nno json\n[3]\n{"step": 2}\n{"step"')
    assert follower.read() == [{"step": 1}, {"step": 2}]
    assert follower.read() == []
    with file.open("a") as stream:
        stream.write(": 3}\n")
    assert follower.read() == [{"step": 3}]
    assert Follower(file, from_end=True).read() == []


def test_lines_that_are_no_steps_are_left_out_however_many(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    nested = b"[" * 100_000 + b"\n"
    file.write_bytes(b'{"step": 7}\n{"step": "many"}\n{"step": null}\n' + nested * 12 + b"\0" * 3_000_000 + b"\n")
    assert newest_step(file) == 7
    with file.open("ab") as stream:
        stream.write(b'{"step": 8, "idle_wait": 3}\n')
    assert newest_step(file) == 8
    assert step_line({"step": 8, "idle_wait": 3}, 9).startswith("step 8/9")


def test_a_step_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match=f"{tmp_path} cannot be read: Is a directory"):
        newest_step(tmp_path)


def test_without_a_terminal_there_are_only_lines() -> None:
    target = console()
    with Screen(target) as screen:
        screen.event("producer-1", "died", "process 5 was killed by SIGKILL")
        screen.show(RunView("r", "running", 1, 2))
        screen.line("step 1/2 [red]")
    assert text_of(target) == "producer-1 died: process 5 was killed by SIGKILL\nstep 1/2 [red]\n"


def test_a_terminal_has_a_panel_below() -> None:
    target = console(terminal=True)
    with Screen(target) as screen:
        screen.show(RunView("r1", "running", 1, 2, [PartView("producer-1", 55, "running", "1.3", 301.0, 0.05)]))
    assert "producer-1" in text_of(target)
    plain = console()
    plain.print(panel(RunView("r1", "running", 1, 2, [PartView("producer-1", 55, "running", "1.3", 301.0, 0.05)]), 61))
    for shown in ("r1", "1:01", "step 1/2", "producer-1", "55", "1.3", "301", "5%"):
        assert shown in text_of(plain)


SUMMARY = {
    "accuracy_before": 0.18,
    "accuracy_after": 0.911,
    "wall_s": 391.7,
    "steps": 40,
    "balance": {"train": {"admitted": 10, "outstanding": 2, "verdicts": {"trained": 7, "stale": 1}, "closed": True}},
    "idle_wait": {"trainer": 0.04, "producers": 0.31},
    "seconds": {"trainer": {"train": 95.0, "wait_groups": 5.0}},
    "examples": [{"prompt": "3 + 4 =", "before": "[I think]\n8", "after": "7"}],
    "export": "/some/where/export",
}


def test_the_report_shows_what_the_summary_has() -> None:
    target = console()
    print_report(target, SUMMARY)
    shown = text_of(target)
    for expected in (
        "18.0%",
        "91.1%",
        "392 s",
        "7 trained",
        "closed",
        "train 95%",
        "31%",
        "[I think]⏎8",
        "/some/where/export",
    ):
        assert expected in shown


def test_the_report_leaves_out_what_is_missing() -> None:
    target = console()
    print_report(target, {"steps": 3})
    assert "Completions" not in text_of(target)
    assert "accuracy" not in text_of(target)


def test_a_balance_that_does_not_close_says_so() -> None:
    assert balance_line({"admitted": 3, "outstanding": 1, "verdicts": {"trained": 1}, "closed": False}) == (
        "3 admitted = 1 trained + 1 outstanding, NOT CLOSED"
    )


def test_a_rollout_is_split_where_sampling_began() -> None:
    trajectory = Trajectory(
        token_ids_T=np.array([5, 6, 7, 8], np.int32),
        logprobs_T=np.zeros(4, np.float32),
        loss_mask_T=np.array([False, False, True, True]),
        spans=(VersionSpan(2, 3, PolicyVersion(1, 3)), VersionSpan(3, 4, PolicyVersion(1, 4))),
        reward=1.0,
        finish_reason="stop",
    )
    group = Group("t", 1, "train", "arithmetic", 3, "p", (trajectory,))
    (shown,) = rollouts_of(group, "producer-1", 6, Decoder(None))
    assert (shown.prompt, shown.completion, shown.lag, shown.task) == ("5 6", "7 8", 3, "arithmetic/3")


def test_what_failed_shows_its_reason_and_no_reward() -> None:
    reasons = ("reward took 10 s", "reward took 10 s")
    group = Group("t", 1, "train", "arithmetic", 3, "p", (), reasons, "failed", "too few members")
    (shown,) = rollouts_of(group, "producer-1", 6, Decoder(None))
    target = console()
    show(target, shown)
    assert text_of(target) == "arithmetic/3  failed  producer-1\n  failed      too few members\n"


def test_what_a_model_says_does_not_reach_the_terminal_as_a_command() -> None:
    target = console()
    show(target, Shown("t\x1b[2J", "p", "Hi", "\x1b]0;title\x07seven", 1.0, 0, "stop"))
    with Screen(target) as screen:
        screen.event("trainer", "in trouble", "\x9b31m full")
    said = text_of(target)
    assert "\\x1b]0;title\\x07seven" in said
    assert "\\x9b31m full" in said
    assert not {"\x1b", "\x9b", "\x07"} & set(said)


def test_a_long_prompt_shows_its_end() -> None:
    assert last_part("short\nprompt ") == "short⏎prompt"
    assert last_part("system " * 50 + "What is 1 + 1?").endswith("What is 1 + 1?")
    assert len(last_part("x" * 500)) == 73


def test_prompts_are_shown_without_what_they_share() -> None:
    prompts = [
        "system\nBe brief.\nuser\nWhat is 1 + 1?\nassistant",
        "system\nBe brief.\nuser\nWhat is 2 + 1?\nassistant",
    ]
    assert without_shared_lines(prompts) == ["What is 1 + 1?", "What is 2 + 1?"]
    assert without_shared_lines(["one\nprompt"]) == ["one\nprompt"]
    assert without_shared_lines(["same", "same"]) == ["same", "same"]
    assert without_shared_lines(["a\nb", "a"]) == ["b", "a"]


def test_a_decoder_reads_the_models_tokenizer(tmp_path: Path) -> None:
    vocabulary = {"type": "WordLevel", "vocab": {"seven": 0, "eight": 1}, "unk_token": "seven"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": vocabulary}))
    assert Decoder(tmp_path).text([1, 0]) == "eight seven"
    assert Decoder(tmp_path / "elsewhere").text([1, 0]) == "1 0"
