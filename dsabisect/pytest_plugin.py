"""The goldens in other test suites: a fixture with the set, and an assertion that says where a kernel is wrong.

    from dsabisect.pytest_plugin import assert_matches_golden

    def test_my_kernel(dsabisect_goldens):
        case = dsabisect_goldens.by_id["logits-native-h64-n2-causal"]
        inputs = dsabisect_goldens.inputs(case)                  # tensors by name: docs/design.md
        assert_matches_golden(case, logits=my_kernel(**inputs))

pytest loads this module by its entry point (pytest11); torch is imported only when it is used.
"""

from __future__ import annotations

from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from torch import Tensor

    from dsabisect.model import Case, Comparison
    from dsabisect.outside.golden import GoldenSet

OPTION = "--dsabisect-golden"
_folders: tuple[Path, ...] = ()


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "folder of a golden set of dsabisect; may be repeated (default: the one that comes with it)"
    parser.getgroup("dsabisect").addoption(OPTION, action="append", default=[], type=Path, help=text)


def pytest_configure(config: pytest.Config) -> None:
    global _folders
    _folders = tuple(config.getoption(OPTION, default=()))


@pytest.fixture(scope="session")
def dsabisect_goldens() -> GoldenSet:
    """The golden set: ``by_id``, ``cases(suite)``, ``inputs(case, poison="a")``, ``golden(id)``; every hash checked."""
    return _loaded(_folders)


@lru_cache(maxsize=4)
def _loaded(folders: tuple[Path, ...]) -> GoldenSet:
    from dsabisect.outside import golden

    return golden.load(folders)


@cache
def _sound(folders: tuple[Path, ...], id: str) -> bool:
    """Its negative controls are rejected: run once for each content of the set, kept in the cache folder."""
    from dsabisect.outside import golden, store

    goldens = _loaded(folders)
    return golden.verify_controls(goldens, [goldens.by_id[id]], store.work_root() / "controls") > 0


def assert_matches_golden(
    case: Case | str, *, logits: Tensor | None = None, topk: Tensor | None = None, goldens: GoldenSet | None = None,
    **outputs: Tensor,
) -> None:  # fmt: skip
    """Compare outputs of a kernel with the golden of ``case`` (an id or a Case); AssertionError says what, where, why.

    ``logits`` [rows, width] floats, ``topk`` [rows, K] integers; the stage quant takes q_fp8, q_scale, k_fp8, k_scale,
    the stage metadata takes lens. Tensors may be on a GPU: they are compared there.

    Raises:
        AssertionError: a comparison fails, with stage, rule, row, position, allowed and seen value, and the facets.
        GoldenError: no such case, or its goldens cannot be trusted.
    """
    __tracebackhide__ = True
    from dsabisect.indexer import compare

    given = {"logits": logits, "topk": topk, **outputs}
    id = case if isinstance(case, str) else case.id
    loaded = goldens or _loaded(_folders)
    golden = loaded.golden(id)
    if goldens is None:
        _sound(_folders, id)
    run = {name: value for name, value in given.items() if value is not None}
    failed = [c for c in compare.compare(loaded.by_id[id], golden, [run], tuple(run)) if not c.ok]
    if failed:
        raise AssertionError(_message(loaded.by_id[id], failed, golden, run))


def _message(case: Case, failed: list[Comparison], golden: Any, run: dict[str, Tensor]) -> str:
    lines = [f"{case.id} does not match its golden"]
    for comparison in failed:
        where = ", ".join(f"{name} {value}" for name, value in (comparison.worst_at or {}).items())
        lines.append(
            f"  stage {comparison.stage.value}, rule {comparison.name}" + (f": worst at {where}" if where else "")
        )
        lines += [f"    {text}" for text in _values(comparison, golden, run)]
    lines.append("  facets: " + ", ".join(f"{name}={value}" for name, value in case.facets.items()))
    lines.append("  rules and tolerances: docs/verdicts.md of dsabisect")
    return "\n".join(lines)


def _values(comparison: Comparison, golden: Any, run: dict[str, Tensor]) -> list[str]:
    metrics, at = comparison.metrics, comparison.worst_at or {}
    seen = metrics.get("row_error", metrics.get("max"))
    told = []
    if seen is not None and "max" in comparison.tolerance:
        told.append(f"seen {seen:.3g}, allowed {comparison.tolerance['max']:.3g}")
    if "position" in at and "logits" in run and "logits" in golden:
        start, length = golden["row_start"], golden["row_len"]
        low, inside = int(start[at["row"]]), at["position"] - int(start[at["row"]])
        if 0 <= inside < int(length[at["row"]]):
            want = float(golden["logits"][int(length[: at["row"]].sum()) + inside])
            got = float(run["logits"][at["row"], at["position"]])
            told.append(f"logits[{at['row']}, {at['position']}] is {got:.9g}, golden {want:.9g} (valid from {low})")
    shown = {name: value for name, value in metrics.items() if name not in ("row_error", "allowed")}
    told.append(", ".join(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
                          for name, value in shown.items()))  # fmt: skip
    return told
