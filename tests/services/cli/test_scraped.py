"""Metrics as a terminal reads them: sums."""

from __future__ import annotations

from cohort.services.cli.scraped import Scraped


def test_sums_by_labels() -> None:
    scraped = Scraped('a_total{class="rt",k="1"} 3\na_total{class="rt",k="2"} 4\na_total{class="be",k="1"} 5\nb NaN\n')
    assert scraped.total("a_total") == 12 and scraped.total("a_total", **{"class": "rt"}) == 7
    assert scraped.total("absent") == 0 and scraped.total("b") == 0
