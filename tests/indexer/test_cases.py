"""The grid: crossed where a gate must be told apart, sampled elsewhere."""

from __future__ import annotations

from itertools import product

import pytest

from dsabisect.indexer import cases
from dsabisect.model import Case, Stage
from dsabisect.outside import golden

KINDS = {"gaussian", "correlated", "negative", "duplicated", "tiny", "saturating"}


def of(suite: str, stage: Stage) -> list[Case]:
    return [case for case in cases.suite(suite) if case.stage is stage]


def test_ids_and_seeds_are_unique_and_suites_nest() -> None:
    assert len({c.id for c in cases.CASES}) == len({c.seed for c in cases.CASES}) == len(cases.CASES)
    smoke, default, full = (set(c.id for c in cases.suite(name)) for name in cases.SUITES)
    assert smoke < default < full == {c.id for c in cases.CASES}
    with pytest.raises(KeyError):
        cases.suite("huge")


MODES = {("decode", 1), ("target_verify", 2), ("target_verify", 4), ("draft_extend", 2), ("prefill", None)}
MORE = {("target_verify", 3), ("target_verify", 6), ("draft_extend", 4)}


@pytest.mark.parametrize(("suite", "modes"), [("smoke", MODES), ("default", MODES | MORE)])
def test_end_to_end_is_crossed_in_full(suite: str, modes: set[tuple[str, int | None]]) -> None:
    seen = {tuple(c.facets.get(n) for n in ("rope", "heads", "mode", "next_n")) for c in of(suite, Stage.END_TO_END)}
    assert seen == {(rope, heads, *mode) for rope, heads, mode in product(("neox", "interleaved"), (32, 64), modes)}
    assert all(c.facets["layout"] == "ragged" for c in of(suite, Stage.END_TO_END) if c.facets["mode"] == "prefill")


@pytest.mark.parametrize(("suite", "drafts"), [("smoke", (1, 2, 4)), ("default", (1, 2, 3, 4, 6))])
def test_logits_are_crossed_in_full(suite: str, drafts: tuple[int, ...]) -> None:
    paged = {
        (c.facets["layout"], c.facets["heads"], c.facets["next_n"], c.facets["lens"])
        for c in of(suite, Stage.LOGITS) if c.facets["layout"] != "ragged"
    }  # fmt: skip
    wanted = set(product(("native", "expanded"), (32, 64), drafts, ("causal",)))
    assert paged == wanted | set(product(("native",), (32, 64), drafts[1:], ("full",)))
    ragged = {(c.facets["heads"], c.shape["clean"]) for c in of(suite, Stage.LOGITS) if c.facets["layout"] == "ragged"}
    assert ragged == set(product((32, 64), (False, True)))


EDGES = {1, 63, 64, 65, 255, 256, 257, 2047, 2048, 2049, 4097}
BATCHES = {1, 4, 33}
LONGEST = 65537


def lengths(case: Case) -> list[int]:
    """Context lengths. The shortest that has a meaning, next_n, stands for a length of 1."""
    lens = case.shape.get("context_lens") or case.shape.get("seq_lens") or case.shape.get("sequences") or []
    return [1 if n == case.facets.get("next_n") else n for n in lens]


def sampled(suite: str, stage: Stage, names: tuple[str, ...]) -> dict[tuple[object, ...], set[tuple[str, object]]]:
    """(facet, value) → the lengths, batch sizes and data kinds that it is seen with."""
    seen: dict[tuple[object, ...], set[tuple[str, object]]] = {}
    for c in of(suite, stage):
        values = [(n, c.facets[n]) for n in names if n in c.facets]
        if "mode" in c.facets:
            values.append(("mode", (c.facets["mode"], c.facets.get("next_n"))))
        for value in values:
            found = seen.setdefault(value, set())
            found |= {("length", n) for n in lengths(c)} | {("batch", len(lengths(c))), ("data", c.facets["data"])}
    return seen


@pytest.mark.parametrize(
    ("stage", "names", "kinds", "values"),
    [
        (Stage.LOGITS, ("layout", "heads", "next_n", "lens"), KINDS, 3 + 2 + 5 + 2),
        (Stage.END_TO_END, ("rope", "heads"), {"gaussian", "correlated"}, 2 + 2 + 8),
    ],
)
def test_every_value_of_every_facet_meets_every_length_batch_and_data_kind(
    stage: Stage, names: tuple[str, ...], kinds: set[str], values: int
) -> None:
    wanted = {("length", n) for n in EDGES} | {("batch", n) for n in BATCHES} | {("data", kind) for kind in kinds}
    default = sampled("default", stage, names)
    assert len(default) == values
    assert {value: wanted - seen for value, seen in default.items() if wanted - seen} == {}
    full = sampled("full", stage, names)
    assert all(("length", 16385) in seen for seen in full.values())


def test_the_longest_context_meets_every_layout_and_number_of_heads() -> None:
    """With one and two draft tokens: more would take the oracle minutes and the golden a megabyte each."""
    seen = sampled("full", Stage.LOGITS, ("layout", "heads", "next_n", "lens"))
    with_it = {value for value, found in seen.items() if ("length", LONGEST) in found}
    assert with_it == {
        ("layout", "native"), ("layout", "expanded"), ("layout", "ragged"), ("heads", 32), ("heads", 64),
        ("next_n", 1), ("next_n", 2), ("lens", "causal"), ("lens", "full"),
    }  # fmt: skip
    assert any(LONGEST in lengths(c) for c in of("full", Stage.END_TO_END))


def test_batches_are_ragged() -> None:
    """Never uniform: equal lengths hide a row that reads its neighbour's."""
    for c in of("full", Stage.LOGITS) + of("full", Stage.END_TO_END):
        assert len(lengths(c)) <= 1 or len(set(lengths(c))) > 1, c.id


def test_one_case_has_thousands_of_rows() -> None:
    (case,) = [c for c in of("full", Stage.LOGITS) if len(lengths(c)) * int(c.facets.get("next_n", 1)) >= 4096]
    assert int(case.facets["next_n"]) in (1, 2)  # what an SM90 kernel takes


@pytest.mark.parametrize("suite", ["smoke", "default"])
def test_every_kind_of_data_appears(suite: str) -> None:
    assert {c.facets["data"] for c in of(suite, Stage.LOGITS)} == KINDS
    assert {"gaussian", "ties", "plateau", "short"} <= {c.facets["data"] for c in of(suite, Stage.TOPK)}
    assert {(c.facets["scale"], c.facets["data"]) for c in of(suite, Stage.QUANT)} == set(
        product(("fp32", "ue8m0"), ("gaussian", "edges"))
    )


def test_metadata_modes_drafts_and_architectures() -> None:
    seen = {
        (c.facets["mode"], c.facets["next_n"], c.facets["arch"])
        for c in of("smoke", Stage.METADATA) if c.facets["deep_gemm"] == "present"
    }  # fmt: skip
    wanted = {("decode", 1)} | set(product(("target_verify", "draft_extend"), (2, 4)))
    assert seen == {(*mode, arch) for mode, arch in product(wanted, ("sm90", "sm100"))}
    assert {c.facets["next_n"] for c in of("full", Stage.METADATA)} == {1, 2, 3, 4, 6}
    missing = [c for c in of("full", Stage.METADATA) if c.facets["deep_gemm"] == "missing"]
    assert {c.facets["part"] for c in missing} == {"backend", "indexer"}
    assert all(c.suites == ("full",) for c in missing)
    for c in of("smoke", Stage.METADATA):
        assert c.shape["seq_lens"] == [300, 129, 64] and c.shape["accepted"] == [1, 2, 1]


def test_topk_is_a_real_selection_somewhere_in_every_end_to_end_case() -> None:
    assert all(max(c.shape["seq_lens"]) > c.shape["topk"] for c in of("full", Stage.END_TO_END))


def test_shapes_stay_inside_their_tables() -> None:
    for c in of("full", Stage.END_TO_END):
        assert max(c.shape["seq_lens"]) <= c.shape["max_position"]
        assert all(0 < e <= n for e, n in zip(c.shape["extend_lens"], c.shape["seq_lens"], strict=True))
    for c in of("full", Stage.LOGITS):
        if c.facets["layout"] != "ragged":
            assert min(c.shape["context_lens"]) >= int(c.facets["next_n"])


def test_default_has_long_wide_and_single_batches() -> None:
    lens = [c.shape.get("context_lens", c.shape.get("seq_lens", [0])) for c in cases.suite("default")]
    assert {max(n) for n in lens} >= {2049, 4097} and max(max(n) for n in lens) < 16385
    assert {len(n) for n in lens} >= BATCHES
    assert {c.shape["topk"] for c in of("default", Stage.END_TO_END)} >= {64, 512, 2048}


def test_the_floor_is_what_the_grid_holds() -> None:
    """Taking cases away means lowering the floor in the same change, where a reader sees it."""
    assert {name: len(cases.suite(name)) for name in cases.SUITES} == golden.FLOOR
