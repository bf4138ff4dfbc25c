"""A run that is killed with SIGKILL and resumed says what an undisturbed one says; scripts/kill_test does it 50 times.

The runs of all tests below go two at a time, in the fixture ``results``.
"""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dsabisect.outside import store
from dsabisect.report import build

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "kill_test"


def load(script: Path) -> ModuleType:
    spec = importlib.util.spec_from_loader(script.name, SourceFileLoader(script.name, str(script)))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[script.name] = module  # dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


kill_test: Any = load(SCRIPT)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return kill_test.reference_run(tmp_path_factory.mktemp("kill"))


@pytest.fixture(scope="module")
def results(reference: Any) -> dict[str, Any]:
    folder = reference.out.parent.parent
    random_ = random.Random(3)

    def during(purpose: str) -> Any:
        """Soon after a cell of this purpose was recorded."""
        events = store.read_events(reference.out)
        at = [n for n, e in enumerate(events, 1) if e["event"] == "observation" and e["purpose"] == purpose]
        return kill_test.Instant(lines=random_.choice(at), seconds=random_.uniform(0, 0.15))

    def killed(name: str, *instants: Any, group: bool) -> Callable[[], Any]:
        return lambda: kill_test.trial(reference, folder / name, instants, group=group)

    work: dict[str, Callable[[], Any]] = {
        "searching": killed("searching", during("endpoint"), during("search"), group=False),
        "early": killed("early", kill_test.Instant(seconds=0.3), during("confirm"), group=True),
        "two at once": lambda: kill_test.two_at_once(reference, folder / "together"),
    }
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(work, pool.map(lambda job: job(), work.values()), strict=True))


def test_killed_while_it_searches_and_again_after_it_was_resumed(results: dict[str, Any]) -> None:
    assert results["searching"].kills == 2
    assert results["searching"].faults == []


EARLY = "--resume before there is a journal"


def test_killed_while_it_confirms(results: dict[str, Any]) -> None:
    assert results["early"].kills == 2
    assert [fault for fault in results["early"].faults if not fault.startswith(EARLY)] == []


def test_killed_before_there_is_a_journal(results: dict[str, Any]) -> None:
    assert results["early"].before_journal == 1
    assert [fault for fault in results["early"].faults if fault.startswith(EARLY)] == []


def test_two_runs_at_once_do_not_disturb_each_other(results: dict[str, Any]) -> None:
    assert results["two at once"] == []


# ---- the checks notice what they look for ------------------------------------------------------------------


def copy(reference: Any, folder: Path, change: Callable[[list[dict[str, Any]]], None]) -> Path:
    """A run folder whose journal is the reference's, changed."""
    events = store.read_events(reference.out)
    change(events)
    folder.mkdir()
    (folder / store.JOURNAL).write_text("".join(json.dumps(e) + "\n" for e in events))
    (folder / "report.json").write_text(build.dumps(build.build(store.read_events(folder))))
    return folder


def of_cells(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [e for e in events if e["event"] == "observation"]


def test_an_equal_run_at_another_time_is_equal(reference: Any, tmp_path: Path) -> None:
    def later(events: list[dict[str, Any]]) -> None:
        for cell in of_cells(events):
            cell["timing"] = {name: seconds * 2 for name, seconds in cell["timing"].items()}
            cell["log"] = "other.log"
        events[0]["started"] = events[-1]["finished"] = "2030-01-01T00:00:00+00:00"

    again = copy(reference, tmp_path / "again", later)
    assert (again / "report.json").read_text() != (reference.out / "report.json").read_text()
    assert kill_test.comparable(again) == reference.text
    assert kill_test.twice(again, reference.out) == [] and kill_test.replays(again)


def test_a_cell_that_is_measured_twice_is_noticed(reference: Any, tmp_path: Path) -> None:
    cell = of_cells(store.read_events(reference.out))[3]
    again = copy(reference, tmp_path / "again", lambda events: events.insert(-1, cell))
    assert kill_test.twice(again, reference.out) == [
        f"measured 1 times too often: {cell['purpose']} {cell['sha']} {cell['path']} {cell['case']} "
    ]
    assert kill_test.comparable(again) != reference.text


def test_another_verdict_is_noticed(reference: Any, tmp_path: Path) -> None:
    again = copy(reference, tmp_path / "again", lambda events: of_cells(events)[2].update(verdict="skip"))
    assert "line 5" in kill_test.first_difference(reference.text, kill_test.comparable(again))  # the endpoints' count


def test_a_report_that_is_not_the_journals_is_noticed(reference: Any, tmp_path: Path) -> None:
    again = copy(reference, tmp_path / "again", lambda events: None)
    (again / "report.json").write_text((again / "report.json").read_text().replace('"good"', '"bad"', 1))
    assert not kill_test.replays(again)
