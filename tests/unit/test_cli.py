"""The command as a user meets it: a real process each time."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "transformers", "numpy", "pydantic", "redis", "uvloop")


def headrace(*arguments: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "deploy.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=cwd,
        env={
            "PYTHONPATH": str(Path.cwd()),
            "HOME": str(cwd),
            "PATH": "/usr/bin:/bin",
            "COLUMNS": "200",
            "NO_COLOR": "1",
            **environ,
        },
    )


def modules_after(statement: str) -> set[str]:
    code = f"import sys\ntry:\n    {statement}\nexcept SystemExit:\n    pass\nprint('\\n'.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code, "--help"], capture_output=True, text=True, check=True, timeout=60
    )
    return set(done.stdout.splitlines())


def test_help_imports_nothing_heavy() -> None:
    modules = modules_after("from deploy.cli import main; main()")
    assert "deploy.cli" in modules
    assert not modules & set(HEAVY)


@pytest.mark.parametrize("module", ["headrace.config", "headrace.config_sources", "deploy.up", "deploy.launcher"])
def test_configuration_and_launcher_import_no_torch(module: str) -> None:
    modules = modules_after(f"import {module}")
    assert module in modules
    assert not modules & {"torch", "transformers"}


def test_help_names_every_command(tmp_path: Path) -> None:
    done = headrace("--help", cwd=tmp_path)
    assert done.returncode == 0
    commands = "up scale status rollouts stop config prepare runs dead weights scripts generate env portability"
    for command in commands.split():
        assert f" {command} " in done.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("bogus",), "No such command 'bogus'"),
        (("up", "--bogus"), "No such option: --bogus"),
        (("up", "--steps", "many"), "Invalid value for '--steps'"),
        (("scale", "consumer", "2"), "'consumer' cannot be scaled; only producer can"),
        (("scale", "producer", "-1"), "-1"),
        (("runs", "delete"), "Missing argument"),
    ],
)
def test_usage_errors_are_clear(arguments: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    done = headrace(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("config", "--set", "trainer.rate=1"), "trainer.rate (from command line) is not a known configuration key"),
        (("up", "--set", "trainer.learning_rate=3"), "trainer.learning_rate = 3 (from command line)"),
        (("up", "--steps", "0"), "run.steps = 0 (from command line)"),
        (("up", "--set", "trainer.group_size=64"), "64 rollouts do not fit into producer.slots = 32"),
        (("up", "--set", "nonsense"), "--set 'nonsense' is not of the form key=value"),
        (("up", "--config", "missing.toml"), "config file missing.toml cannot be read: No such file"),
        (("up", "--run", "../elsewhere"), "run id '../elsewhere' is not allowed"),
        (("up", "--resume"), "there is no run in"),
        (("up", "--resume", "--run", "gone"), "there is no run gone in"),
        (("up", "--model", "no/such/model/folder"), "model.path = 'no/such/model/folder' does not exist"),
        (("up", "--model", "~nobody.here/m"), "model.path = '~nobody.here/m': ~nobody.here is no home folder of this"),
        (("generate", "--model", "~nobody.here/m"), "model.path = '~nobody.here/m': ~nobody.here is no home"),
        (("up", "--set", "run.folder=~nobody.here"), "run.folder = '~nobody.here': ~nobody.here is no home folder"),
        (("up", "--set", "environments=[{name='~nobody.here/e.py:E'}]"), "environments = '~nobody.here/e.py': "),
        (("up", "--set", "telemetry.port=65534"), "telemetry.port = 65534 leaves no ports for all 3 services, which"),
        (("status",), "no run is running in"),
        (("status", "--run", "gone"), "there is no run gone in"),
        (("rollouts",), "no run is running in"),
        (("stop",), "no run is running in"),
        (("scale", "producer", "2"), "no run is running in"),
        (("runs", "delete", "gone"), "there is no run gone in"),
        (("dead", "list"), "no run is running in"),
        (("dead", "show", "x"), "'x' is no id of a dead letter (they look like 1767193502123-0)"),
        (("dead", "replay"), "name the letters, or say --all; `headrace dead list` shows their ids"),
        (("dead", "drop", "1-0", "--all"), "name letters or say --all, not both"),
        (("weights", "list"), "no run is running in"),
        (("weights", "pin", "1"), "'1' is no weight version (they look like 1.140); `headrace weights list` names all"),
        (("weights", "rollback", "1.x"), "'1.x' is no weight version"),
        (("weights", "export", "1.2", "out"), "no run is running in"),
        (("generate", "--option", "digits"), "--option 'digits' is not of the form key=value, as in digits=2"),
        (("generate", "--engine", "warp"), "producer.engine = 'warp' is not one of"),
        (("generate", "--pass-rates", "a/b", "--eval"), "--pass-rates are of training prompts; leave --prompt and"),
        (("env", "check", "arithmetic", "--model", "no/such/folder"), "model.path = 'no/such/folder' does not exist"),
    ],
)
def test_bad_input_is_one_sentence(arguments: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    done = headrace(*arguments, cwd=tmp_path)
    assert sentence in done.stderr
    assert done.stderr.startswith("headrace: ")
    assert len(done.stderr.splitlines()) == 1
    assert done.returncode == 2
    assert not (tmp_path / "runs").exists()


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    done = headrace("config", "--set", "trainer.rate=1", cwd=tmp_path, HEADRACE_DEBUG="1")
    assert "Traceback" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("headrace: trainer.rate")
    assert done.returncode == 2


def test_config_shows_where_each_value_came_from(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        "[trainer]\nlearning_rate = 3e-6\nclip_norm = 0.5\n[[environments]]\nname = 'arithmetic'\n"
    )
    arguments = ("config", "--config", "run.toml", "--set", "run.steps=7")
    environ = {"HEADRACE__TRAINER__CLIP_NORM": "2.0"}
    lines = headrace(*arguments, cwd=tmp_path, **environ).stdout.splitlines()
    rows = {fields[0]: (fields[1], " ".join(fields[2:])) for line in lines if (fields := line.split())}
    assert rows["trainer.learning_rate"] == ("3e-06", "run.toml")
    assert rows["trainer.clip_norm"] == ("2.0", "$HEADRACE__TRAINER__CLIP_NORM")
    assert rows["run.steps"] == ("7", "command line")
    assert rows["run.seed"] == ("0", "default")
    found = json.loads(headrace(*arguments, "--json", cwd=tmp_path, **environ).stdout)
    assert found["config"]["trainer"]["clip_norm"] == 2.0
    assert found["origins"]["run.steps"] == "command line"
    assert found["origins"]["environments"] == "run.toml"


def test_scripts_are_written_with_an_index(tmp_path: Path) -> None:
    done = headrace("scripts", "a/b", cwd=tmp_path)
    assert (done.stderr, done.returncode) == ("", 0)
    index = json.loads((tmp_path / "a/b/scripts.json").read_text())
    assert {f"{name}.lua" for name in index["scripts"]} == {file.name for file in (tmp_path / "a/b").glob("*.lua")}
    assert index["key"] == "{hr:RUN}:NOUN"
    (tmp_path / "file").touch()
    refused = headrace("scripts", "file", cwd=tmp_path)
    assert (refused.stderr, refused.returncode) == (
        "headrace: scripts cannot be written into file: File exists\n",
        7,
    )


def test_no_runs_is_an_empty_list(tmp_path: Path) -> None:
    done = headrace("runs", "list", "--json", cwd=tmp_path)
    assert (json.loads(done.stdout), done.returncode) == ([], 0)
