"""What the launcher decides without doing anything: restarts, cores, scaling, plans."""

import asyncio
import re
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.connections import named
from deploy.cores import Cores
from deploy.parts import Services
from deploy.plan import MAY_CHANGE, localized, merged
from deploy.restarts import LIMITS, Death, GiveUp, Restart, RestartLimits, decide
from deploy.run_folder import RunFolder, check_run_id, new_run_id
from deploy.scaling import Scaling, surplus
from deploy.supervisor import Part
from headrace.config import Config
from headrace.config_sources import resolve
from headrace.errors import ConfigError, ServiceError

LIMIT = RestartLimits(in_a_row=3, in_total=10)
deaths = st.builds(
    Death, code=st.integers(-15, 255), lived_s=st.floats(0, 1e4), joined=st.booleans(), broker_away=st.booleans()
)


def early(code: int = -9) -> Death:
    return Death(code, 1.0, joined=False)


def settled(code: int = -9) -> Death:
    return Death(code, 3600.0, joined=True)


def test_a_first_death_is_repaired_soon() -> None:
    assert decide([early()], LIMIT) == Restart(0.5)
    assert decide([settled()], LIMIT) == Restart(0.5)


def test_deaths_in_a_row_wait_longer_and_end() -> None:
    assert decide([early()] * 2, LIMIT) == Restart(1.0)
    verdict = decide([early()] * 3, LIMIT)
    assert verdict == GiveUp("it died 3 times in a row, before it had joined the run")
    assert "soon after it started" in str(decide([Death(1, 2.0, joined=True)] * 3, LIMIT))


def test_a_producer_outlives_the_task_that_ends_it_until_that_is_buried() -> None:
    limits, ended = replace(LIMIT, deliveries=5), Death(-11, 2.0, joined=True)
    assert isinstance(decide([ended] * 5, limits), Restart)
    assert isinstance(decide([ended] * 6, limits), GiveUp)
    assert isinstance(decide([early()] * 3, limits), GiveUp), "one that never joins plays no task"


def test_a_settled_life_begins_a_new_row() -> None:
    assert decide([early(), early(), settled()], LIMIT) == Restart(0.5)
    assert decide([early(), early(), settled(), early()], LIMIT) == Restart(1.0)


def test_a_long_life_without_joining_is_not_settled() -> None:
    assert isinstance(decide([Death(-9, 1e4, joined=False)] * 3, LIMIT), GiveUp)


@pytest.mark.parametrize("code", [2, 3, 6, 7, 8])
def test_what_would_fail_again_is_not_tried(code: int) -> None:
    assert isinstance(decide([early(code)], LIMIT), GiveUp)


def test_a_joined_part_that_lost_the_broker_is_started_again() -> None:
    assert decide([settled(3)], LIMIT) == Restart(0.5)


def test_one_that_never_reached_a_broker_that_was_away_is_started_again() -> None:
    assert decide([Death(3, 10.0, joined=False, broker_away=True)], LIMIT) == Restart(0.5)
    assert isinstance(decide([Death(2, 10.0, joined=False, broker_away=True)], LIMIT), GiveUp)


def test_a_redis_that_is_killed_again_and_again_is_no_crash_loop() -> None:
    assert decide([Death(-9, 20.0, joined=True)] * 50, LIMITS["redis"]) == Restart(0.5)
    assert isinstance(decide([Death(1, 20.0, joined=False)] * 4, LIMITS["redis"]), GiveUp)


@given(st.lists(deaths, min_size=1, max_size=30))
def test_restarts_are_bounded_in_number_and_delay(history: list[Death]) -> None:
    for role, limits in LIMITS.items():
        verdict = decide(history, limits)
        if len(history) >= limits.in_total:
            assert isinstance(verdict, GiveUp), role
        if isinstance(verdict, Restart):
            assert 0 < verdict.after_s <= limits.longest_delay_s


def test_each_torch_process_has_its_own_cores_when_there_are_enough() -> None:
    cores = Cores.for_run(Config(), [3, 5], gpu=False)
    assert cores.take("trainer", 1) == frozenset({3})
    assert cores.take("producer-1", 1) == frozenset({5})
    assert cores.take("producer-2", 1) is None
    assert cores.take("trainer", 1) == frozenset({3})
    cores.give_back("producer-1")
    assert cores.take("producer-3", 1) == frozenset({5})
    cores.give_back("unknown")


@pytest.mark.parametrize(
    ("overrides", "available", "gpu"),
    [
        (["producer.count=2"], [0, 1], False),
        (["producer.threads=2"], [0, 1], False),
        (["trainer.ranks=2"], [0, 1], False),
        ([], [0, 1], True),
        (["model.device=cuda"], [0, 1], False),
    ],
)
def test_nothing_is_pinned_when_cores_are_too_few_or_a_gpu_computes(
    overrides: list[str], available: list[int], gpu: bool
) -> None:
    cores = Cores.for_run(resolve(None, {}, overrides).config, available, gpu=gpu)
    assert cores.take("trainer", 1) is None


def test_the_ranks_of_a_trainer_share_its_cores() -> None:
    overrides = ["trainer.ranks=2", "trainer.threads=2"]
    services = Services(
        resolve(None, {}, overrides).config,
        RunFolder(Path("r1")),
        "redis://h",
        Cores.for_run(resolve(None, {}, overrides).config, range(5), gpu=False),
        resume=False,
    )
    services.made["trainer"] = 1
    part = services.command("trainer", "trainer")(False)
    assert part.cores == frozenset({0, 1, 2, 3})
    assert part.env["OMP_NUM_THREADS"] == "2"


def test_the_cpu_is_pinned_where_it_is_named() -> None:
    config = resolve(None, {}, ["model.device=cpu"]).config
    assert Cores.for_run(config, [0, 1], gpu=True).take("trainer", 1) == frozenset({0})


@pytest.mark.parametrize("placement", ["colocated", "hybrid"])
def test_who_shares_a_device_shares_its_cores(placement: str) -> None:
    config = resolve(None, {}, [f"run.placement={placement}", "producer.threads=2"]).config
    cores = Cores.for_run(config, [0, 1, 2, 3], gpu=False)
    assert cores.take("trainer", 1) == cores.take("producer-1", 2) == cores.take("producer-2", 2) == frozenset({0, 1})
    cores.give_back("producer-2")
    assert cores.take("producer-3", 2) == frozenset({0, 1})
    assert Cores.for_run(config, [0, 1, 2, 3], gpu=True).take("trainer", 1) is None
    assert Cores.for_run(config, [0], gpu=False).take("producer-1", 2) is None


def part(name: str, *, joined: bool = False) -> Part:
    def never(_: bool) -> None:
        raise AssertionError("not started here")

    return Part(name, "producer", never, LIMIT, joined=joined)  # type: ignore[arg-type]


async def test_surplus_are_the_newest() -> None:
    parts = [part(f"producer-{n}") for n in (1, 2, 3)]
    assert [gone.name for gone in surplus(parts, 1)] == ["producer-3", "producer-2"]
    assert surplus(parts, 3) == surplus(parts, 9) == []


async def test_a_scaling_is_answered_when_all_has_happened() -> None:
    new, old = part("producer-2"), part("producer-1")
    up = Scaling("mark", 2, [new], [], deadline=10.0)
    assert up.answer({"producer-2": new}, 0.0) is None
    assert up.answer({"producer-2": new}, 11.0) == "2 producers: producer-2 started but not joined yet"
    new.joined = True
    assert up.answer({"producer-2": new}, 0.0) == "2 producers: producer-2 joined"
    down = Scaling("mark", 0, [], [old], deadline=10.0)
    assert down.answer({"producer-1": old}, 0.0) is None
    assert down.answer({"producer-1": old}, 11.0) == "0 producers: producer-1 still draining"
    assert down.answer({}, 0.0) == "0 producers: producer-1 drained and left"
    assert Scaling("mark", 1, [], [], 0.0).answer({}, 0.0) == "1 producer: nothing to do"
    await asyncio.sleep(0)


def test_a_resumed_run_keeps_its_configuration() -> None:
    stored = resolve(None, {}, ["trainer.learning_rate=3e-6", "run.steps=10"]).config.model_dump(mode="json")
    config, changes = merged(stored, resolve(None, {}, []))
    assert (config.trainer.learning_rate, changes) == (3e-6, ())
    config, changes = merged(stored, resolve(None, {}, ["producer.count=3", "trainer.learning_rate=3e-6"]))
    assert (config.producer.count, config.trainer.learning_rate) == (3, 3e-6)
    assert changes == ("producer.count is now 3, was 1",)
    with pytest.raises(ConfigError, match=r"trainer.learning_rate = 1e-05 \(from command line\) differs from .* 3e-06"):
        merged(stored, resolve(None, {}, ["trainer.learning_rate=1e-5"]))


def test_keys_that_may_change_exist() -> None:
    for key in MAY_CHANGE:
        section, leaf = key.split(".")
        assert hasattr(getattr(Config(), section), leaf)


def test_files_and_folders_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "initial").mkdir()
    (tmp_path / "env.py").touch()
    overrides = [
        "model.path=model",
        "trainer.reference=model",
        'environments=[{name="env.py:Mine", reward="env.py:score"}, {name="pkg.mod:Other"}]',
        "evaluation.environment=env.py:Mine",
    ]
    config = localized(resolve(None, {}, overrides).config)
    assert config.model.path == str(tmp_path / "model")
    assert config.trainer.reference == str(tmp_path / "model")
    assert config.run.folder == str(tmp_path / "runs")
    assert [entry.name for entry in config.environments] == [f"{tmp_path}/env.py:Mine", "pkg.mod:Other"]
    assert config.evaluation.environment == (config.environments[0].name,)
    assert config.environments[0].reward[0].name == f"{tmp_path}/env.py:score"
    assert localized(resolve(None, {}, ["model.path=owner/model"]).config).model.path == "owner/model"
    assert localized(resolve(None, {}, ()).config).trainer.reference == "initial", "a word, also where a folder has it"


def test_runs_that_begin_in_one_second_have_ids_of_their_own() -> None:
    """Whatever their folders: they may share a Redis, and they share the memory of a host."""
    ids = [new_run_id(datetime(2026, 1, 31, 15, 45, 2)) for _ in range(50)]
    assert len(set(ids)) > 45
    assert all(re.fullmatch(r"20260131-154502-[2-9a-z]{4}", check_run_id(run_id)) for run_id in ids)


@given(st.text(max_size=70))
def test_a_run_id_is_one_plain_name(text: str) -> None:
    try:
        assert check_run_id(text) == text
    except ConfigError:
        return
    assert text
    assert not set(text) & set("/\\ \n*:{}")
    assert not text.startswith(".")


def test_one_launcher_per_run_folder(tmp_path: Path) -> None:
    first, second = RunFolder(tmp_path / "r"), RunFolder(tmp_path / "r")
    first.make()
    assert not second.live
    first.lock()
    assert second.live
    with pytest.raises(ServiceError, match="run r is being started here by another command"):
        second.lock()
    first.config_file.touch()
    with pytest.raises(ServiceError, match="run r is already running here"):
        second.lock()
    first.unlock()
    assert not second.live


def test_a_damaged_file_of_a_run_is_named(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.read_json(folder.summary_file) is None
    for damage in (b"{", b"[" * 200_000, b"\xff", b"9" * 5000):
        folder.summary_file.write_bytes(damage)
        with pytest.raises(ServiceError, match=r"summary\.json cannot be read"):
            folder.read_json(folder.summary_file)
    (tmp_path / "connection.json").write_bytes(b"[" * 200_000)
    assert folder.connection() is None


def test_only_the_configured_producers_have_ports_that_were_seen_free(tmp_path: Path) -> None:
    config = Config.model_validate({"telemetry": {"port": 9100}, "producer": {"count": 2}})
    services = Services(config, RunFolder(tmp_path / "r1"), "redis://h", Cores([]), resume=False)
    ports = {}
    for role in ("weights", "trainer", "producer", "producer", "producer"):
        name = services.part(role).name
        ports[name] = services.command(name, role)(False).env["HEADRACE_METRICS_PORT"]
    assert ports == {
        "trainer": "9100",
        "weights": "9101",
        "producer-1": "9102",
        "producer-2": "9103",
        "producer-3": "0",
    }


def test_an_empty_run_is_not_the_newest_one() -> None:
    with pytest.raises(ConfigError, match="--run '' names no run"):
        named("")
