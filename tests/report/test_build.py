"""The report is a pure function of the journal, and what the shipped schema says."""

from __future__ import annotations

import json
import random
from importlib import resources
from typing import Any

import jsonschema
import pytest
from made_events import (
    STORIES,
    advised,
    begin,
    change,
    end,
    event,
    gate_story,
    observation,
    reach,
    set_story,
    sha,
    transition,
)  # fmt: skip

from dsabisect.model import Action, Recommendation
from dsabisect.report import build

SCHEMA = json.loads(resources.files("dsabisect.report").joinpath("report.schema.json").read_text())
VALID = jsonschema.Draft202012Validator(SCHEMA)


@pytest.mark.parametrize("name", STORIES)
def test_the_schema_holds(name: str) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    VALID.validate(build.build(STORIES[name]()))


@pytest.mark.parametrize("name", STORIES)
def test_any_beginning_of_a_journal_gives_a_report(name: str) -> None:
    """A crash may cut a journal after any event."""
    events = STORIES[name]()
    for length in range(len(events) + 1):
        document = build.build(events[:length])
        VALID.validate(document)
        build.dumps(document)
    assert build.build(events[:-1])["status"] == "unfinished"


@pytest.mark.parametrize("name", STORIES)
def test_replay_is_byte_for_byte(name: str) -> None:
    events = STORIES[name]()
    text = build.dumps(build.build(events))
    lines = [json.dumps(e) for e in events]
    assert build.dumps(build.build([json.loads(line) for line in lines])) == text
    shuffled = [dict(random.Random(7).sample(list(e.items()), len(e))) for e in events]  # the order of keys is nobody's
    assert build.dumps(build.build(shuffled)) == text
    assert text.endswith("}\n")
    assert json.loads(text) == build.build(events)


def test_events_are_not_changed() -> None:
    events = gate_story()
    before = json.dumps(events)
    build.build(events)
    assert json.dumps(events) == before


def test_what_the_document_says() -> None:
    document = build.build(gate_story())
    first = document["first_diverging"]
    assert (first["sha"], first["parent"], first["confirmed"]) == (sha(5), sha(4), True)
    assert (first["title"], first["author"]) == ("Fused prologue (#27705)", "Ada Author")
    assert first["column"] == "fused/e2e-neox"
    assert (first["reason"], first["detail"]) == ("diverged", "end_to_end diff: 0.41 > 0.0021 allowed (row 3)")
    assert document["recommendation"]["gate"]["predicate"] == {"rope": "neox"}
    assert document["range"]["evaluated"] == [sha(p) for p in (0, 9, 4, 7, 5)]
    assert document["notes"] == ["a note"]
    assert (document["status"], document["exit_code"]) == ("first diverging change confirmed", 1)
    ends = document["endpoints"]
    assert ends["diverging"] == ["fused/e2e-neox"]
    assert ends["good"] == {"sha": sha(0), "good_cells": 2, "bad_cells": 0, "skip_cells": 0, "absent_cells": 2}
    assert ends["bad"] == {"sha": sha(9), "good_cells": 3, "bad_cells": 1, "skip_cells": 0, "absent_cells": 0}
    cells = sum(e["event"] == "observation" for e in gate_story())
    seconds = {"run": cells * 0.25, "compare": pytest.approx(cells * 0.05)}
    assert document["timing"] == {"cells": cells, "seconds": seconds}


def test_a_shared_measurement_is_not_counted_as_measured() -> None:
    shared = event("observation", observation(8, "good", "split", "neox", timing={}))
    document = build.build([*gate_story()[:-1], shared, end()])
    assert sha(8) not in document["range"]["evaluated"]
    assert document["timing"]["cells"] == build.build(gate_story())["timing"]["cells"]


# ---- the first ----------------------------------------------------------------------------------------------


def first_of(*transitions: Any, advice: Any = None) -> str | None:
    changes = [json.loads(json.dumps(change(p).__dict__)) for p in range(10)]
    found = build.first_diverging(changes, [event("transition", t) for t in transitions], [], advice)
    return found["sha"] if found else None


def test_the_earliest_single_suspect_is_first() -> None:
    assert first_of(transition([7]), transition([3], rope="interleaved")) == sha(3)


def test_a_later_culprit_is_not_the_first_while_an_earlier_one_is_a_set() -> None:
    assert first_of(transition([2, 3, 4]), transition([9], "split")) is None
    assert build.build(set_story())["first_diverging"] is None


def test_the_headline_is_what_the_advice_is_about() -> None:
    asked = {"columns": ["split/e2e-neox"]}
    assert first_of(transition([2, 3, 4]), transition([9], "split"), advice=asked) == sha(9)
    assert first_of(transition([2, 3, 4]), transition([9], "split"), advice={"columns": ["fused/e2e-neox"]}) is None
    assert first_of(transition([2]), advice={"columns": []}) == sha(2)


def test_confirmed_only_when_every_column_is() -> None:
    told = (transition([5]), transition([5], rope="interleaved", confirmed=False))
    both = [event("transition", t) for t in told]
    changes = [json.loads(json.dumps(change(p).__dict__)) for p in range(10)]
    found = build.first_diverging(changes, both, [])
    assert found is not None
    assert found["confirmed"] is False
    assert found["columns"] == ["fused/e2e-neox", "fused/e2e-interleaved"]


def test_nothing_to_name() -> None:
    assert first_of() is None
    assert first_of(transition([12])) is None  # a commit that the range does not have


# ---- resume -------------------------------------------------------------------------------------------------


def test_a_resumed_run_concludes_anew() -> None:
    before = set_story()
    after = [reach([change(p) for p in range(10)]), event("transition", transition([6])),
             advised(Recommendation(action=Action.REVERT, change=sha(6)), "fused/e2e-neox"), end()]  # fmt: skip
    document = build.build([*before, *after])
    VALID.validate(document)
    assert [t["suspects"] for t in document["transitions"]] == [[sha(6)]]
    assert document["recommendation"]["action"] == "revert"
    assert document["exit_code"] == 1
    assert len(document["observations"]) == sum(e["event"] == "observation" for e in before)


def test_a_resumed_run_in_flight_has_no_end_yet() -> None:
    document = build.build([*set_story(), reach([change(p) for p in range(10)])])
    assert (document["status"], document["exit_code"], document["transitions"]) == ("unfinished", None, [])


def test_stopped_before_anything_was_measured() -> None:
    document = build.build([begin(), end("stopped: EnvironmentFault: no GPU", 128)])
    VALID.validate(document)
    assert document["exit_code"] == 128
    assert document["endpoints"] is None


# ---- foreign values -----------------------------------------------------------------------------------------


def test_json_that_every_reader_takes() -> None:
    """Candidates print what they like: halves of surrogate pairs, NaN."""
    odd = observation(5, "bad", "fused", "neox", detail="\udc80 \ud83d", timing={"run": 1.0}).__dict__
    events = gate_story()[:-1]
    events.append(event("observation", observation(5, "bad", "fused", "neox", detail=odd["detail"])))
    events[-1]["comparisons"][0]["metrics"]["max"] = float("nan")
    text = build.dumps(build.build(events))
    text.encode("utf-8")
    assert "NaN" not in text
    document = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    VALID.validate(document)
    assert document["observations"][-1]["detail"] == "? ?"
    assert document["observations"][-1]["comparisons"][0]["metrics"]["max"] == "nan"


def test_names_of_other_scripts_stay_readable() -> None:
    assert "李雷" in build.dumps(build.build(gate_story(author="李雷")))


# ---- the schema notices -------------------------------------------------------------------------------------


def at(document: Any, *keys: Any) -> Any:
    for key in keys:
        document = document[key]
    return document


@pytest.mark.parametrize(
    ("where", "key", "value"),
    [
        ((), "extra", 1),
        ((), "schema_version", 2),
        (("run",), "bad", "HEAD"),
        (("first_diverging",), "confirmed", "yes"),
        (("first_diverging",), "sha", "abc"),
        (("observations", 0), "verdict", "maybe"),
        (("observations", 0), "reason", "unknown"),
        (("observations", 0), "unheard", ""),
        (("observations", 0, "facets"), "rope", None),
        (("transitions", 0), "suspects", []),
        (("recommendation",), "action", "panic"),
        (("recommendation", "gate", "predicate"), "rope", ["neox"]),
        (("endpoints", "good"), "good_cells", -1),
        (("timing",), "cells", "many"),
    ],
)
def test_a_wrong_document_is_refused(where: tuple[Any, ...], key: str, value: Any) -> None:
    document = build.build(gate_story())
    at(document, *where)[key] = value
    assert not VALID.is_valid(document)


@pytest.mark.parametrize("key", sorted(build.build(gate_story())))
def test_nothing_may_be_left_out(key: str) -> None:
    document = build.build(gate_story())
    del document[key]
    assert not VALID.is_valid(document)


def test_closed_words_of_the_schema_are_those_of_the_model() -> None:
    from dsabisect import model

    of = SCHEMA["$defs"]
    cell = of["observation"]["properties"]
    for enum, shown in (
        (model.Outcome, cell["outcome"]), (model.Verdict, cell["verdict"]), (model.Reason, cell["reason"]),
        (model.Stage, of["comparison"]["properties"]["stage"]),
        (model.TransitionKind, of["transition"]["properties"]["kind"]),
        (model.Action, of["recommendation"]["properties"]["action"]),
    ):  # fmt: skip
        assert set(shown["enum"]) == {word.value for word in enum}


def test_a_set_of_values_in_a_gate() -> None:
    document = build.build(gate_story())
    document["recommendation"]["gate"]["predicate"] = {"arch": ["sm100", "sm120"]}
    VALID.validate(document)
