"""Constants that a figure chose are listed once, as they stand in the code, and what rests on them does not count."""

from __future__ import annotations

import re
from pathlib import Path

from cohort.services.simulator.figures.figure import Standing, expanded, shipped_constants
from cohort.services.simulator.reproduce.reproduce import all_figures

ROOT = Path(__file__).parents[4]


def test_the_listed_constants_have_their_value_in_the_file() -> None:
    for each in shipped_constants():
        text = (ROOT / each.file).read_text(encoding="utf-8")
        assigned = re.findall(rf"\b{each.name}\b(?:: \w+)?\s*[=:]\s*([\w.]+)", text)
        assert assigned and set(assigned) == {each.value}, each.name


def test_every_figure_that_chose_a_constant_is_listed_with_it() -> None:
    anchors = {figure.id for figure in all_figures() if figure.standing is Standing.ANCHOR}
    assert anchors == {name for each in shipped_constants() for name in expanded(each.anchors)}


def test_the_rows_of_a_constant_are_figures_and_its_anchors_are_among_them() -> None:
    known = [figure.id for figure in all_figures()]
    for each in shipped_constants():
        for begin in (*expanded(each.rows), *expanded(each.without)):
            assert any(name.startswith(begin) for name in known), begin
        assert all(each.is_under(name) for name in expanded(each.anchors))


def test_rows_rest_on_what_their_engines_and_loads_have() -> None:
    under = {
        name: [each.name for each in shipped_constants() if each.is_under(name)]
        for name in (
            "bucketserve-5a-mixed-uellm",
            "dynaserve-table1-code-disaggregated-p50-tbt",
            "dynaserve-table1-reasoning-unified-p99-tbt",
            "dynaserve-table2-tokens-colocated",
            "ecoserve-1-kv-sd",
            "ecoserve-1-fastgen-vllm",
        )
    }
    assert list(under.values()) == [
        [],
        [],
        ["MIXED_SHARE"],
        ["MIXED_SHARE", "HYBRID_ANSWER"],
        ["_STEP_S"],
        ["_STEP_S", "headroom"],
    ]
