"""Writes the dashboards: `python deploy/grafana/build.py`. A dashboard is a list of panels; the rest is all alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DATASOURCE = {"type": "prometheus", "uid": "headrace"}
WIDTH, HEIGHT = 12, 8
"""Of a panel, in Grafana's grid of 24 columns."""

Panel = tuple[str, str, dict[str, str]]
"""Title, unit, and legend to query. `$run` is the run that is shown."""

RUN = '{run="$run"}'
LAG_HISTOGRAM = "Lag histogram of consumed groups, steps"
"""A heatmap; all others are lines."""
DASHBOARDS: dict[str, list[Panel]] = {
    "Overview": [
        ("Reward", "short", {
            "reward": f"headrace_trainer_reward{RUN}",
            "accuracy": f"headrace_trainer_accuracy{RUN}",
        }),
        ("Samples per device-hour", "short", {
            "consumed": (
                f"3600 * sum(rate(headrace_trainer_rollouts_total{RUN}[2m])) / "
                'count(count by (service, lane) (headrace_phase_seconds_total{run="$run", lane=~"engine|trainer"}))'
            ),
        }),
        ("Idle-wait by stage", "percentunit", {
            "trainer": 'sum(rate(headrace_phase_seconds_total{run="$run", lane="trainer", phase=~"wait_.*"}[1m]))',
            "producers": f"avg(headrace_idle{RUN})",
        }),
        ("Lag of consumed groups", "short", {
            "median": f"histogram_quantile(0.5, sum by (le) (rate(headrace_trainer_lag_bucket{RUN}[5m])))",
            "95 %": f"histogram_quantile(0.95, sum by (le) (rate(headrace_trainer_lag_bucket{RUN}[5m])))",
            "bound": f"headrace_trainer_max_lag{RUN}",
        }),
        (LAG_HISTOGRAM, "short", {"{{le}}": f"sum by (le) (increase(headrace_trainer_lag_bucket{RUN}[1m]))"}),
        ("Weight-sync latency, seal to commit", "s", {"{{service}}": f"headrace_weight_latency_seconds{RUN}"}),
        ("Queues", "short", {"{{queue}}": f"headrace_queue_entries{RUN}"}),
        ("Balance sheet, training tasks", "short", {"{{row}}": 'headrace_balance_tasks{run="$run", kind="train"}'}),
        ("Steps", "short", {"newest": f"headrace_trainer_step{RUN}"}),
    ],
    "Producers": [
        ("Decoded tokens per second", "short", {"{{service}}": f"headrace_tokens_per_s{RUN}"}),
        ("Occupancy of slots", "percentunit", {"{{service}}": f"headrace_occupancy{RUN}"}),
        ("Phases of engines", "percentunit", {
            "{{phase}}": 'avg by (phase) (rate(headrace_phase_seconds_total{run="$run", lane="engine"}[1m]))',
        }),
        ("Groups per minute by outcome", "short", {
            "{{outcome}}": f"60 * sum by (outcome) (rate(headrace_groups_total{RUN}[2m]))",
        }),
        ("Seconds of a group, 95 %", "s", {
            "{{stage}}": f"histogram_quantile(0.95, sum by (stage, le) (rate(headrace_group_seconds_bucket{RUN}[5m])))",
        }),
        ("Sampled tokens thrown away per second", "short", {
            "{{reason}}": f"sum by (reason) (rate(headrace_tokens_thrown_away_total{RUN}[5m]))",
        }),
        ("Version that is sampled from", "short", {"{{service}}": f"headrace_version_step{RUN}"}),
        ("Event-loop lag", "s", {"{{service}}": f"headrace_event_loop_lag_seconds{RUN}"}),
    ],
    "Trainer": [
        ("Phases", "percentunit", {
            "{{phase}}": 'sum by (phase) (rate(headrace_phase_seconds_total{run="$run", lane="trainer"}[1m]))',
        }),
        ("Seconds per step", "s", {
            "mean": (
                f"rate(headrace_trainer_step_seconds_sum{RUN}[2m]) / rate(headrace_trainer_step_seconds_count{RUN}[2m])"
            ),
        }),
        ("Loss", "short", {"loss": f"headrace_trainer_loss{RUN}"}),
        ("Gradient norm", "short", {"norm": f"headrace_trainer_grad_norm{RUN}"}),
        ("Trainer-engine mismatch, clipped share", "short", {
            "mismatch": f"headrace_trainer_mismatch{RUN}",
            "clipped": f"headrace_trainer_clipped{RUN}",
        }),
        ("Importance ratio, effective sample size", "short", {
            "1 %": f"headrace_trainer_ratio_p1{RUN}",
            "median": f"headrace_trainer_ratio_p50{RUN}",
            "99 %": f"headrace_trainer_ratio_p99{RUN}",
            "effective": f"headrace_trainer_effective{RUN}",
        }),
        ("Tokens per second", "short", {"consumed": f"headrace_trainer_tokens_per_s{RUN}"}),
        ("Retained bytes", "bytes", {
            "groups in no checkpoint": f"headrace_trainer_retained_bytes{RUN}",
            "bound": f"headrace_trainer_retain_bytes{RUN}",
        }),
        ("Redis memory", "bytes", {
            "used": f"headrace_broker_memory_bytes{RUN}",
            "maxmemory": f"headrace_broker_memory_limit_bytes{RUN}",
        }),
    ],
    "Weights": [
        ("Newest version, and what engines are on", "short", {
            "head": f"headrace_weights_head_step{RUN}",
            "{{service}}": f"headrace_version_step{RUN}",
        }),
        ("Latency, seal to commit", "s", {"{{service}}": f"headrace_weight_latency_seconds{RUN}"}),
        ("Commits per minute", "short", {"{{service}}": f"60 * rate(headrace_weight_commits_total{RUN}[2m])"}),
        ("Decoding stood still for a commit", "s", {
            "{{service}}": (
                f"rate(headrace_weight_commit_seconds_total{RUN}[5m]) / rate(headrace_weight_commits_total{RUN}[5m])"
            ),
        }),
        ("Transport", "short", {"{{service}} {{kind}}": f"headrace_weight_transport{RUN} == 1"}),
        ("Segments in shared memory", "short", {"{{service}}": f"headrace_weights_segments{RUN}"}),
        ("Hosts that take weights now", "short", {"{{service}}": f"headrace_weights_uploads{RUN}"}),
        ("Versions by what verifying said", "short", {"{{check}}": f"headrace_weights_versions_total{RUN}"}),
    ],
}  # fmt: skip


def main() -> None:
    for title, panels in DASHBOARDS.items():
        text = json.dumps(dashboard(title, panels), indent=1) + "\n"
        (HERE / "dashboards" / f"{title.lower()}.json").write_text(text, encoding="utf-8")


def dashboard(title: str, panels: list[Panel]) -> dict[str, Any]:
    return {
        "uid": f"headrace-{title.lower()}",
        "title": f"headrace: {title}",
        "tags": ["headrace"],
        "schemaVersion": 41,
        "refresh": "5s",
        "time": {"from": "now-30m", "to": "now"},
        "links": [{"type": "dashboards", "tags": ["headrace"], "title": "headrace", "asDropdown": False}],
        "templating": {"list": [_run()]},
        "panels": [_panel(number, *panel) for number, panel in enumerate(panels)],
    }


def _run() -> dict[str, Any]:
    query = "label_values(headrace_event_loop_lag_seconds, run)"
    return {"name": "run", "label": "Run", "type": "query", "datasource": DATASOURCE, "query": query, "refresh": 2}


def _panel(number: int, title: str, unit: str, queries: dict[str, str]) -> dict[str, Any]:
    heat = title == LAG_HISTOGRAM
    return {
        "id": number + 1,
        "title": title,
        "type": "heatmap" if heat else "timeseries",
        "datasource": DATASOURCE,
        "gridPos": {"x": number % 2 * WIDTH, "y": number // 2 * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0 if unit != "short" else None}, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": DATASOURCE,
                "expr": query,
                "legendFormat": legend,
                "format": "heatmap" if heat else "time_series",
            }
            for index, (legend, query) in enumerate(queries.items())
        ],
    }


if __name__ == "__main__":
    main()
