"""Claude Code and Codex against a gateway: each reads a file, edits it and runs a command, in a scripted session.

The model is a double with the default model's tokenizer and a context of 64k tokens: its n-th answer is the n-th call
of the script, by the results of tools that the prompt has. All that agents meet is the gateway's own: bodies with
dozens of tools, the chat template, calls read out of the text, streams, and results that come back. The programs are
large and no part of the project's environment: without them (`client_scripts.py`) their sessions are skipped, and what
they send is tested by requests in their form.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cohort.common.types import Request
from tests.e2e.clients.client_scripts import program_of
from tests.services.gateway.conftest import OpenSite, Site, model_dir, open_site, real_model_dir  # noqa: F401
from tests.services.gateway.named_events import parse_named
from tests.services.gateway.tiny_model import write_model

CONTEXT = 65_536
TIMEOUT_S = 300.0
TASK = "Change the greeting in hello.py and run it."
LAST = "It says goodbye now."
TEMPLATE = (
    "{%- if tools %}{{- '<|im_start|>tools\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}"
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}"
    "{%- for call in message.tool_calls or [] %}{{- '<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}"
    "{%- endfor %}{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"
)
PATCH = """apply_patch <<'EOF'
*** Begin Patch
*** Update File: hello.py
@@
-print('hello')
+print('goodbye')
*** End Patch
EOF
"""
Call = tuple[str, Mapping[str, Any]]


@pytest.fixture(scope="module")
def agent(real_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    folder = write_model(tmp_path_factory.mktemp("models") / "agent", template=TEMPLATE)
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(real_model_dir / name, folder / name)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": CONTEXT}))
    return folder


class Double:
    """The model. `prompts`: what it was asked."""

    def __init__(self, calls: list[Call]) -> None:
        self.prompts: list[str] = []
        self.site: Site | None = None
        self._answers = [f"<tool_call>\n{json.dumps({'name': n, 'arguments': a})}\n</tool_call>" for n, a in calls]
        self._answers.append(LAST)

    def __call__(self, request: Request) -> list[int]:
        assert self.site is not None
        prompt = self.site.tokenizer.decode(request.tokens, skip_special=False)
        self.prompts.append(prompt)
        answer = self._answers[prompt.count("<|im_start|>tool\n")] if "<|im_start|>tools\n" in prompt else "A title"
        return self.site.tokenizer.encode(f"{answer}<|im_end|>", special_tokens=False)


async def run(command: list[str], folder: Path, environment: Mapping[str, str]) -> str:
    """What the program wrote, with nothing of this process's environment but where programs are."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env={"HOME": str(folder.parent), "PATH": os.environ["PATH"], **environment},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        told, problems = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, f"ended with {process.returncode}: {told[-3000:]!r} {problems[-3000:]!r}"
    return told.decode()


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "hello.py").write_text("print('hello')\n")
    return folder


def assert_worked(double: Double, work: Path) -> None:
    """What the agent was to do was done, and the model saw the results."""
    assert (work / "hello.py").read_text() == "print('goodbye')\n"
    assert len(double.prompts) >= 4 and "print('hello')" in double.prompts[-1].rpartition(TASK)[2]
    assert "goodbye" in double.prompts[-1].rpartition("<|im_start|>tool\n")[2]


@pytest.mark.slow
async def test_claude_code_reads_edits_and_runs(open_site: OpenSite, agent: Path, work: Path) -> None:  # noqa: F811
    program, file = program_of("claude-code", "claude"), str(work / "hello.py")
    double = Double(
        [
            ("Read", {"file_path": file}),
            ("Edit", {"file_path": file, "old_string": "hello", "new_string": "goodbye"}),
            ("Bash", {"command": "python3 hello.py", "description": "Runs it"}),
        ]
    )
    async with open_site(double, model=agent) as double.site:
        environment = {
            "ANTHROPIC_BASE_URL": double.site.url,
            "ANTHROPIC_API_KEY": "none",
            "ANTHROPIC_MODEL": "agent",
            "ANTHROPIC_SMALL_FAST_MODEL": "agent",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
        }
        options = ["--output-format", "json", "--allowedTools", "Read,Edit,Bash"]
        told = json.loads(await run([program, "-p", TASK, *options], work, environment))
    assert (told["result"], told["is_error"]) == (LAST, False)
    assert_worked(double, work)


@pytest.mark.slow
async def test_codex_reads_edits_and_runs(open_site: OpenSite, agent: Path, work: Path) -> None:  # noqa: F811
    program = program_of("codex", "codex")
    commands = ("cat hello.py", PATCH, "python3 hello.py")
    double = Double([("exec_command", {"cmd": command}) for command in commands])
    async with open_site(double, model=agent) as double.site:
        home = work.parent / ".codex"
        home.mkdir()
        (home / "config.toml").write_text(
            f'model = "agent"\nmodel_provider = "cohort"\nmodel_context_window = {CONTEXT}\n'
            f'[model_providers.cohort]\nname = "Cohort"\nbase_url = "{double.site.url}/v1"\nwire_api = "responses"\n'
        )
        options = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
        told = await run([program, "exec", *options, TASK], work, {"CODEX_HOME": str(home)})
    assert told.strip() == LAST
    assert_worked(double, work)


def _schema(*names: str) -> dict[str, Any]:
    properties = {name: {"type": "string", "description": name} for name in names}
    more = {"$schema": "https://json-schema.org/draft/2020-12/schema", "additionalProperties": False}
    return {"type": "object", "properties": properties, "required": [names[0]], **more}


async def test_what_claude_code_sends_is_answered(open_site: OpenSite, agent: Path) -> None:  # noqa: F811
    """Bodies as of its release 2.1, with words left out."""
    double = Double([("Read", {"file_path": "/w/hello.py"}), ("Bash", {"command": "ls"})])
    kept = {"cache_control": {"type": "ephemeral"}}
    body = {
        "model": "agent",
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: none"},
            {"type": "text", "text": "Help.", **kept},
        ],
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": "<system-reminder>"}, {"type": "text", "text": TASK}],
            },
            {"role": "system", "content": "Agent types that are there:"},
        ],
        "tools": [
            {"name": "Read", "description": "Reads a file.", "input_schema": _schema("file_path", "pages")},
            {"name": "Bash", "description": "Runs.", "input_schema": _schema("command", "description")},
        ],
        "metadata": {"user_id": '{"device_id":"0","account_uuid":"","session_id":"0"}'},
        "max_tokens": 32_000,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
    }
    async with open_site(double, model=agent) as double.site:
        for name, argument in (("Read", "file_path"), ("Bash", "command")):
            url = f"{double.site.url}/v1/messages?beta=true"
            headers = {"anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14", "x-api-key": "none"}
            async with double.site.session.post(url, json=body, headers=headers) as response:
                assert response.status == 200, await response.text()
                events = parse_named(await response.read())
            [call] = [each["content_block"] for each in events if each["type"] == "content_block_start"]
            deltas = [each["delta"] for each in events if each["type"] == "content_block_delta"]
            made = json.loads("".join(delta["partial_json"] for delta in deltas))
            assert (call["type"], call["name"], list(made)) == ("tool_use", name, [argument])
            result = {"type": "tool_result", "tool_use_id": call["id"], "content": "1\tprint('hello')", **kept}
            body["messages"] += [
                {"role": "assistant", "content": [{**call, "input": made}]},
                {"role": "user", "content": [result]},
            ]
    assert "1\tprint('hello')" in double.prompts[-1]


async def test_what_codex_sends_is_answered(open_site: OpenSite, agent: Path) -> None:  # noqa: F811
    """Bodies as of its release 0.171, with words left out."""
    double = Double([("exec_command", {"cmd": "cat hello.py"}), ("exec_command", {"cmd": PATCH})])
    tool = {"type": "function", "name": "exec_command", "description": "Runs.", "strict": False}
    body = {
        "model": "agent",
        "input": [
            {"type": "message", "id": "msg_0", "role": role, "content": [{"type": "input_text", "text": text}]}
            for role, text in (("developer", "You code."), ("user", "<environment_context>"), ("user", TASK))
        ],
        "tools": [
            {**tool, "parameters": _schema("cmd", "workdir")},
            {"type": "namespace", "name": "multi_agent_v1", "description": "Agents.", "tools": [tool]},
            {"type": "web_search", "external_web_access": False},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0",
        "client_metadata": {"session_id": "0"},
    }
    async with open_site(double, model=agent) as double.site:
        for command in ("cat hello.py", PATCH):
            async with double.site.session.post(f"{double.site.url}/v1/responses", json=body) as response:
                assert response.status == 200, await response.text()
                events = parse_named(await response.read())
            [call] = events[-1]["response"]["output"]
            assert (call["type"], json.loads(call["arguments"])) == ("function_call", {"cmd": command})
            output = {
                "type": "function_call_output",
                "id": "fco_0",
                "call_id": call["call_id"],
                "output": "Exit code: 0",
            }
            body["input"] += [call, output]
    assert "Exit code: 0" in double.prompts[-1] and "multi_agent" not in double.prompts[-1]
