"""Captured activations as an end-to-end case: the schema of a capture, its checks, and the inputs made of it.

A capture is one forward of one indexer layer: what went in and the weights. The K cache and the page table are ours:
a random permutation with poison around it, as for generated cases.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from dsabisect.indexer import generate
from dsabisect.model import Case

# dimensions: N tokens in all, T rows that ask, H heads, h hidden, r q_lora_rank, P positions, B sequences
SCHEMA: dict[str, tuple[str, tuple[torch.dtype, ...]]] = {
    "x": ("N h", (torch.bfloat16,)), "q_lora": ("T r", (torch.bfloat16,)), "wq_b": ("H*128 r", (torch.bfloat16,)),
    "wk": ("128 h", (torch.bfloat16,)), "weights_proj": ("H h", (torch.bfloat16,)),
    "k_norm_weight": ("128", (torch.float32,)), "k_norm_bias": ("128", (torch.float32,)),
    "cos_sin_cache": ("P 64", (torch.float32,)), "seq_lens": ("B", (torch.int32, torch.int64)),
    "extend_lens": ("B", (torch.int32, torch.int64)),
}  # fmt: skip
MOST_TOKENS, MOST_ROWS, MOST_BATCH = 131_072, 8192, 256


def faults(tensors: Mapping[str, Tensor]) -> list[str]:
    """What keeps ``tensors`` from being a case, one line each; [] when nothing does."""
    missing, extra = sorted(SCHEMA.keys() - tensors.keys()), sorted(tensors.keys() - SCHEMA.keys())
    if missing or extra:
        return [f"lacks {name}" for name in missing] + [f"{name} is not in the schema" for name in extra]
    found, sizes = [], {"128": 128, "64": 64}
    for name in ("wq_b", "x", "q_lora", "weights_proj", "wk", *SCHEMA):
        shape, dtypes = SCHEMA[name]
        value, wanted = tensors[name], shape.split()
        if value.dtype not in dtypes:
            found.append(f"{name} is {_word(value.dtype)}, wanted {' or '.join(map(_word, dtypes))}")
        if value.dim() != len(wanted):
            found.append(f"{name} has {value.dim()} dimensions, wanted [{shape}]")
            continue
        for size, letter in zip(value.shape, wanted, strict=True):
            if letter == "H*128":
                letter, size = ("H", size // 128) if size and size % 128 == 0 else ("a multiple of 128", size)
            if not size and letter != "P":
                found.append(f"{name} is {list(value.shape)}: no dimension may be 0")
            if sizes.setdefault(letter, size) != size or letter.startswith("a "):
                found.append(f"{name} is {list(value.shape)}, wanted [{shape}] with {letter} = {sizes[letter]}")
    return list(dict.fromkeys(found or _values(tensors)))


def _values(tensors: Mapping[str, Tensor]) -> list[str]:
    lens, extend = tensors["seq_lens"].long(), tensors["extend_lens"].long()
    tokens, rows = tensors["x"].shape[0], tensors["q_lora"].shape[0]
    found = [f"{name} is not finite" for name, t in tensors.items() if t.is_floating_point() and not _finite(t)]
    if not len(lens) or int(lens.min()) < 1 or int(extend.min()) < 1 or bool((extend > lens).any()):
        found.append("needs 1 <= extend_lens <= seq_lens")
    elif (int(lens.sum()), int(extend.sum())) != (tokens, rows):
        found.append(f"seq_lens add up to {int(lens.sum())} of {tokens} tokens, extend_lens to {int(extend.sum())} of")
        found[-1] += f" {rows} rows"
    elif int(lens.max()) > tensors["cos_sin_cache"].shape[0]:
        found.append("cos_sin_cache is shorter than the longest sequence")
    for what, size, most in (("tokens", tokens, MOST_TOKENS), ("rows", rows, MOST_ROWS), ("B", len(lens), MOST_BATCH)):
        if size > most:
            found.append(f"{size} {what}, at most {most}")
    return found


def _finite(value: Tensor) -> bool:
    return bool(torch.isfinite(value).all())


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def inputs(case: Case, captured: Mapping[str, Tensor], *, poison: str) -> dict[str, Tensor]:
    """The tensors of an end-to-end case (docs/design.md) from a capture that has no :func:`faults`."""
    lens = [int(n) for n in captured["seq_lens"]]
    table, pages = generate._tables(case, lens, poison)  # generate.py is pinned by hash: nothing is renamed there
    cache = generate._poison(case, poison, (pages, generate.PAGE_BYTES))
    return {
        **captured,
        "seq_lens": captured["seq_lens"].int(), "extend_lens": captured["extend_lens"].int(),
        "positions": torch.from_numpy(np.concatenate([np.arange(n, dtype=np.int64) for n in lens])),
        "page_table": torch.from_numpy(np.ascontiguousarray(table)), "kv_cache": torch.from_numpy(cache),
    }  # fmt: skip
