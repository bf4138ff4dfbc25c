"""The grid of cases (DOMAIN section 5): facets that a gate can test are crossed, shapes and data kinds are sampled.

smoke: seconds on a CPU; the facets of every path in use today and every data kind. default: crosses next_n 3 and 6 too,
and samples lengths, batch sizes and data kinds so that each meets every value of every facet. full: adds the longest
contexts and 4096 rows at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from dsabisect.model import Case, Facet, Stage

ROPES, HEADS = ("neox", "interleaved"), (32, 64)
SUITES = ("smoke", "default", "full")
METADATA_LENS = {"capture_seq_lens": [512, 512, 512], "seq_lens": [300, 129, 64], "accepted": [1, 2, 1]}


def _case(id: str, stage: Stage, suites: tuple[str, ...], facets: dict[str, Facet], shape: dict[str, Any]) -> Case:
    seed = int.from_bytes(hashlib.sha256(id.encode()).digest()[:6], "little")
    return Case(id=id, stage=stage, facets=facets, shape=shape, suites=suites, seed=seed)


MODES = (("decode", 1), ("target_verify", 2), ("target_verify", 4), ("draft_extend", 2), ("prefill", 0))
MORE_MODES = (("target_verify", 3), ("target_verify", 6), ("draft_extend", 4))
PREFILL = [17, 129, 3]  # query tokens
SHORT, LONG, LONGEST = [300, 129, 65], [2049, 257, 64], [4097, 2048, 63]  # ragged, around the borders of pages

EDGES = [1, 63, 64, 65, 255, 256, 257]  # one page and four, and one more or less
BORDERS = [2047, 2048, 2049, 4097]  # the same around K = 2048, and many pages
DEEP, DEEPEST = 16385, 65537
BATCHES = (4, 1, 33, 4)  # of the sampled cases, in turn


def _lengths(batch: int, turn: int) -> list[int]:
    """Ragged context lengths of a sampled batch. Counting ``turn`` up by one a case brings every length around."""
    border = BORDERS[turn % 4]
    if batch == 1:
        return [border]
    if batch == 33:
        return [EDGES[(turn + i) % 7] for i in range(33)]
    return [border, EDGES[(3 * turn) % 7], BORDERS[(turn + 2) % 4], EDGES[(3 * turn + 1) % 7]]


def _end_to_end() -> Iterator[Case]:
    for rope, heads, (mode, next_n) in product(ROPES, HEADS, MODES):
        yield _activations(SUITES, rope, heads, mode, next_n, "gaussian", SHORT)
        if heads == 64 and mode != "draft_extend":
            yield _activations(SUITES[1:], rope, heads, mode, next_n, "correlated", LONG, "-correlated", topk=512)
    for rope in ROPES:
        yield _activations(SUITES[1:], rope, 64, "decode", 1, "gaussian", LONGEST, "-long", hidden=512, topk=2048)
    for rope, heads, (mode, next_n) in product(ROPES, HEADS, MORE_MODES):
        yield _activations(SUITES[1:], rope, heads, mode, next_n, "gaussian", SHORT)
    for row, (mode, next_n) in enumerate((*MODES, *MORE_MODES)):
        for column, (rope, heads) in enumerate(product(ROPES, HEADS)):
            batch, data = BATCHES[(row + column) % 4], ("gaussian", "correlated")[(row + column // 2 + column) % 2]
            lens, topk = _lengths(batch, row + column), 64 if batch == 33 else 512
            yield _activations(SUITES[1:], rope, heads, mode, next_n, data, lens, f"-batch{batch}", topk=topk)
        rope, heads = ROPES[row % 2], HEADS[row // 2 % 2]
        yield _activations(SUITES[2:], rope, heads, mode, next_n, "gaussian", [DEEP, 65], "-deep", topk=2048)
    yield _activations(SUITES[2:], "interleaved", 64, "decode", 1, "correlated", [DEEPEST], "-deepest", topk=2048)


def _activations(
    suites: tuple[str, ...], rope: str, heads: int, mode: str, next_n: int, data: str, lens: list[int], tag: str = "",
    *, hidden: int = 256, topk: int = 64,
) -> Case:  # fmt: skip
    facets: dict[str, Facet] = {"rope": rope, "heads": heads, "mode": mode, "data": data}
    facets |= {"layout": "ragged"} if mode == "prefill" else {"next_n": next_n}
    shortest = next_n if mode != "prefill" else 1  # a draft token sees itself and what is before it
    lens = [max(n, shortest) for n in lens]
    shape = {
        "seq_lens": lens, "extend_lens": _extend(mode, next_n, lens), "hidden": hidden, "q_lora_rank": hidden // 2,
        "topk": topk, "max_position": next(n for n in (4096, 8192, 32768, 131072) if n >= max(lens)),
    }  # fmt: skip
    name = mode
    if mode == "target_verify":
        name = f"verify-n{next_n}"
    elif mode == "draft_extend" and next_n != 2:
        name = f"draft_extend-n{next_n}"
    return _case(f"e2e-{rope}-h{heads}-{name}{tag}", Stage.END_TO_END, suites, facets, shape)


def _extend(mode: str, next_n: int, lens: list[int]) -> list[int]:
    """Query tokens of each sequence."""
    if mode == "prefill":
        asked = PREFILL if len(lens) == 3 else [17] if len(lens) == 1 else [1 + 4 * i % 13 for i in range(len(lens))]
        return [min(pair) for pair in zip(lens, asked, strict=True)]
    return [1 + i % next_n if mode == "draft_extend" else next_n for i in range(len(lens))]


KINDS = ("correlated", "negative", "duplicated", "tiny", "saturating")
DRAFTS, MORE_DRAFTS = (1, 2, 4), (3, 6)


def _static(drafts: Sequence[int]) -> Iterator[tuple[str, str, int, int]]:
    """(layout, lens, next_n, heads) crossed where meaningful: an expanded row is one token, causal by nature."""
    for next_n, (layout, lens) in product(drafts, (("native", "causal"), ("native", "full"), ("expanded", "causal"))):
        if lens == "causal" or next_n > 1:
            for heads in HEADS:
                yield layout, lens, next_n, heads


def _logits() -> Iterator[Case]:
    for drafts, suites in ((DRAFTS, SUITES), (MORE_DRAFTS, SUITES[1:])):
        for layout, lens, next_n, heads in _static(drafts):
            yield _paged(suites, layout, heads, next_n, [300, 129, 64, 1 + next_n], lens, lens=lens)
    for layout, data in product(("native", "expanded"), KINDS):
        smoke = (layout == "native") == (data in ("correlated", "tiny"))  # each kind once
        suites = SUITES if smoke else SUITES[1:]
        yield _paged(suites, layout, 64, 2, [2049, 255, 65], data, data=data)
    for heads, clean in product(HEADS, (False, True)):
        yield _keys(SUITES, heads, 33, 300, "-clean" if clean else "", clean=clean)
    yield _keys(SUITES, 64, 33, 300, "-padded", padding=65)
    for data in KINDS:
        yield _keys(SUITES[1:], 64, 65, 2049, f"-{data}", data=data)
    yield _paged(SUITES[1:], "native", 64, 1, [EDGES[i % len(EDGES)] for i in range(33)], "batch33")
    yield _paged(SUITES[1:], "expanded", 32, 4, [4097], "batch1")
    for layout, heads in product(("native", "expanded"), HEADS):
        yield _paged(SUITES[2:], layout, heads, 2, [DEEP, 4097, 2048], "long")
    yield from _sampled_logits()


def _sampled_logits() -> Iterator[Case]:
    """Every value of every facet with every length, batch size and data kind (tests/indexer/test_cases.py counts)."""
    for turn, (layout, lens, next_n, heads) in enumerate(_static((1, 1, 2, 3, 4, 6))):
        batch, data = BATCHES[(turn + turn // 2) % 4], KINDS[turn % 5]
        context = _lengths(batch, turn)
        yield _paged(SUITES[1:], layout, heads, next_n, context, f"{lens}-{data}-batch{batch}", lens=lens, data=data)
    for turn, (heads, batch) in enumerate(product(HEADS, (1, 4, 33))):
        data = KINDS[turn % 5]
        yield _sequences(SUITES[1:], heads, _lengths(batch, turn), f"-{data}-batch{batch}", data=data)
    deep = (("native", 32, 1, "causal"), ("expanded", 64, 3, "causal"), ("native", 64, 4, "full"),
            ("expanded", 32, 6, "causal"))  # fmt: skip
    for layout, heads, next_n, lens in deep:
        yield _paged(SUITES[2:], layout, heads, next_n, [DEEP, 65], "deep", lens=lens)
    # no more than two drafts, so that the oracle takes seconds and the golden 3 MB
    for layout, heads, next_n, lens in (("native", 64, 1, "causal"), ("expanded", 32, 1, "causal"),
                                        ("native", 32, 2, "full"), ("expanded", 64, 2, "causal")):  # fmt: skip
        yield _paged(SUITES[2:], layout, heads, next_n, [DEEPEST], "deepest", lens=lens)
    for heads in HEADS:
        yield _sequences(SUITES[2:], heads, [DEEP], "-deep")
        yield _sequences(SUITES[2:], heads, [DEEPEST], "-deepest")
    # one bad row among many: what a measure over the whole tensor would not see
    yield _paged(SUITES[2:], "native", 32, 2, [2 + i % 63 for i in range(2048)], "rows4096")


def _paged(
    suites: tuple[str, ...], layout: str, heads: int, next_n: int, context: list[int], tag: str, *,
    lens: str = "causal", data: str = "gaussian",
) -> Case:  # fmt: skip
    facets: dict[str, Facet] = {
        "layout": layout, "heads": heads, "next_n": next_n, "lens": lens, "page": 64, "data": data,
    }  # fmt: skip
    name = f"logits-{layout}-h{heads}-n{next_n}-{tag}"
    context = [max(n, next_n) for n in context]  # a draft token sees itself and what is before it
    return _case(name, Stage.LOGITS, suites, facets, {"context_lens": context})


def _keys(
    suites: tuple[str, ...], heads: int, tokens: int, keys: int, tag: str, *,
    data: str = "gaussian", clean: bool = False, padding: int = 0,
) -> Case:  # fmt: skip
    """Ragged: ``padding`` keys after the last that any token sees are poison."""
    facets: dict[str, Facet] = {"layout": "ragged", "heads": heads, "data": data}
    shape: dict[str, Any] = {"tokens": tokens, "keys": keys, "clean": clean}
    shape |= {"padding": padding} if padding else {}
    return _case(f"logits-ragged-h{heads}{tag}", Stage.LOGITS, suites, facets, shape)


def _sequences(suites: tuple[str, ...], heads: int, lens: list[int], tag: str, *, data: str = "gaussian") -> Case:
    """Ragged: sequences of these many keys, one after the other; two tokens ask in each, one where there are many."""
    facets: dict[str, Facet] = {"layout": "ragged", "heads": heads, "data": data}
    tokens = len(lens) * (1 if len(lens) > 4 else 2)
    shape: dict[str, Any] = {"tokens": tokens, "keys": sum(lens), "clean": False, "sequences": lens}
    return _case(f"logits-ragged-h{heads}{tag}", Stage.LOGITS, suites, facets, shape)


def _topk() -> Iterator[Case]:
    for data in ("gaussian", "ties", "plateau", "short"):
        lens = [17, 1, 63] if data == "short" else [300, 129, 64, 63, 1]
        yield _case(f"topk-{data}", Stage.TOPK, SUITES, {"data": data}, {"row_lens": lens, "topk": 64})
    shape = {"row_lens": [4097, 2048, 2049, 2047], "topk": 2048}
    yield _case("topk-2048", Stage.TOPK, SUITES[1:], {"data": "gaussian"}, shape)
    for data in ("ties", "plateau"):
        yield _case(f"topk-2048-{data}", Stage.TOPK, SUITES[1:], {"data": data}, {"row_lens": [4097], "topk": 2048})
        lens = _lengths(33, 0)
        yield _case(f"topk-{data}-batch33", Stage.TOPK, SUITES[1:], {"data": data}, {"row_lens": lens, "topk": 64})
    yield _case("topk-2048-deep", Stage.TOPK, SUITES[2:], {"data": "ties"}, {"row_lens": [DEEP, 63], "topk": 2048})


def _quant() -> Iterator[Case]:
    for scale, heads in product(("fp32", "ue8m0"), HEADS):
        facets: dict[str, Facet] = {"scale": scale, "heads": heads, "data": "gaussian"}
        yield _case(f"quant-{scale}-h{heads}", Stage.QUANT, SUITES, facets, {"tokens": 9})
    facets = {"scale": "fp32", "heads": 64, "data": "edges"}
    yield _case("quant-fp32-h64-edges", Stage.QUANT, SUITES, facets, {"tokens": 9})
    yield _case("quant-ue8m0-h64-edges", Stage.QUANT, SUITES, {**facets, "scale": "ue8m0"}, {"tokens": 9})


def _metadata() -> Iterator[Case]:
    for mode, arch in product(("decode", "target_verify", "draft_extend"), ("sm90", "sm100")):
        for next_n in (1,) if mode == "decode" else (2, 4):
            yield _replay(f"n{next_n}-{arch}", mode, next_n, arch, "present", "backend")
        for next_n in () if mode == "decode" else MORE_DRAFTS:
            yield _replay(f"n{next_n}-{arch}", mode, next_n, arch, "present", "backend", SUITES[2:])
    # deep_gemm is not installed: the backend falls back (no lengths are asked for), and so must the indexer. Only in
    # `full`: an installation that its maintainers may not mean to support must not decide every verdict.
    for mode, next_n in (("decode", 1), ("target_verify", 2), ("draft_extend", 2)):
        yield _replay("backend-without-deep-gemm", mode, next_n, "sm90", "missing", "backend", ("full",))
    yield _replay("indexer-without-deep-gemm", "decode", 1, "sm90", "missing", "indexer", ("full",))


def _replay(
    tag: str, mode: str, next_n: int, arch: str, package: str, part: str, suites: tuple[str, ...] = SUITES
) -> Case:
    facets: dict[str, Facet] = {
        "mode": mode, "next_n": next_n, "arch": arch, "graph": "replay", "deep_gemm": package, "part": part,
    }  # fmt: skip
    return _case(f"meta-{mode}-{tag}", Stage.METADATA, suites, facets, dict(METADATA_LENS))


CASES: tuple[Case, ...] = (*_end_to_end(), *_logits(), *_topk(), *_quant(), *_metadata())


def cost(case: Case) -> int:
    """Multiply-adds of the logits: roughly what an oracle or a kernel spends on a case. 0 where there are none."""
    if case.stage is Stage.END_TO_END:
        asks = zip(case.shape["seq_lens"], case.shape["extend_lens"], strict=True)
        return sum(int(n) * int(e) for n, e in asks) * int(case.facets["heads"]) * 128
    if case.stage is not Stage.LOGITS:
        return 0
    if case.facets["layout"] == "ragged":
        pairs = int(case.shape["tokens"]) * int(case.shape["keys"])
    else:
        pairs = sum(map(int, case.shape["context_lens"])) * int(case.facets["next_n"])
    return pairs * int(case.facets["heads"]) * 128


def suite(name: str) -> tuple[Case, ...]:
    """Cases of a suite, in the order of the grid. KeyError for a name that is none."""
    if name not in SUITES:
        raise KeyError(name)
    return tuple(case for case in CASES if name in case.suites)
