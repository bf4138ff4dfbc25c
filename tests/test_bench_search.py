"""scripts/bench_search: its histories are what they say, and its counts of other tools' evaluations are true."""

from __future__ import annotations

import importlib.util
import math
import sys
from importlib.machinery import SourceFileLoader
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "bench_search"


def load(script: Path) -> ModuleType:
    spec = importlib.util.spec_from_loader(script.name, SourceFileLoader(script.name, str(script)))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[script.name] = module  # dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


bench: Any = load(SCRIPT)


def test_the_repository_is_the_layout(tmp_path: Path) -> None:
    layout = bench.Layout(states=("good", "skip error 1", "bad"), steps=(2,), subjects=("a", "Revert 'ж'", "c"))
    shas = bench.write_repo(tmp_path, layout)
    assert [bench.git(tmp_path, "show", f"{sha}:state").strip() for sha in shas] == list(layout.states)
    assert bench.git(tmp_path, "log", "--reverse", "--format=%s", "main").splitlines() == ["a", "Revert 'ж'", "c"]


@pytest.mark.parametrize("count", [1, 3, 5])
def test_windows_last_and_alternate(count: int) -> None:
    layouts = list(bench.windows(128, count, most=50))
    assert len(layouts) == (113 if count == 1 else 50)
    assert len({layout.states for layout in layouts}) == len(layouts)
    for layout in layouts:
        assert len(layout.steps) == count
        assert all(b - a >= bench.WINDOW for a, b in pairwise((0, *layout.steps, 128)))
        changes = [p for p in range(1, 128) if layout.states[p] != layout.states[p - 1]]
        assert changes == list(layout.steps)
        assert (layout.states[0], layout.states[-1]) == ("good", "bad")
        said = [p for p, subject in enumerate(layout.subjects) if subject.startswith(("Revert", "Reland"))]
        assert said == list(layout.steps[1:])


def test_what_git_says_of_a_plain_history(tmp_path: Path) -> None:
    answer = bench.run_tool("git bisect run", bench.alternating(20, (13,)), tmp_path)
    assert answer.suspects == (13,)
    assert math.floor(math.log2(19)) <= answer.runs <= math.ceil(math.log2(20))


def test_what_git_says_of_a_culprit_inside_a_block(tmp_path: Path) -> None:
    layout = bench.alternating(20, (10,), dict.fromkeys(range(8, 12), "error"))
    answer = bench.run_tool("git bisect run", layout, tmp_path)
    assert answer.suspects == (8, 9, 10, 11, 12)  # everything after the last good one, up to the first bad one
    assert answer.runs >= 6


def test_what_git_says_of_a_history_that_goes_on_and_off(tmp_path: Path) -> None:
    layout = bench.alternating(40, (10, 20, 30))
    assert (layout.breaks, layout.steps) == ((10, 30), (10, 20, 30))
    result = bench.Result(tool="git bisect run")
    answer = bench.run_tool("git bisect run", layout, tmp_path)
    result.add(layout, answer.suspects, answer.suspects, answer.runs)
    assert (result.inside, result.steps) == (1, pytest.approx(1 / 3))


def test_five_runs_for_each_answer_and_the_same_draws_each_time(tmp_path: Path) -> None:
    layout = next(bench.flaky(30, 10, 90))
    answers = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        answers.append(bench.run_tool("majority of 5", layout, tmp_path / name))
    assert answers[0] == answers[1]
    assert answers[0].runs in (20, 25)


def test_flaky_commits_fail_as_often_as_they_say(tmp_path: Path) -> None:
    """Otherwise the table would compare tools on easier histories than it says."""
    shas = bench.write_repo(tmp_path, bench.Layout(states=("flaky 0", "flaky 100"), steps=(1,)))
    bench.git(tmp_path, "checkout", "-q", shas[0])
    (tmp_path / "step").write_text(bench.STEP)
    log, draws = tmp_path / "log", tmp_path / "draws"
    for state, codes in (("flaky 0", {0}), ("flaky 100", {1}), ("flaky 30", {0, 1})):
        log.write_text("")
        draws.write_text("".join(f"{n}\n" for n in range(100)))
        (tmp_path / "state").write_text(state + "\n")
        env = bench.environment(BENCH_LOG=str(log), BENCH_DRAWS=str(draws))
        found = [bench.subprocess.run(["sh", "step"], cwd=tmp_path, env=env).returncode for _ in range(100)]
        assert set(found) == codes
        assert sum(found) == {"flaky 0": 0, "flaky 100": 100, "flaky 30": 30}[state]


def test_our_search_keeps_its_numbers() -> None:
    of = {setting.key: setting for setting in bench.SETTINGS}
    blocks, middle, plain = (bench.ours(of[key]) for key in ("blocks-502", "middle-256", "plain-128"))
    assert blocks.inside == blocks.histories == 501 and blocks.mean <= 12 and blocks.most <= 17
    assert middle.inside == middle.histories == 255 and middle.most <= 25
    assert plain.inside == plain.histories == 127 and plain.most == 7 and plain.steps == 1
