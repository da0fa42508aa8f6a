"""The texts of `--workload NAME`: prompts whose answers repeat them more or less, made here and not read from a file.

Called once at start by `options`. Pure: the same seed makes the same texts on any machine. What is asked decides how
much of an answer stands in its prompt already, which is what drafts by lookup live on: all of it where text is quoted
or code is edited, some where a question is answered from passages, nothing in free questions.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Literal, get_args

from cohort.services.bench.http.load.datasets import DatasetRow

TextWorkload = Literal["quote", "edit", "retrieval", "chat"]
TEXT_WORKLOADS: tuple[TextWorkload, ...] = get_args(TextWorkload)
_ROWS = 32
"""Different prompts of a workload; more requests begin anew."""

_PLACES = (
    "Harbour Street",
    "the old mill",
    "Lindenfeld",
    "the north quay",
    "Marsh Lane",
    "Upper Dale",
    "Station Square",
)
_PEOPLE = ("Ada Brandt", "Jonas Keller", "Mira Okafor", "Piet van Dam", "Rosa Lind", "Samir Haddad", "Tilda Berg")
_THINGS = ("pump", "lift", "boiler", "signal", "conveyor", "cold store", "crane", "compressor")
_FINDINGS = (
    "was found to leak at the lower seal",
    "stopped twice without a warning",
    "ran hotter than the plan allows",
    "needed a new belt after the inspection",
    "was cleaned and put back into service",
    "made a noise that nobody could explain",
)
_RESULTS = (
    "The repair took {hours} hours and cost {cost} euros.",
    "A second visit is planned in {hours} weeks, at {cost} euros.",
    "The part was ordered for {cost} euros and comes in {hours} days.",
)
_NOUNS = ("order", "invoice", "customer", "parcel", "ticket", "account", "sensor", "route")
_VERBS = ("load", "check", "count", "merge", "sort", "print")
_TOPICS = (
    "the tides",
    "sourdough bread",
    "a bicycle gear",
    "compound interest",
    "photosynthesis",
    "the printing press",
    "a heat pump",
    "chess openings",
    "migrating birds",
    "a violin",
    "vaccines",
    "the water cycle",
    "a compiler",
    "public libraries",
    "earthquakes",
    "good sleep",
)
_QUESTIONS = ("Explain {topic} to somebody who has never heard of it.", "Write a short story in which {topic} matters.")


def rows_of(name: TextWorkload, seed: int) -> tuple[DatasetRow, ...]:
    """Its prompts, each a chat of one turn whose category is the workload's name."""
    make: Callable[[random.Random, int], str] = {
        "quote": _quote,
        "edit": _edit,
        "retrieval": _retrieval,
        "chat": _chat,
    }[name]
    chance = random.Random(f"{seed} {name}")
    return tuple([DatasetRow((("user", make(chance, index)),), category=name) for index in range(_ROWS)])


def _note(chance: random.Random) -> str:
    """Three sentences about one machine."""
    thing, place = chance.choice(_THINGS), chance.choice(_PLACES)
    result = chance.choice(_RESULTS).format(hours=chance.randint(2, 30), cost=chance.randint(40, 4000))
    return (
        f"On day {chance.randint(1, 365)} {chance.choice(_PEOPLE)} visited {place}. "
        f"The {thing} with number {chance.randint(1000, 9999)} {chance.choice(_FINDINGS)}. {result}"
    )


def _quote(chance: random.Random, _: int) -> str:
    report = " ".join([_note(chance) for _ in range(6)])
    return f"Here is a report.\n\n{report}\n\nRepeat the report word for word, without any comment."


def _edit(chance: random.Random, _: int) -> str:
    nouns = chance.sample(_NOUNS, 5)
    functions = []
    for noun in nouns:
        verb, limit = chance.choice(_VERBS), chance.randint(10, 500)
        functions.append(
            f"def {verb}_{noun}s({noun}s, limit={limit}):\n"
            f"    found = []\n"
            f"    for {noun} in {noun}s:\n"
            f"        if {noun}.size > limit:\n"
            f"            found.append({noun})\n"
            f"    return found\n"
        )
    code = "\n\n".join(functions)
    return (
        f"```python\n{code}```\n\nRename the variable found to chosen in all of these functions. "
        "Answer with the whole file and nothing else."
    )


def _retrieval(chance: random.Random, _: int) -> str:
    notes = [_note(chance) for _ in range(8)]
    passages = "\n".join([f"[{number}] {note}" for number, note in enumerate(notes, start=1)])
    asked = chance.randrange(len(notes))
    who_and_where = notes[asked].split(". ", 1)[0]
    return (
        f"{passages}\n\n{who_and_where}. What was found, and what did it cost? Quote the passage that says so with its "
        "number, then answer in one sentence."
    )


def _chat(_: random.Random, index: int) -> str:
    return _QUESTIONS[index // len(_TOPICS) % len(_QUESTIONS)].format(topic=_TOPICS[index % len(_TOPICS)])
