"""`headrace generate`: whole groups played without a broker, and how they are shown."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from broker.messages import Trajectory, VersionSpan
from deploy.asked import asked
from deploy.generate import Wish, _run, run
from deploy.generate_show import Part, Shown, line_of, parts_of, show
from headrace.config import Config, RewardConfig
from headrace.errors import ConfigError
from headrace.version import PolicyVersion
from producers.environments.pass_rates import read_pass_rates
from tests.tiny import save_tiny_llama

OLD, NEW = PolicyVersion(1, 0), PolicyVersion(1, 1)
QUICK = "producer.engine_options={length_sigma=0.0, length_mean=4.0}"


def scripted(environment: str, *options: str) -> Config:
    return asked(None, [QUICK], environment, options, producer__engine="scripted")


async def samples_of(wish: Wish) -> tuple[int, list[Shown]]:
    shown: list[Shown] = []
    return await _run(wish, shown.append), shown


def test_a_trajectory_is_cut_where_the_model_begins_and_ends() -> None:
    trajectory = Trajectory(
        token_ids_T=np.arange(10, dtype=np.int32),
        logprobs_T=np.array([0, 0, -1, -2, -3, 0, -4, -4, -4, -4], np.float32),
        loss_mask_T=np.array([0, 0, 1, 1, 1, 0, 1, 1, 1, 1], np.bool_),
        spans=(VersionSpan(2, 4, OLD, "fresh"), VersionSpan(4, 5, NEW, "kept"), VersionSpan(6, 10, NEW, "fresh")),
        reward=1.0,
        finish_reason="stop",
    )
    assert parts_of(trajectory, lambda ids: str(ids.tolist()), (0.25, 0.5)) == (
        Part(False, "[0, 1]", 2),
        Part(True, "[2, 3, 4]", 3, (VersionSpan(0, 2, OLD, "fresh"), VersionSpan(2, 3, NEW, "kept")), -2.0, 0.25),
        Part(False, "[5]", 1),
        Part(True, "[6, 7, 8, 9]", 4, (VersionSpan(0, 4, NEW, "fresh"),), -4.0, 0.5),
    )


def test_a_sample_is_shown_to_a_person_and_to_a_machine(capsys: pytest.CaptureFixture[str]) -> None:
    spans = (VersionSpan(0, 2, OLD, "fresh"), VersionSpan(2, 3, NEW, "kept"))
    parts = (Part(False, "2 + 2?\n", 5), Part(True, "4\x1b[2J", 3, spans, -0.5, 0.25))
    sample = Shown("sums", "train", 7, 0, 2, parts, 1.25, True, "stop")
    show(sample)
    assert capsys.readouterr().out == (
        "sums, train prompt 7, sample 1 of 2: reward 1.25, right, ended by stop\n"
        "  │ 2 + 2?\n"
        "  │ \n"
        "  │ 4\\x1b[2J\n"
        "  ╰ 3 tokens of version 1.0, 1.1 (kv kept), log-prob -0.50 each, turn's reward 0.25\n"
        "\n"
    )
    line = json.loads(json.dumps(line_of(sample)))
    assert (line["index"], line["reward"], line["tokens"], line["sampled_tokens"]) == (7, 1.25, 8, 3)
    assert line["parts"][1]["versions"][1] == {"start": 2, "end": 3, "version": "1.1", "kv": "kept"}


async def test_the_parts_of_a_weighted_sum_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    parts = [RewardConfig(name="environment", weight=0.5), RewardConfig(name="tests.checked:half", weight=2.0)]
    config = scripted("tests.checked:Game")
    (entry,) = config.environments
    config = config.model_copy(update={"environments": (entry.model_copy(update={"reward": tuple(parts)}),)})
    _, (sample,) = await samples_of(Wish(config, tasks=1, samples=1))
    assert (sample.reward, sample.summands) == (0.5 * 1.0 + 2.0 * 0.5, {"environment": 1.0, "tests.checked:half": 0.5})
    assert line_of(sample)["summands"] == sample.summands
    show(sample)
    assert ": reward 1.5 (environment 1, tests.checked:half 0.5), wrong, ended by" in capsys.readouterr().out


async def test_groups_come_in_order_with_rewards_of_turn_and_end() -> None:
    code, shown = await samples_of(Wish(scripted("tests.checked:Game"), tasks=4, first=1, samples=3))
    assert code == 0
    assert [(one.index, one.member) for one in shown] == [
        (index, member) for index in range(1, 5) for member in range(3)
    ]
    for one in shown:
        assert (one.failure, one.reward) == ("", 1.0)
        assert [part.sampled for part in one.parts] == [False, True] * 3
        assert [part.reward for part in one.parts if part.sampled] == [0.25, 0.25, 0.0]
        assert [part.spans for part in one.parts if part.sampled] == [(VersionSpan(0, 4, OLD, "fresh"),)] * 3
    assert len({one.parts[1].text for one in shown}) > 1


async def test_one_of_a_kind_is_no_plural(capsys: pytest.CaptureFixture[str]) -> None:
    config = scripted("tests.checked:Fine")
    sampling = config.sampling.model_copy(update={"max_new_tokens": 1})
    await samples_of(Wish(config.model_copy(update={"sampling": sampling}), tasks=1, samples=1))
    assert capsys.readouterr().err == "1 sample of 1 token; right: 0.0% over 1 prompt\n"


async def test_held_out_prompts_are_right_or_wrong() -> None:
    _, shown = await samples_of(Wish(scripted("tests.checked:Fine"), tasks=99, samples=2, split="eval"))
    assert [one.index for one in shown] == [0, 0, 1, 1, 2, 2]
    assert {(one.reward, one.correct) for one in shown} == {(0.0, False)}
    assert shown[0].parts[0].text == "Say eval 0.\n"


async def test_what_fails_says_why_and_how_far_it_came() -> None:
    code, shown = await samples_of(Wish(scripted("tests.checked:WrongStep"), tasks=1, samples=2))
    assert code == 1
    for one in shown:
        assert one.failure == "environment gave float where an Observation belongs"
        assert [part.sampled for part in one.parts] == [False, True]


async def test_pass_rates_are_what_environments_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also of prompts whose reward the episode itself gives."""
    file = tmp_path / "rates.jsonl"
    code, _ = await samples_of(Wish(scripted("tests.checked:Game"), tasks=3, samples=2, pass_rates=file))
    assert code == 0
    assert read_pass_rates(file, 5) == {0: 0.0, 1: 0.0, 2: 0.0}
    assert file.read_text().splitlines()[0] == '{"index":0,"pass_rate":0.0,"samples":2}'
    assert "right: 0.0% over 3 prompts, written to" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="--first is 5"):
        await samples_of(Wish(scripted("tests.checked:Game"), first=5, pass_rates=file))
    assert len(read_pass_rates(file, 5)) == 3, "what is measured in vain replaces nothing"


@pytest.mark.parametrize(
    ("wish", "sentence"),
    [
        ({"prompt": "Hello"}, "leave --prompt and --eval out"),
        ({"split": "eval"}, "leave --prompt and --eval out"),
        ({"options": ("pass_rates=/tmp/x",)}, "has options.pass_rates; leave that out"),
        ({"pass_rates": Path("no/such/folder/rates")}, "there is no folder no/such/folder"),
    ],
)
def test_pass_rates_that_nobody_could_use_are_refused(wish: dict[str, Any], sentence: str) -> None:
    config = scripted("tests.checked:Fine", *wish.pop("options", ()))
    with pytest.raises(ConfigError, match=sentence):
        run(Wish(config, **{"pass_rates": Path("rates"), **wish}), lambda _: None)


def test_a_prompt_that_is_no_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="--prompt is not text in UTF-8"):
        run(Wish(scripted("tests.checked:Fine"), prompt="half \udcff"), lambda _: None)


@pytest.mark.parametrize("form", [["--json"], []])
def test_a_full_disk_below_the_output_is_one_sentence(form: list[str]) -> None:
    command = [sys.executable, "-m", "deploy.cli", "generate", "--engine", "scripted", "-n", "1", *form]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "headrace: the output cannot be written (No space left on device)\n")


async def test_an_index_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'tests.checked:Fine' has 5 training prompts, and --first is 5"):
        await samples_of(Wish(scripted("tests.checked:Fine"), first=5))


async def test_a_prompt_of_ones_own_is_answered_by_the_models_own_weights(tmp_path: Path) -> None:
    folder = save_tiny_llama(tmp_path / "model", seed=4)
    overrides = ["model.dtype=float32", "sampling.temperature=0", "sampling.max_new_tokens=5", "producer.slots=4"]
    config = asked(None, overrides, None, (), model__path=str(folder))
    code, shown = await samples_of(Wish(config, prompt="Hello?", samples=2))
    assert code == 0
    assert [one.parts[0].text for one in shown] == ["<|start|>user\nHello?<|end|>\n<|start|>assistant\n"] * 2
    assert shown[0].parts[1] == shown[1].parts[1]
    assert shown[0].parts[1].spans == (VersionSpan(0, 5, OLD, "fresh"),)
    assert (shown[0].reward, shown[0].correct, shown[0].environment) == (None, None, "")


def test_what_a_command_names_goes_before_what_the_file_says(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        """
        [[environments]]
        name = "arithmetic"
        label = "sums"
        weight = 0
        options = { digits = 2, terms = 3 }
        [[environments]]
        name = "guess_number"
        min_share = 0.5
        [evaluation]
        environment = "sums"
        """
    )
    config = asked(file, (), "sums", ["digits=1", 'prompt="Say {expression}"'], model__path='a"b')
    (entry,) = config.environments
    assert (entry.name, entry.called) == ("arithmetic", "sums")
    assert entry.options == {"digits": 1, "terms": 3, "prompt": "Say {expression}"}
    assert config.model.path == 'a"b'
    assert [one.name for one in asked(file, (), None, ()).environments] == ["arithmetic", "guess_number"]
    assert [one.name for one in asked(file, (), "my.own:thing", ()).environments] == ["my.own:thing"]
    with pytest.raises(ConfigError, match=r"there are several \(sums, guess_number\); name one"):
        asked(file, (), None, ["digits=1"])
    with pytest.raises(ConfigError, match="--option 'digits' is not of the form key=value"):
        asked(file, (), "sums", ["digits"])


def headrace(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        # A shell that runs the tests in its background has this signal ignored.
        ["env", "--default-signal=INT", sys.executable, "-m", "deploy.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "COLUMNS": "200"},
    )


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_what_is_stopped_leaves_nothing_but_what_it_measured(number: signal.Signals, code: int, tmp_path: Path) -> None:
    """The signal reaches the whole process group, as a terminal's does."""
    slow = "producer.engine_options={step_s=0.02, length_sigma=0.0}"
    file = tmp_path / "rates.jsonl"
    arguments = ("--engine", "scripted", "-n", "76", "-m", "32", "--json", "--set", slow, "--pass-rates", str(file))
    process = headrace("generate", *arguments)
    assert process.stdout is not None
    line = json.loads(process.stdout.readline())
    assert (line["environment"], line["index"], line["sampled_tokens"]) == ("arithmetic", 0, 16)
    os.killpg(process.pid, number)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (code, "")
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    assert 0 in read_pass_rates(file, 76)


def test_errors_are_one_sentence() -> None:
    _, said = (process := headrace("generate", "--engine", "warp")).communicate(timeout=60)
    assert said.startswith("headrace: producer.engine = 'warp' is not one of")
    assert (len(said.splitlines()), process.returncode) == (1, 2)
    out, said = (process := headrace("env", "check", "no.such:thing", "--json")).communicate(timeout=60)
    assert (process.returncode, said) == (1, "")
    assert json.loads(out)[0]["findings"][0]["level"] == "error"
