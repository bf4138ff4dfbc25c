"""The grid of cases (DOMAIN section 5): facets that a gate can test are crossed, shapes and data kinds are sampled.

smoke: seconds on a CPU; every facet and every data kind. default: adds long and wide batches. full: adds the longest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
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
EXTEND = {"draft_extend": [1, 2, 1], "prefill": [17, 129, 3]}  # query tokens; elsewhere next_n each
SHORT, LONG, LONGEST = [300, 129, 65], [2049, 257, 64], [4097, 2048, 63]  # ragged, around the borders of pages


def _end_to_end() -> Iterator[Case]:
    for rope, heads, (mode, next_n) in product(ROPES, HEADS, MODES):
        yield _activations(SUITES, rope, heads, mode, next_n, "gaussian", SHORT)
        if heads == 64 and mode != "draft_extend":
            yield _activations(SUITES[1:], rope, heads, mode, next_n, "correlated", LONG, topk=512)
    for rope in ROPES:
        yield _activations(SUITES[1:], rope, 64, "decode", 1, "gaussian", LONGEST, hidden=512, topk=2048)


def _activations(
    suites: tuple[str, ...], rope: str, heads: int, mode: str, next_n: int, data: str, lens: list[int], *,
    hidden: int = 256, topk: int = 64,
) -> Case:  # fmt: skip
    facets: dict[str, Facet] = {"rope": rope, "heads": heads, "mode": mode, "data": data}
    facets |= {"layout": "ragged"} if mode == "prefill" else {"next_n": next_n}
    shape = {
        "seq_lens": lens, "extend_lens": EXTEND.get(mode, [next_n] * len(lens)), "hidden": hidden,
        "q_lora_rank": hidden // 2, "topk": topk, "max_position": 4096 if max(lens) <= 4096 else 8192,
    }  # fmt: skip
    name = mode if mode != "target_verify" else f"verify-n{next_n}"
    tag = "" if lens is SHORT else f"-{data}" if lens is LONG else "-long"
    return _case(f"e2e-{rope}-h{heads}-{name}{tag}", Stage.END_TO_END, suites, facets, shape)


KINDS = ("correlated", "negative", "duplicated", "tiny", "saturating")
EDGES = [1, 63, 64, 65, 255, 256, 257]


def _logits() -> Iterator[Case]:
    for layout, heads, next_n in product(("native", "expanded"), HEADS, (1, 2, 4)):
        for lens in ("causal", "full") if layout == "native" and next_n > 1 else ("causal",):
            yield _paged(SUITES, layout, heads, next_n, [300, 129, 64, 1 + next_n], lens, lens=lens)
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
        yield _paged(SUITES[2:], layout, heads, 2, [16385, 4097, 2048], "long")


def _paged(
    suites: tuple[str, ...], layout: str, heads: int, next_n: int, context: list[int], tag: str, *,
    lens: str = "causal", data: str = "gaussian",
) -> Case:  # fmt: skip
    facets: dict[str, Facet] = {
        "layout": layout, "heads": heads, "next_n": next_n, "lens": lens, "page": 64, "data": data,
    }  # fmt: skip
    name = f"logits-{layout}-h{heads}-n{next_n}-{tag}"
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


def _topk() -> Iterator[Case]:
    for data in ("gaussian", "ties", "plateau", "short"):
        lens = [17, 1, 63] if data == "short" else [300, 129, 64, 63, 1]
        yield _case(f"topk-{data}", Stage.TOPK, SUITES, {"data": data}, {"row_lens": lens, "topk": 64})
    shape = {"row_lens": [4097, 2048, 2049, 2047], "topk": 2048}
    yield _case("topk-2048", Stage.TOPK, SUITES[1:], {"data": "gaussian"}, shape)


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
