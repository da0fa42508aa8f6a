"""Questions asked together: one that takes long keeps the others of a process from being begun, whatever its end."""

from __future__ import annotations

import pytest

from cohort.services.gateway.text import template_process
from cohort.services.gateway.text.bounded_process import ANSWER, BoundedProcess, Ended, Limits

LOOP = "{% for each in range(99999) %}{% endfor %}"
SOURCE = f"{{% for each in range([0, 20, 99999][messages | length]) %}}{LOOP}{{% endfor %}}done"


@pytest.fixture(scope="module")
def process() -> BoundedProcess:
    about = {"source": SOURCE, "special_tokens": {}}
    return BoundedProcess(template_process.__name__, about, Limits(1.0, 256 << 20, 5.0), "broken")


def chat(messages: int) -> bytes:
    return b'{"messages": [%b], "add_generation_prompt": true, "variables": {}}' % b",".join([b"{}"] * messages)


def test_what_comes_with_a_slow_question_is_not_begun_and_can_be_asked_again(process: BoundedProcess) -> None:
    quick, slow = chat(0), chat(1)
    assert process.call_together([slow, quick, slow]) == [(ANSWER, b"done"), None, None]
    assert process.call_together([quick]) == [(ANSWER, b"done")]


def test_a_question_that_ends_the_process_has_the_blame_alone(process: BoundedProcess) -> None:
    quick, endless = chat(0), chat(2)
    ended, not_begun = process.call_together([endless, quick])
    assert isinstance(ended, Ended) and "processor time" in ended.why and not_begun is None
    with pytest.raises(Ended):
        process.call(endless)
    assert process.call(quick) == (ANSWER, b"done")
