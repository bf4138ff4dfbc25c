"""The grid of cases: facets crossed where a gate must be told apart, shapes and data kinds sampled (DOMAIN section 5)."""

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


def _end_to_end() -> Iterator[Case]:
    for rope, heads, (mode, next_n) in product(ROPES, HEADS, MODES):
        for suites, data, tag in ((SUITES, "gaussian", ""), (("default", "full"), "correlated", "-correlated")):
            if tag and heads == 32:
                continue
            if tag and mode == "draft_extend":
                continue
            name = mode if mode != "target_verify" else f"verify-n{next_n}"
            long = bool(tag)
            lens = [300, 129, 65] if not long else [2049, 257, 64]
            extend = EXTEND.get(mode, [next_n] * 3)
            facets: dict[str, Facet] = {"rope": rope, "heads": heads, "mode": mode, "data": data}
            facets |= {"layout": "ragged"} if mode == "prefill" else {"next_n": next_n}
            shape = {
                "seq_lens": lens, "extend_lens": extend, "hidden": 256, "q_lora_rank": 128, "topk": 512 if long else 64,
                "max_position": 4096,
            }  # fmt: skip
            yield _case(f"e2e-{rope}-h{heads}-{name}{tag}", Stage.END_TO_END, suites, facets, shape)


def _logits() -> Iterator[Case]:
    for layout, heads, next_n in product(("native", "expanded"), HEADS, (1, 2, 4)):
        for lens in ("causal", "full") if layout == "native" and next_n > 1 else ("causal",):
            facets: dict[str, Facet] = {
                "layout": layout, "heads": heads, "next_n": next_n, "lens": lens, "page": 64, "data": "gaussian",
            }  # fmt: skip
            shape = {"context_lens": [300, 129, 64, 1 + next_n]}
            yield _case(f"logits-{layout}-h{heads}-n{next_n}-{lens}", Stage.LOGITS, SUITES, facets, shape)
    for layout, data in product(("native", "expanded"), ("correlated", "negative", "duplicated", "tiny", "saturating")):
        facets = {"layout": layout, "heads": 64, "next_n": 2, "lens": "causal", "page": 64, "data": data}
        shape = {"context_lens": [2049, 255, 65]}
        yield _case(f"logits-{layout}-h64-n2-{data}", Stage.LOGITS, ("default", "full"), facets, shape)
    for heads, clean in product(HEADS, (False, True)):
        facets = {"layout": "ragged", "heads": heads, "data": "gaussian"}
        shape = {"tokens": 33, "keys": 300, "clean": clean}
        name = f"logits-ragged-h{heads}{'-clean' if clean else ''}"
        yield _case(name, Stage.LOGITS, SUITES, facets, shape)
    for data in ("correlated", "negative", "duplicated", "tiny", "saturating"):
        facets = {"layout": "ragged", "heads": 64, "data": data}
        yield _case(f"logits-ragged-h64-{data}", Stage.LOGITS, ("default", "full"), facets, {"tokens": 65, "keys": 2049, "clean": False})
    for layout, heads in product(("native", "expanded"), HEADS):
        facets = {"layout": layout, "heads": heads, "next_n": 2, "lens": "causal", "page": 64, "data": "gaussian"}
        yield _case(f"logits-{layout}-h{heads}-n2-long", Stage.LOGITS, ("full",), facets, {"context_lens": [16385, 4097, 2048]})


def _topk() -> Iterator[Case]:
    for data in ("gaussian", "ties", "plateau", "short"):
        shape = {"row_lens": [300, 129, 64, 63, 1] if data != "short" else [17, 1, 63], "topk": 64}
        yield _case(f"topk-{data}", Stage.TOPK, SUITES, {"data": data}, shape)
    yield _case("topk-2048", Stage.TOPK, ("default", "full"), {"data": "gaussian"}, {"row_lens": [4097, 2048, 2049, 2047], "topk": 2048})


def _quant() -> Iterator[Case]:
    for scale, heads in product(("fp32", "ue8m0"), HEADS):
        facets: dict[str, Facet] = {"scale": scale, "heads": heads, "data": "gaussian"}
        yield _case(f"quant-{scale}-h{heads}", Stage.QUANT, SUITES, facets, {"tokens": 9})
    yield _case("quant-fp32-h64-edges", Stage.QUANT, ("default", "full"), {"scale": "fp32", "heads": 64, "data": "edges"}, {"tokens": 9})


def _metadata() -> Iterator[Case]:
    for mode, arch in product(("decode", "target_verify", "draft_extend"), ("sm90", "sm100")):
        for next_n in (1,) if mode == "decode" else (2, 4):
            facets: dict[str, Facet] = {
                "mode": mode, "next_n": next_n, "arch": arch, "graph": "replay", "deep_gemm": "present", "part": "backend",
            }  # fmt: skip
            yield _case(f"meta-{mode}-n{next_n}-{arch}", Stage.METADATA, SUITES, facets, dict(METADATA_LENS))
    # deep_gemm is not installed: the backend falls back (no lengths are asked for), and so must the indexer
    for mode, next_n, part in (("decode", 1, "backend"), ("target_verify", 2, "backend"), ("draft_extend", 2, "backend"), ("decode", 1, "indexer")):
        facets = {"mode": mode, "next_n": next_n, "arch": "sm90", "graph": "replay", "deep_gemm": "missing", "part": part}
        yield _case(f"meta-{mode}-{part}-without-deep-gemm", Stage.METADATA, SUITES, facets, dict(METADATA_LENS))


CASES: tuple[Case, ...] = (*_end_to_end(), *_logits(), *_topk(), *_quant(), *_metadata())


def suite(name: str) -> tuple[Case, ...]:
    """Cases of a suite, in the order of the grid. KeyError for a name that is none."""
    if name not in SUITES:
        raise KeyError(name)
    return tuple(case for case in CASES if name in case.suites)
