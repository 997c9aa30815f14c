"""Each alert fires for its fault, and for no other: Prometheus's own tool for testing rules plays both."""

from __future__ import annotations

import subprocess
from pathlib import Path

import yaml

from tests.compose.stack import CHECKOUT

RULES = CHECKOUT / "deploy" / "prometheus" / "alerts.yml"
MINUTES = 10
SAMPLES = MINUTES * 4
"""One every 15 s. A series is written as `first+stepxcount`."""


def series(name: str, **labels: str) -> str:
    return name + "{" + ", ".join(f'{label}="{value}"' for label, value in labels.items()) + "}"


def up(role: str) -> str:
    return series("up", job="headrace", role=role, instance=f"{role}:9100")


def of_run(name: str, **labels: str) -> str:
    return series(f"headrace_{name}", run="r", **labels)


WAITS = of_run("phase_seconds_total", lane="trainer", phase="wait_groups")
LAG = [of_run("trainer_lag_bucket", le=bound) for bound in ("1", "3", "4", "+Inf")]
HEALTHY = {
    WAITS: "0+1",
    of_run("idle", service="p"): "0.1+0",
    **dict.fromkeys(LAG, "0+8"),
    of_run("trainer_max_lag"): "4+0",
    of_run("queue_entries", queue="dead"): "0+0",
    of_run("queue_entries", queue="groups_waiting"): "5+0",
    of_run("weights_head_step", service="weights"): "9+1",
    of_run("version_step", service="p"): "8+1",
    of_run("balance_open", kind="train"): "0+0",
    of_run("trainer_engine_disagrees"): "0+0",
    of_run("broker_memory_bytes"): "5+0",
    of_run("broker_memory_limit_bytes"): "10+0",
    of_run("event_loop_lag_seconds", service="p"): "0.1+0",
    **{up(role): "1+0" for role in ("trainer", "producer", "weights")},
}
FAULTS = {
    "TrainerStarved": {WAITS: "0+9"},
    "ProducersStarved": {of_run("idle", service="p"): "0.9+0"},
    "LagNearBound": dict.fromkeys(LAG[:2], "0+0"),
    "DeadLetters": {of_run("queue_entries", queue="dead"): "1+0"},
    "ProducerBehind": {of_run("version_step", service="p"): "4+1"},
    "BalanceSheetOpen": {of_run("balance_open", kind="train"): "1+0"},
    "EnginesDisagree": {of_run("trainer_engine_disagrees"): "1+0"},
    "RedisNearlyFull": {of_run("broker_memory_bytes"): "9.5+0"},
    "EventLoopLags": {of_run("event_loop_lag_seconds", service="p"): "3+0"},
    "ServiceDown": {up("producer"): "0+0"},
    "ServiceMissing": {up("trainer"): ""},
}


def case(name: str, changed: dict[str, str], fires: list[str]) -> dict[str, object]:
    values = {**HEALTHY, **changed}
    return {
        "name": name,
        "interval": "15s",
        "input_series": [
            {"series": series, "values": f"{value}x{SAMPLES}"} for series, value in values.items() if value
        ],
        "promql_expr_test": [
            {
                "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                "eval_time": f"{MINUTES}m",
                "exp_samples": [{"labels": series("", alertname=alert), "value": 1} for alert in fires],
            }
        ],
    }


def test_each_alert_fires_for_its_fault_and_for_no_other(prometheus_image: str, tmp_path: Path) -> None:
    rules = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    assert {rule["alert"] for group in rules["groups"] for rule in group["rules"]} == FAULTS.keys()
    tests = [
        case("nothing is wrong", {}, []),
        case("the run has ended", dict.fromkeys(HEALTHY, ""), []),
        *(case(alert, changed, [alert]) for alert, changed in FAULTS.items()),
    ]
    (tmp_path / "alerts.yml").write_bytes(RULES.read_bytes())
    asked = {"rule_files": ["alerts.yml"], "evaluation_interval": "15s", "tests": tests}
    (tmp_path / "tests.yml").write_text(yaml.safe_dump(asked))
    done = promtool(prometheus_image, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def promtool(image: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = ["docker", "run", "--rm", "--network", "none", "--volume", f"{folder}:/rules:ro"]
    command += ["--entrypoint", "promtool", image, "test", "rules", "/rules/tests.yml"]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)
