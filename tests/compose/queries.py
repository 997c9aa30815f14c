"""Every query of the dashboards and alerts: `python -m tests.compose.queries` prints them, one a line.

Of an alert, a comparison is asked with `bool`, so that it answers 0 or 1 where it would answer nothing: what is looked
for is whether both of its sides have data.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
COMPARISON = re.compile(r"(?<=\s)(==|!=|>=|<=|>|<)(?=\s)(?! *bool)")


def dashboard_queries(run: str, deploy: Path = DEPLOY) -> dict[str, str]:
    """Dashboard, panel and legend to query, for this run."""
    found = {}
    for file in sorted((deploy / "grafana" / "dashboards").glob("*.json")):
        dashboard: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        for panel in dashboard["panels"]:
            for target in panel["targets"]:
                where = f"{file.stem}: {panel['title']}: {target['legendFormat']}"
                found[where] = target["expr"].replace("$run", run)
    return found


def alert_queries(deploy: Path = DEPLOY) -> dict[str, str]:
    """Alert to query."""
    rules = yaml.safe_load((deploy / "prometheus" / "alerts.yml").read_text(encoding="utf-8"))
    return {
        f"alert {rule['alert']}": COMPARISON.sub(r"\1 bool", rule["expr"])
        for group in rules["groups"]
        for rule in group["rules"]
    }


if __name__ == "__main__":
    for where, query in {**dashboard_queries("run"), **alert_queries()}.items():
        print(f"{where}\t{query}")
