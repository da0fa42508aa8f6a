"""What Prometheus and Grafana are given: expressions that read, and name metrics and labels that processes export."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from cohort.common.process import metrics
from tests.exported_metrics import exported

ROOT = Path(__file__).resolve().parent.parent.parent
BOARDS = sorted((ROOT / "docker" / "grafana" / "dashboards").glob("*.json"))
ALERTS: dict[str, Any] = yaml.safe_load((ROOT / "docker" / "prometheus" / "alerts.yml").read_text(encoding="utf-8"))
RULES = [rule for group in ALERTS["groups"] for rule in group["rules"]]
"""Of gateways whose API keys have names."""


def board(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return loaded


def expressions() -> Iterator[tuple[str, str]]:
    for path in BOARDS:
        for panel in board(path)["panels"]:
            for target in panel.get("targets", ()):
                yield f"{path.stem}: {panel['title']}", target["expr"]
    for rule in RULES:
        yield rule["alert"], rule["expr"]


EXPRESSIONS = list(expressions())


def series_and_groups(expression: str) -> tuple[list[tuple[str, set[str]]], set[str]]:
    """Every series that an expression names, with the labels of its matchers; and the labels of its groupings."""
    bare = re.sub(r'"(?:[^"\\]|\\.)*"|\[[^]]*\]', "", expression)
    grouping = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
    named = re.findall(
        r"\b(?!(?:and|or|unless|bool|offset)\b)([a-zA-Z_:]\w*)\b(?!\s*\()(?:\{([^}]*)\})?", grouping.sub("", bare)
    )
    return (
        [(name, set(re.findall(r"(\w+)\s*[!=]", matchers))) for name, matchers in named],
        set(re.findall(r"\w+", " ".join(grouping.findall(bare)))),
    )


def test_the_source_tells_of_every_metric_that_a_registry_has() -> None:
    """The reader of sources against real registries: names, and labels."""
    registry, other = CollectorRegistry(), CollectorRegistry()
    make = metrics.MetricFactory(registry, model_name="m", instance="i")
    for family in (metrics.RequestMetrics, metrics.EngineMetrics, metrics.TransferMetrics):
        family(make)
    metrics.SchedulerMetrics(metrics.MetricFactory(other, model_name="m", instance="i"))
    suffixes = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
    real = {
        metric.name + suffix for metric in [*registry.collect(), *other.collect()] for suffix in suffixes[metric.type]
    }
    known = exported()
    assert real - set(known) == set()
    assert known["cohort_slo_requests_total"] == {"class", "objective", "outcome", "instance", "model_name"}
    assert known["cohort_up"] == {"instance", "role"}
    assert {"cohort_event_loop_lag_seconds", "cohort_predictor_observations_total", "cohort_bus_forged_total"} <= set(
        known
    )
    assert {"cohort_tls_certificate_expires_seconds", "cohort_trace_spans_dropped_total"} <= set(known)


@pytest.mark.parametrize(("where", "expression"), EXPRESSIONS, ids=[where for where, _ in EXPRESSIONS])
def test_an_expression_reads_and_asks_for_what_is_exported(where: str, expression: str) -> None:
    series, grouped = series_and_groups(expression)
    assert series, where
    assert all(expression.count(left) == expression.count(right) for left, right in ("()", "{}", "[]")), where
    known = exported()
    available = set[str]()
    for name, labels in series:
        assert name in known, f"{where}: no process exports {name}"
        assert labels <= known[name], f"{where}: {name} has no label {labels - known[name]}"
        available |= known[name]
    assert grouped <= available, f"{where}: {grouped - available} are labels of none of its series"


def test_what_an_expression_names() -> None:
    found = series_and_groups(
        'histogram_quantile(0.9, sum by (le, class) (rate(a_bucket{class=~"$class"}[5m]))) / on (x) b > 1e-3'
    )
    assert found == ([("a_bucket", {"class"}), ("b", set())], {"le", "class", "x"})


def test_alerts_say_what_happened_and_how_urgent_it_is() -> None:
    assert set(ALERTS) == {"groups"}
    names = [rule["alert"] for rule in RULES]
    assert len(names) == len(set(names)) >= 15
    for rule in RULES:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}, rule["alert"]
        assert re.fullmatch(r"Cohort[A-Z]\w+", rule["alert"])
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["summary"].endswith(".")
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "1s"))
        used = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        series, grouped = series_and_groups(rule["expr"])
        carried = grouped or set().union(*(exported()[name] for name, _ in series))
        assert used <= carried, f"{rule['alert']}: its result has no label {used - carried}"


def test_the_guide_says_what_to_do_about_every_alert() -> None:
    guide = (ROOT / "docs" / "guide" / "operations.md").read_text(encoding="utf-8")
    assert [rule["alert"] for rule in RULES if f"`{rule['alert']}`" not in guide] == []


def test_prometheus_finds_the_alerts_and_grafana_the_boards() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]
    (target,) = yaml.safe_load((ROOT / "docker/prometheus/prometheus.yml").read_text())["rule_files"]
    assert f"./docker/prometheus/alerts.yml:{target}:ro" in services["prometheus"]["volumes"]
    (provider,) = yaml.safe_load((ROOT / "docker/grafana/provisioning/dashboards/cohort.yaml").read_text())["providers"]
    assert f"./docker/grafana/dashboards:{provider['options']['path']}:ro" in services["grafana"]["volumes"]
    assert len(BOARDS) == 4


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_a_board_is_one_that_grafana_can_show(path: Path) -> None:
    loaded = board(path)
    assert loaded["uid"] == path.stem and loaded["title"].startswith("Cohort")
    (source,) = yaml.safe_load((ROOT / "docker/grafana/provisioning/datasources/prometheus.yaml").read_text())[
        "datasources"
    ]
    panels = loaded["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = set[tuple[int, int]]()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        own = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not own & cells, f"{panel['title']} lies over another"
        cells |= own
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == source["uid"] and panel["targets"], panel["title"]
    variables = {variable["name"] for variable in loaded["templating"]["list"]}
    used = set(
        re.findall(
            r"\$(?!__)(\w+)", json.dumps([target["expr"] for panel in panels for target in panel.get("targets", ())])
        )
    )
    assert used <= variables


def test_no_two_boards_have_one_address() -> None:
    assert len({board(path)["uid"] for path in BOARDS}) == len(BOARDS)
    assert len({board(path)["title"] for path in BOARDS}) == len(BOARDS)
