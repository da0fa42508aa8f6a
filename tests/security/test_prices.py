"""The rule: whatever a request makes us compute or hold is priced before it is begun.

`prices.yaml` has every field with its price and bound. Here the table is compared with what the API parses, so that a
new field without a price fails; each bound is tried at its figure and one beyond, at a gateway with a scripted cluster;
and the heaviest legal requests run beside a polite client in virtual time, where work is counted, never timed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from string import Formatter
from types import SimpleNamespace
from typing import Any

import aiohttp
import msgspec
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from msgspec import inspect

from cohort.common.config import GatewayConfig, KeyLimits, load_config
from cohort.common.engine.step.grammar_masks import STEP_S
from cohort.common.errors import RequestError
from cohort.common.messages import StartSegment
from cohort.common.types import Segment, Slo
from cohort.services.gateway.batches.batch_api import BATCH_BODY_BYTES
from cohort.services.gateway.batches.batch_uploads import FIELD_BYTES
from cohort.services.gateway.bounds import BOUNDS
from cohort.services.gateway.generation.preparation import RequestBudget, output_limits, prepare
from cohort.services.gateway.http.bodies import MAX_LOGPROBS, MAX_STOP_STRINGS
from cohort.services.gateway.openapi_operations import OPERATIONS
from cohort.services.gateway.requests.model_card import ModelCard
from cohort.services.gateway.requests.parsing import Call, parse_completion
from cohort.services.gateway.text.text_budget import INLINE_BYTES, MOST_BYTES, MOST_WAITING, THREAD_BYTES, TextBudget
from tests.examples import examples
from tests.security.neighbours import VirtualWorker, request
from tests.security.prices import HEAD, IN_MIB, PAGE, PRICES, fields, fields_of, on_page, places, table
from tests.services.gateway.conftest import OpenSite, Site
from tests.services.gateway.tiny_model import CONTEXT

ROOT = Path(__file__).resolve().parents[2]
ROW = {row.what: row for row in PRICES.rows}

# -- The table is whole --------------------------------------------------------------------------------------------


def test_every_field_has_a_price() -> None:
    """And every entry a field, each in one place."""
    listed = [place for row in ROW.values() for place in places(row.fields)] + places(PRICES.free)
    assert sorted(listed) == sorted(fields())


def test_every_route_has_a_price() -> None:
    assert sorted(" ".join(PRICES.routes.values()).split()) == sorted(operation.id for operation in OPERATIONS)


def test_every_bound_is_in_the_table() -> None:
    named = {name for row in ROW.values() for _, name, _, _ in Formatter().parse(row.bound) if name}
    assert set(asdict(BOUNDS)) <= {IN_MIB.get(name, name) for name in named}


def test_the_page_has_the_same_table() -> None:
    """`python -m tests.security.prices --write` makes it."""
    page = PAGE.read_text(encoding="utf-8")
    assert on_page(page) == table() and page.count(HEAD) == 1


class _Leaf(msgspec.Struct):
    pages: int


class _Wrapped(msgspec.Struct):
    leaf: _Leaf | None = None
    leaves: str | list[_Leaf] | None = None
    named: dict[str, list[_Leaf]] | None = None
    share: float = 0.5
    choice: bool | None = None


def test_the_walk_goes_through_unions_lists_and_maps() -> None:
    for name in ("leaf", "leaves", "named"):
        kind = next(each.type for each in inspect.type_info(_Wrapped).fields if each.name == name)  # type: ignore[attr-defined]
        assert list(fields_of(kind, set())) == ["_Leaf.pages"]
    assert set(fields_of(inspect.type_info(_Wrapped), set())) == {
        "_Leaf.pages",
        *(f"_Wrapped.{name}" for name in ("leaves", "named", "share", "choice")),
    }


# -- Each bound, at it and beyond it -------------------------------------------------------------------------------

TEXT, CHAT, ANSWER, MESSAGE = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
EMBED = "/v1/embeddings"
FILES, ITEMS, BATCHES = "/v1/files", f"{ANSWER}/x/input_items", "/v1/batches"
ASKED = {"role": "user", "content": "a"}
WHOLE: dict[str, dict[str, Any]] = {
    TEXT: {"prompt": [7], "max_tokens": 1},
    CHAT: {"messages": [ASKED], "max_tokens": 1},
    ANSWER: {"input": "a", "max_output_tokens": 1},
    MESSAGE: {"model": "tiny", "messages": [ASKED], "max_tokens": 1},
    BATCHES: {"endpoint": TEXT, "completion_window": "1h", "input_file_id": "x"},
}
"""Small bodies, to which each case adds its field."""


@dataclass(frozen=True)
class Case:
    """`make(most)` is accepted as the value of the field, with status `accepted`, and `make(most + 1)` refused by a
    message that has `name`, or `named`, and `says`. `limits`, `options`: smaller ones, where the real ones take
    long."""

    row: str
    path: str
    name: str
    make: Callable[[int], Any]
    most: int
    says: str = ""
    named: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    accepted: int = 200

    async def send(self, site: Site, size: int) -> tuple[int, str]:
        url, sized = site.url + self.path, {**self.extra, self.name: self.make(size)}
        if self.path in (FILES, ITEMS) and self.name == "limit":
            asked = site.session.get(url, params=sized)
        elif self.path == FILES:
            form = aiohttp.FormData({"purpose": sized.get("purpose", "batch")})
            form.add_field("file", sized.get("file", "x"), filename="in.jsonl")
            asked = site.session.post(url, data=form)
        else:
            asked = site.session.post(url, json={**WHOLE.get(self.path, {}), **sized})
        async with asked as response:
            return response.status, await response.text()


def ids(count: int) -> list[int]:
    return [7] * count


def text(count: int) -> str:
    return "x" * count


def texts(count: int) -> list[str]:
    return [f"{number:x}" for number in range(count)]


def long_texts(count: int) -> list[str]:
    return [f"{start:x}".ljust(min(256, count - start), "x") for start in range(0, count, 256)]


def named(count: int) -> dict[str, int]:
    return {str(key): 1 for key in range(count)}


def turns(count: int) -> list[dict[str, str]]:
    return [ASKED] * count


def tools(count: int) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": f"f{number}"}} for number in range(count)]


def regex(size: int) -> str:
    """Return an expression whose question to the compiler has so many bytes."""
    return "a" * (size - len(msgspec.json.encode(("regex", ""))))


def lists(depth: int) -> Any:
    return [lists(depth - 1)] if depth > 1 else 0


def fill(path: str) -> Callable[[int], str]:
    """Return a text that fills a body of its path to so many bytes, as its last field."""
    field_ = "user" if path == TEXT else "input_file_id"
    return lambda size: text(size - len(json.dumps({**WHOLE[path], field_: ""})))


# 64 units of the choice, one of the prompt.
WORK: dict[str, Any] = {"says": "300 (gateway.max_request_work)", "options": {"max_request_work": 300}}
BARE: dict[str, Any] = {"add_special_tokens": False}
SCORED: dict[str, Any] = {"logprobs": True}
SMALL: dict[str, Any] = {"says": "gateway.max_body_bytes", "options": {"max_body_bytes": 2000}}
CASES = [
    Case("tokens: of prompts", TEXT, "prompt", ids, CONTEXT - 1, f"length is {CONTEXT} tokens"),
    Case("tokens: of prompts", TEXT, "prompt", ids, 235, **WORK),
    Case("tokens: of answers", TEXT, "max_tokens", int, CONTEXT - 1, f"length is {CONTEXT} tokens", named="answer"),
    Case("tokens: of answers", TEXT, "max_tokens", int, 235, **WORK),
    Case("choices", TEXT, "n", int, BOUNDS.choices),
    Case("choices", TEXT, "best_of", int, BOUNDS.choices),
    Case("choices", TEXT, "prompt", texts, 4, limits={"choices": 4}),
    Case("embeddings", EMBED, "input", texts, 4, limits={"inputs": 4}),
    Case("embeddings", EMBED, "input", ids, 234, **WORK),
    Case("scores", TEXT, "logprobs", int, MAX_LOGPROBS),
    Case(
        "scores",
        TEXT,
        "logprobs",
        int,
        9,
        extra={"prompt": ids(10), "echo": True, "max_tokens": 9},
        named="echo",
        **WORK,
    ),
    Case("scores", TEXT, "prompt_logprobs", int, MAX_LOGPROBS),
    Case("scores", CHAT, "top_logprobs", int, MAX_LOGPROBS, extra=SCORED),
    Case("scores", ANSWER, "top_logprobs", int, MAX_LOGPROBS),
    Case("stops: texts", TEXT, "stop", text, BOUNDS.stop_length),
    Case("stops: texts", TEXT, "stop", long_texts, BOUNDS.stop_characters),
    Case("stops: texts", TEXT, "stop", texts, MAX_STOP_STRINGS),
    Case("stops: texts", MESSAGE, "stop_sequences", lambda count: [text(count)], BOUNDS.stop_length),
    Case("stops: tokens", TEXT, "stop_token_ids", ids, 256),
    Case("biases", TEXT, "logit_bias", named, 300, limits={"logit_biases": 300}),
    Case("grammars: compiled", TEXT, "guided_regex", regex, 99, limits={"grammar_bytes": 99}),
    Case("grammars: compiled", CHAT, "guided_choice", lambda size: [text(size - 15)], 99, limits={"grammar_bytes": 99}),
    Case("tools", CHAT, "tools", tools, 3, limits={"tools": 3}),
    Case("messages", CHAT, "messages", turns, 3, limits={"messages": 3}),
    Case("messages", ANSWER, "input", turns, 3, named="messages", limits={"messages": 3}),
    Case("text: `/tokenize`", "/tokenize", "prompt", "\x01".__mul__, 6, extra=BARE, options={"max_request_work": 6}),
    Case("text: `/tokenize`", "/detokenize", "tokens", ids, 6, options={"max_request_work": 6}),
    Case("metadata", TEXT, "metadata", named, BOUNDS.metadata_keys),
    Case("metadata", ANSWER, "metadata", lambda count: dict.fromkeys(texts(count), ""), 16),
    Case("metadata", ANSWER, "metadata", lambda count: {"a": text(count)}, 512),
    Case("nesting", TEXT, "metadata", lists, BOUNDS.nesting, named="nested"),
    Case("nesting", CHAT, "metadata", lists, BOUNDS.nesting, named="nested"),
    Case("nesting", MESSAGE, "cache_control", lists, BOUNDS.nesting, named="nested"),
    Case("bodies: one", TEXT, "user", fill(TEXT), 2000, named="body", **SMALL),
    Case("bodies: one", BATCHES, "input_file_id", fill(BATCHES), BATCH_BODY_BYTES, named="body", accepted=400),
    Case("listings", ITEMS, "limit", int, 100, accepted=404),
    Case("listings", FILES, "limit", int, 10_000),
    Case("files: one", FILES, "file", text, 50, limits={"file_bytes": 50}),
    Case("files: other fields", FILES, "purpose", lambda size: "batch".ljust(size), FIELD_BYTES),
    Case("adapters", TEXT, "model", lambda other: "other" if other else "tiny", 0, "tiny"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.row} {case.path} {case.name} {case.most}")
async def test_at_the_bound_and_beyond(open_site: OpenSite, case: Case) -> None:
    async with open_site(limits=case.limits, **case.options) as site:
        status, answer = await case.send(site, case.most)
        assert status == case.accepted, answer
        submitted = len(site.manager.submitted)
        status, answer = await case.send(site, case.most + 1)
        assert str(status) == ROW[case.row].beyond, answer
        message = json.loads(answer)["error"]["message"]
        assert (case.named or case.name) in message and (case.says or str(case.most)) in message
        assert len(site.manager.submitted) == submitted


def test_every_bound_is_tried() -> None:
    """Here or in the test that the row names."""
    tried = {case.row for case in CASES} | {row.what for row in ROW.values() if row.tested}
    assert [what for what in ROW if what not in tried] == []
    assert [row.tested for row in ROW.values() if row.tested and not (ROOT / row.tested).is_file()] == []


KEYS_REQUESTS = "the key's requests"


async def test_calls_count_against_their_key(open_site: OpenSite) -> None:
    """The second of a key with one request a minute is refused, whatever it asks for."""
    for operation in (each for each in OPERATIONS if each.id in PRICES.routes[KEYS_REQUESTS].split()):
        async with open_site(api_keys=("k",), keys={"limits": KeyLimits(requests_per_minute=1)}) as site:
            url, body = site.url + operation.path.replace("{id}", "x"), {"model": "tiny", **operation.example}
            asked = {"json": body if operation.body else None, "headers": {"Authorization": "Bearer k"}}
            first = await site.session.request(operation.method, url, **asked)
            second = await site.session.request(operation.method, url, **asked)
            assert first.status != 429
            assert second.status == 429, operation.id


# -- The heaviest legal requests, beside a polite client -----------------------------------------------------------

CONFIG = GatewayConfig()
CARD = ModelCard("tiny", Path("/m"), 8192, 20_000, (2,))
POLITE_TOKENS = 24
OF_TEXTS: Any = len
"""The least tokens of a text; prompts here are token ids."""


@dataclass(frozen=True)
class Heavy:
    """A completion of `prompts` × `n` choices with the longest answers that it may ask for. `grammar`: the seconds that
    its masks take (`virtual_masks.py`); `texts`: bytes of long texts that arrive with it."""

    prompts: int
    n: int
    length: int
    scores: int | None
    echo: bool
    grammar: str = ""
    texts: tuple[int, ...] = ()

    def call(self, max_tokens: int) -> Call:
        random = Random(self.length)
        prompts = [[random.randrange(20_000) for _ in range(self.length)] for _ in range(self.prompts)]
        body = {"prompt": prompts, "n": self.n, "logprobs": self.scores, "echo": self.echo, "max_tokens": max_tokens}
        call = parse_completion(json.dumps(body).encode(), {}, CONFIG, CARD)
        return msgspec.structs.replace(call, sampling=msgspec.structs.replace(call.sampling, grammar=self.grammar))

    def price(self, max_tokens: int) -> int:
        """Return the units of work. Raises `RequestError` beyond a bound, as the gateway does."""
        call, tokens, budget = self.call(max_tokens), [self.length] * self.prompts, RequestBudget(CONFIG, OF_TEXTS)
        budget.check(call)
        return budget.price(call, tokens, output_limits(call, tokens, CONFIG, CARD.max_model_len)).total

    def longest(self) -> int:
        """Return the largest `max_tokens`; 0 if the request has no legal one."""
        try:
            one = self.price(1)
            each = self.price(2) - one
        except RequestError:
            return 0
        return min(CARD.max_model_len - self.length, 1 + (CONFIG.max_request_work - one) // each)

    def segments(self, max_tokens: int, at_s: float) -> list[StartSegment]:
        call, limits = self.call(max_tokens), [max_tokens] * self.prompts
        tokens = [prompt for prompt in call.prompts if isinstance(prompt, list)]
        names: dict[str, Any] = {"base_id": "heavy", "gateway": "gateway", "seed": 1, "card": CARD}
        requests = prepare(call, tokens, arrival_s=at_s, token_limits=limits, **names)
        slo = Slo(ttft_s=CONFIG.rt_ttft_slo_s, tpot_s=CONFIG.rt_tpot_slo_s)
        started = (msgspec.structs.replace(request, slo=slo) for request in requests)
        return [StartSegment(request, [Segment(0, None, "w")], 0, "ipc://gateway") for request in started]


async def bytes_before(texts: tuple[int, ...], own: int) -> int:
    """Return the bytes of long texts that are tokenised before one that comes after them, if it is admitted."""
    budget, jobs, done = TextBudget(), list[tuple[Future[None], Callable[[], None]]](), list[int]()
    before = 0

    def submit(work: Callable[[], None]) -> Future[None]:
        jobs.append((Future(), work))
        return jobs[-1][0]

    budget._threads = SimpleNamespace(submit=submit)  # type: ignore[assignment]

    def note() -> None:
        nonlocal before
        before = sum(done)

    def others(size: int) -> Callable[[], None]:
        return lambda: done.append(min(size, MOST_BYTES))

    async def run(size: int, work: Callable[[], None]) -> None:
        with suppress(RequestError):  # too many wait
            await budget.run(size, work)

    tasks = [asyncio.create_task(run(size, others(size))) for size in texts]
    tasks.append(asyncio.create_task(run(own, note)))
    while not tasks[-1].done():
        await asyncio.sleep(0)
        assert budget.in_work <= MOST_BYTES and budget.waiting_of[""] <= MOST_WAITING
        for job, work in jobs[:1]:
            jobs.pop(0)
            work()
            job.set_result(None)
    return before


@st.composite
def heavy(draw: st.DrawFn) -> Heavy:
    prompts = draw(st.sampled_from([1, 2, 8, 60, BOUNDS.choices]))
    n = draw(st.integers(1, BOUNDS.choices // prompts) | st.just(BOUNDS.choices // prompts))
    length = draw(st.sampled_from([1, 3, 60, 500, 2000, 4000, 8000, 8190]))
    scores = draw(st.sampled_from([None, None, MAX_LOGPROBS]))
    grammar = " ".join(draw(st.lists(st.sampled_from(MASKS_S), max_size=4)))
    texts = draw(st.lists(st.sampled_from([THREAD_BYTES + 1, 1 << 20, CONFIG.max_body_bytes]), max_size=40))
    return Heavy(prompts, n, length, scores, scores is not None and draw(st.booleans()), grammar, tuple(texts))


MASKS_S = ["0.00005", "0.0049", "0.009", "0.039", "0.15"]
"""Of an ordinary schema; just within a request's account; within a step's; within all of a request's; beyond."""


@pytest.mark.parametrize(("preset", "bounds_first"), [("cohort", True), ("unified", False)])
def test_a_polite_client_waits_for_little_work(preset: str, bounds_first: bool) -> None:
    """Between two of its tokens no more is computed for anybody than `engine.prefill_chunk` tokens. Before its first
    no more than twice as many are: the iteration that runs and its own. `unified` promises no first token: it comes
    behind all prompts that came before, computed again where the cache is full (docs/papers/baselines.md). No step
    takes more masks than its account has time for, but one mask, and one beyond the account once a grammar. Of others'
    long texts none is before its own."""
    config = load_config(preset=preset)
    chunk = config.engine.prefill_chunk

    @settings(max_examples=examples(0.3), deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(heavy(), st.floats(0.0, 1.5), st.integers(0, 3))
    @example(Heavy(BOUNDS.choices, 1, 60, None, echo=False), 0.55, 0)
    @example(Heavy(1, BOUNDS.choices, 3900, None, echo=False), 3.5, 0)
    @example(Heavy(1, BOUNDS.choices, 2000, MAX_LOGPROBS, echo=False), 1.13, 0)
    @example(Heavy(1, BOUNDS.choices, 3, None, echo=False, grammar="0.00005 0.15"), 0.55, 0)
    @example(Heavy(1, BOUNDS.choices, 3, None, echo=False, grammar="0.0049", texts=(1 << 20,) * 40), 0.55, 0)
    def holds(attack: Heavy, at_s: float, seed: int) -> None:
        most = attack.longest()
        assume(most)
        attack.price(most)
        with pytest.raises(RequestError):
            attack.price(most + 1)
        prompt = [Random(seed).randrange(20_000) for _ in range(12)]
        polite = [request("polite", prompt, max_tokens=POLITE_TOKENS, at_s=at_s, config=config)]
        worker = VirtualWorker(config)
        run = worker.run([(0.5, attack.segments(most, 0.5)), (at_s, polite)], until="polite")
        first, *later = run.work_between("polite")
        assert max(later) <= chunk
        assert not bounds_first or first <= 2 * chunk
        longest_s = max(map(float, attack.grammar.split()), default=0.0)
        assert all(spent_s <= STEP_S + longest_s for spent_s in worker.masks.spent_s)
        assert sum(spent_s > 2 * STEP_S for spent_s in worker.masks.spent_s) <= 1
        assert asyncio.run(bytes_before(attack.texts, own=INLINE_BYTES)) == 0
        assert asyncio.run(bytes_before(attack.texts, own=THREAD_BYTES + 1)) <= MOST_BYTES + MOST_WAITING

    holds()
