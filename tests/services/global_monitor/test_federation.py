"""Whatever the sources say, the joint exposition is valid, complete, and names each source."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from cohort.services.global_monitor.federation import merge


def exposition(value: float, label: str = "a") -> str:
    registry = CollectorRegistry()
    Counter("jobs", "Jobs done.", ["kind"], registry=registry).labels(label).inc(value)
    Gauge("depth", "Queue depth.", registry=registry).set(value)
    Histogram("took_seconds", "Time.", registry=registry, buckets=(1, 2)).observe(value)
    return generate_latest(registry).decode()


def parsed(text: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    series: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = tuple(sorted(sample.labels.items()))
            of_name = series.setdefault(sample.name, {})
            assert key not in of_name, f"{sample.name}{key} twice"
            of_name[key] = sample.value
    return series


def check_families(text: str) -> None:
    types = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    helps = [line.split()[2] for line in text.splitlines() if line.startswith("# HELP")]
    assert len(types) == len(set(types))
    assert len(helps) == len(set(helps))


def test_two_sources_become_one_family_each() -> None:
    merged = merge([("one", exposition(1.5)), ("two", exposition(3.5))])
    check_families(merged.text)
    assert merged.skipped == {}
    series = parsed(merged.text)
    assert series["jobs_total"] == {
        (("instance", "one"), ("kind", "a")): 1.5,
        (("instance", "two"), ("kind", "a")): 3.5,
    }
    assert series["depth"] == {(("instance", "one"),): 1.5, (("instance", "two"),): 3.5}
    assert series["took_seconds_bucket"][(("instance", "one"), ("le", "2.0"))] == 1
    assert series["took_seconds_bucket"][(("instance", "two"), ("le", "2.0"))] == 0
    assert series["took_seconds_count"] == {(("instance", "one"),): 1, (("instance", "two"),): 1}
    assert merged.text.count("# TYPE took_seconds histogram") == 1


def test_an_own_instance_label_stays() -> None:
    merged = merge([("source", 'x{instance="mine"} 1\nx{a="b"} 2\n')])
    assert parsed(merged.text) == {"x": {(("instance", "mine"),): 1, (("a", "b"), ("instance", "source")): 2}}


def test_difficult_label_values_survive() -> None:
    merged = merge([("s", 'x{a="br{ace}, \\"quote\\" \\\\ and instance=\\"no\\"",b="",} 1 1700000000000\n')])
    assert parsed(merged.text) == {
        "x": {(("a", 'br{ace}, "quote" \\ and instance="no"'), ("b", ""), ("instance", "s")): 1}
    }


def test_special_values() -> None:
    series = parsed(merge([("s", "a NaN\nb +Inf\nc -Inf\nd 1e-9\n")]).text)
    assert math.isnan(series["a"][(("instance", "s"),)])
    assert series["b"][(("instance", "s"),)] == math.inf


def test_broken_lines_are_left_out_and_counted() -> None:
    broken = 'good 1\nno value\nbad{a="b} 2\nbad{a=b} 3\nbad{a="1",a="2"} 4\n{} 5\n<html>\n'
    merged = merge([("broken", broken), ("fine", "good 2\n")])
    assert merged.skipped == {"broken": 6}
    assert parsed(merged.text) == {"good": {(("instance", "broken"),): 1, (("instance", "fine"),): 2}}


def test_a_contradicting_type_is_left_out() -> None:
    merged = merge([("one", "# TYPE x gauge\nx 1\n"), ("two", "# TYPE x counter\nx 2\n")])
    assert merged.skipped == {"two": 1}
    check_families(merged.text)
    assert parsed(merged.text) == {"x": {(("instance", "one"),): 1}}


def test_the_same_series_from_two_sources_comes_once() -> None:
    merged = merge([("one", 'up{instance="x"} 1\n'), ("two", 'up{instance="x"} 0\n')])
    assert parsed(merged.text) == {"up": {(("instance", "x"),): 1}}
    assert merged.skipped == {"two": 1}


def test_nothing_is_nothing() -> None:
    assert merge([]).text == ""
    assert merge([("silent", ""), ("comments", "# just words\n\n")]).text == ""


@given(st.lists(st.tuples(st.text(max_size=20), st.text(max_size=300)), max_size=4))
def test_any_text_merges_into_something_valid(sources: list[tuple[str, str]]) -> None:
    text = merge([*sources, ("known", exposition(1.5))]).text
    check_families(text)
    assert parsed(text)["depth"][(("instance", "known"),)] == 1.5


@given(st.text(max_size=40))
def test_any_instance_name_is_escaped(name: str) -> None:
    (family,) = text_string_to_metric_families(merge([(name, "x 1\n")]).text)
    assert family.samples[0].labels["instance"] == name
