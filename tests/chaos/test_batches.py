"""kill -9 of the gateway in the middle of a batch: the next one goes on, and what was finished stays as it was."""

from __future__ import annotations

import json
import time
import urllib.request
from typing import Any

import openai
import pytest

from cohort.services.gateway.batches.batch_files import folder_of
from cohort.services.gateway.batches.batch_store import BatchStore
from tests.chaos.conftest import whole
from tests.chaos.streams import DECODE
from tests.e2e.pipeline import Pipeline

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]

LINES = 40
NEW_TOKENS = 8


def body(index: int) -> dict[str, Any]:
    return {"prompt": f"{index} and {index + 1} are", "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}


def finished(pipeline: Pipeline, batch_id: str) -> dict[int, bytes]:
    """What a killed gateway left as done, by line."""
    store = BatchStore(folder_of(pipeline.config, "gateway") / "batches.sqlite")
    try:
        return dict(store.results(batch_id, succeeded=True, after=0, page_bytes=1 << 20))
    finally:
        store.close()


def test_a_killed_gateway_continues_its_batch(pipeline: Pipeline) -> None:
    client = openai.OpenAI(base_url=pipeline.url + "/v1", api_key="none", max_retries=0)
    data = b"".join(
        json.dumps({"custom_id": str(index), "method": "POST", "url": "/v1/completions", "body": body(index)}).encode()
        + b"\n"
        for index in range(LINES)
    )
    file = client.files.create(file=("job.jsonl", data), purpose="batch")
    deadline = time.monotonic() + 120
    with pipeline.hold(DECODE) as go_on:
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        go_on(LINES // 2 * NEW_TOKENS)  # the last of them are of lines that are not done
        while (counts := client.batches.retrieve(batch.id).request_counts) is None or counts.completed < LINES // 4:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        pipeline.kill("gateway")
    before = finished(pipeline, batch.id)
    assert LINES // 4 <= len(before) < LINES, "the gateway died too late to interrupt anything"

    whole(pipeline)
    while (batch := client.batches.retrieve(batch.id)).status != "completed":
        assert batch.status in ("in_progress", "finalizing") and time.monotonic() < deadline
        time.sleep(0.05)
    assert batch.request_counts is not None and batch.request_counts.completed == LINES
    lines = client.files.content(str(batch.output_file_id)).content.splitlines()
    answers = [json.loads(line) for line in lines]
    assert [answer["custom_id"] for answer in answers] == [str(index) for index in range(LINES)]
    for number, result in before.items():
        assert lines[number - 1] == result, "a finished line was run again"

    for index in (0, LINES - 1):
        direct = json.load(
            urllib.request.urlopen(
                urllib.request.Request(
                    f"{pipeline.url}/v1/completions",
                    json.dumps(body(index)).encode(),
                    {"Content-Type": "application/json"},
                )
            )
        )
        assert answers[index]["response"]["body"]["choices"][0]["text"] == direct["choices"][0]["text"]
    pipeline.assert_nothing_left()
