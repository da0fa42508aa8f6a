"""A live pipeline keeps to its own `/openapi.json`, whatever Schemathesis makes of it.

Thousands of requests, valid and invalid, by operation and along links: no 5xx, no hang; every status, type, header,
body and event is one that the schema names; what violates the schema is refused. Skipped unless `COHORT_CLIENTS` names
the FOLDER of `scripts/client_venvs FOLDER schemathesis`. `COHORT_SCHEMA_EXAMPLES` says how many random requests of each
operation come on top of the systematic ones (2 by default: some 4,500 requests in all).

Not asked: that whatever fits the schema is accepted, because rules on more than one field are in no schema.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import openai
import pytest
import torch

from tests.e2e.clients.client_scripts import ROOT, environment_of
from tests.e2e.pipeline import Pipeline
from tests.e2e.tiny_models import qwen2, save_of_bytes
from tests.services.gateway.tiny_model import TEMPLATE

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]

LEAST_CASES = 5000
REQUEST_TIMEOUT_S = 60
RUN_TIMEOUT_S = 3600.0


def test_a_live_pipeline_keeps_to_its_schema(tmp_path: Path) -> None:
    programs = environment_of("schemathesis")
    examples = int(os.environ.get("COHORT_SCHEMA_EXAMPLES", "20"))
    torch.manual_seed(7)
    model = save_of_bytes(qwen2(), tmp_path / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    with Pipeline(tmp_path, model, {"kv": {"memory_bytes": 16 << 20}}, preset="unified") as pipeline:
        command = [str(programs / "schemathesis"), "run", f"{pipeline.url}/openapi.json", "--no-color"]
        command += ["--max-examples", str(examples), "--seed", "1", "--generation-database", "none"]
        command += ["--request-timeout", str(REQUEST_TIMEOUT_S), "--continue-on-failure", "--no-shrink"]
        command += ["--exclude-checks", "positive_data_acceptance"]
        hooks = {"SCHEMATHESIS_HOOKS": "schema_hooks", "PYTHONPATH": str(ROOT / "tests" / "e2e")}
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env={**os.environ, **hooks, "SERVED_MODEL": model.name, **_kept(pipeline, model.name)},
            capture_output=True,
            text=True,
            timeout=RUN_TIMEOUT_S,
        )
        assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
        print(done.stdout[-1500:])  # with -s: how many, in what time
        [cases] = re.findall(r"(\d+) generated, (\d+) passed", done.stdout)
        assert cases[0] == cases[1] and int(cases[0]) >= LEAST_CASES
        (answer,) = pipeline.complete_all([{"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}])
        assert (answer.error, answer.finish) == ("", "length")
        assert not [line for line in _logged(tmp_path) if line.get("event") == "request failed unexpectedly"]
        pipeline.assert_nothing_left()


def _kept(pipeline: Pipeline, model: str) -> dict[str, str]:
    """A file, a batch and a response that are there."""
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "max_tokens": 2}}
    with openai.OpenAI(base_url=f"{pipeline.url}/v1", api_key="none", max_retries=0) as client:
        file = client.files.create(file=("job.jsonl", json.dumps(line).encode()), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        response = client.responses.create(model=model, input="Hi", max_output_tokens=2)
    return {"KEPT_FILES": file.id, "KEPT_BATCHES": batch.id, "KEPT_RESPONSES": response.id}


def _logged(folder: Path) -> list[dict[str, object]]:
    lines = (folder / "gateway.log").read_text(encoding="utf-8", errors="replace").splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]
