"""The default preset in a cache that does not hold what was let in: tokens are those of `transformers.generate`.

A file of its own, so that it runs beside `test_golden.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.e2e.conftest import SENTENCES
from tests.e2e.equality.golden import golden_outputs, kv_bytes
from tests.e2e.equality.test_golden import SHORT_SIGHTED, ask, compare
from tests.e2e.pipeline import Pipeline
from tests.examples import another_of_its_kind

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]


@another_of_its_kind()
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_the_default_preempts(tmp_path: Path, small_model: Path, preemption: str) -> None:
    """Responses of six blocks, every one expected to end at once: the cache does not hold what was let in."""
    tokenizer = Tokenizer.from_file(str(small_model / "tokenizer.json"))
    wanted = golden_outputs(small_model, [tokenizer.encode(text).ids for text in SENTENCES], 96)
    overrides = {
        **SHORT_SIGHTED,
        "engine": {"preemption": preemption},
        "kv": {"memory_bytes": kv_bytes(small_model, 56)},
    }
    made = Pipeline(tmp_path, small_model, overrides)
    made.held.add("decode-0")
    with made as pipeline:
        assert pipeline.config.name == "cohort"
        compare(wanted, pipeline.complete_together([ask(g) for g in wanted], "decode-0"))
        pipeline.wait_for("decode-0", "preemptions_total", 1)
        pipeline.wait_told("prefill-0")
        assert pipeline.heard("prefill-0").get("steps_total", 0.0) == 0.0, "it stands by"
        pipeline.assert_nothing_left()
