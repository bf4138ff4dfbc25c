"""How to call `miniindexer`, the bundled demo's package, at any commit of its history.

The interface drifts; what there is now is found by asking the code. Which way a call took is seen twice: in what the
indexer says of itself (``last_path``), and by watching which of the candidate's functions were really entered. The
second decides.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch

from dsabisect.candidate.probes import Absent, HarnessFault, NotExercised, Ran, Setup, repeated

PACKAGE = "miniindexer"
FORCED = ("split", "fused")  # end-to-end paths that must be the path taken
WEIGHTS = ("wq_b", "wk", "weights_proj", "k_norm_weight", "k_norm_bias")
# functions of the candidate → what their being entered shows
PROLOGUES = {"split_queries": "split", "fused_prologue": "fused"}
KERNELS = {"paged_mqa_logits": "expanded", "paged_mqa_logits_native": "native", "mqa_logits": "ragged"}


def open(setup: Setup) -> Probe:
    """Import the candidate's package from its checkout, and from nowhere else."""
    if setup.device != "cpu":
        raise HarnessFault(f"miniindexer runs on a CPU only, not on {setup.device}", remedy="Give --device cpu")
    root = Path(setup.checkout).resolve()
    home = root / PACKAGE
    if (home / "build.py").is_file() and not (home / "_tables.py").is_file():
        raise HarnessFault("miniindexer was not built: _tables.py is missing", remedy="Run the target's build step")
    for name in [n for n in sys.modules if n.partition(".")[0] == PACKAGE]:
        del sys.modules[name]
    sys.path[:] = [str(root), *(p for p in sys.path if p != str(root))]
    importlib.invalidate_caches()
    if not home.is_dir():
        raise HarnessFault(f"the checkout has no folder {PACKAGE}", remedy=f"Look into {root}")
    package = importlib.import_module(PACKAGE)
    if [os.path.realpath(place) for place in package.__path__] != [str(home)]:
        raise HarnessFault(f"{PACKAGE} came from {list(package.__path__)}", remedy=f"It must come from {home} alone")
    return Probe(home)


class Probe:
    """One commit's package, imported."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def run(self, path: Mapping[str, Any], case: Mapping[str, Any], inputs: Mapping[str, torch.Tensor]) -> Ran:
        """One run of ``path`` over one input file (shapes: docs/design.md, "Tensors of a case").

        Raises:
            Absent: this commit has no such path.
            NotExercised: another path was taken than the one asked for.
            HarnessFault: the flags of the path are not set in this process, or we have no way to run the path.
        """
        for name, value in path.get("env", {}).items():
            if os.environ.get(name) != value:
                raise HarnessFault(f"path {path['name']} needs {name}={value} before miniindexer is imported")
        way = WAYS.get(path["name"])
        if way is None:
            raise HarnessFault(f"the demo probe knows no path {path['name']!r}")
        return way(self, path, case, inputs)

    # ---- the ways through the package --------------------------------------------------------------------

    def end_to_end(self, path: Mapping[str, Any], case: Mapping[str, Any], inputs: Mapping[str, torch.Tensor]) -> Ran:
        name = path["name"]
        if name in FORCED and not self.has(name):
            raise Absent(f"miniindexer has no {name} path at this commit")
        indexer = self.indexer(case, inputs)
        arguments = self.arguments(indexer.forward, case, inputs)
        with self.watching() as entered:
            logits, topk = indexer.forward(**arguments)
        took, kernel = which(entered, PROLOGUES), which(entered, KERNELS)
        proof = {"path": took, "kernel": kernel, "entered": " ".join(sorted(entered)), "said": said(indexer)}
        if name in FORCED and took != name:
            raise NotExercised(f"{name} was asked for and {took or 'nothing known'} ran", proof)
        notes = () if said(indexer) in ("", took) else (f"miniindexer says {said(indexer)} where {took} ran",)
        seconds = repeated(path, "cpu", lambda: indexer.forward(**arguments))
        return Ran(outputs={"logits": logits, "topk": topk}, proof=proof if took else {}, notes=notes, seconds=seconds)

    def logits(self, path: Mapping[str, Any], case: Mapping[str, Any], inputs: Mapping[str, torch.Tensor]) -> Ran:
        name, module = path["name"], self.module("logits")
        kernel = getattr(module, {told: f for f, told in KERNELS.items()}[name], None)
        if kernel is None:
            raise Absent(f"miniindexer has no {name} kernel at this commit")
        arguments = ARGUMENTS[name](kernel, case, inputs)
        with self.watching() as entered:
            logits = kernel(**arguments)
        took = which(entered, KERNELS)
        proof = {"kernel": took, "entered": " ".join(sorted(entered))}
        if took != name:
            raise NotExercised(f"{name} was asked for and {took or 'nothing known'} ran", proof)
        return Ran(outputs={"logits": logits}, proof=proof)

    def select(self, path: Mapping[str, Any], case: Mapping[str, Any], inputs: Mapping[str, torch.Tensor]) -> Ran:
        module = self.module("topk")
        if not hasattr(module, "select_topk"):
            raise Absent("miniindexer has no top-k of its own at this commit")
        with self.watching() as entered:
            topk = module.select_topk(inputs["logits"], inputs["row_lens"], int(case["shape"]["topk"]))
        return Ran(outputs={"topk": topk}, proof={"entered": " ".join(sorted(entered))} if entered else {})

    # ---- asking the code ---------------------------------------------------------------------------------

    def module(self, *names: str) -> ModuleType:
        """The first of these modules that this commit has."""
        for name in names:
            if self.has(name):
                return importlib.import_module(f"{PACKAGE}.{name}")
        raise Absent(f"miniindexer has none of {', '.join(names)} at this commit")

    def has(self, name: str) -> bool:
        return importlib.util.find_spec(f"{PACKAGE}.{name}") is not None

    def indexer(self, case: Mapping[str, Any], inputs: Mapping[str, torch.Tensor]) -> Any:
        module = self.module("dsa_indexer", "nsa_indexer")
        cls = getattr(module, "DsaIndexer", None) or module.NsaIndexer
        config = self.module("config").IndexerConfig(
            n_heads=int(case["facets"]["heads"]),
            topk=int(case["shape"]["topk"]),
            is_neox_style=case["facets"]["rope"] == "neox",
        )
        return cls(config, {name: inputs[name] for name in WEIGHTS}, inputs["cos_sin_cache"])

    def arguments(
        self, forward: Callable[..., Any], case: Mapping[str, Any], inputs: Mapping[str, torch.Tensor]
    ) -> dict[str, Any]:
        """Arguments of ``forward``: one Batch where it takes one, single values before that."""
        batch = {
            "mode": case["facets"]["mode"],
            "seq_lens": inputs["seq_lens"],
            "extend_lens": inputs["extend_lens"],
            "page_table": inputs["page_table"],
            "next_n": int(case["facets"].get("next_n", 1)),
        }
        rest = {
            "x": inputs["x"],
            "q_lora": inputs["q_lora"],
            "positions": inputs["positions"],
            "kv_cache": inputs["kv_cache"].clone(),  # the candidate writes into it
        }
        if "batch" in inspect.signature(forward).parameters:
            return {**rest, "batch": self.module("dsa_metadata", "nsa_metadata").Batch(**batch)}
        return {**rest, **batch}

    @contextmanager
    def watching(self) -> Iterator[set[str]]:
        """Names ``file:function`` of the candidate's Python functions that are entered meanwhile."""
        entered: set[str] = set()
        begin = str(self.home) + os.sep

        def see(frame: FrameType, event: str, argument: Any) -> None:
            code = frame.f_code
            if event == "call" and code.co_filename.startswith(begin):
                entered.add(f"{code.co_filename.rpartition(os.sep)[2]}:{code.co_name}")

        before = sys.getprofile()
        sys.setprofile(see)
        try:
            yield entered
        finally:
            sys.setprofile(before)


WAYS = {
    "split": Probe.end_to_end, "fused": Probe.end_to_end, "default": Probe.end_to_end,
    "expanded": Probe.logits, "native": Probe.logits, "ragged": Probe.logits, "select": Probe.select,
}  # fmt: skip


def which(entered: set[str], known: Mapping[str, str]) -> str:
    """What the entered functions show: a name, several joined by +, or "" when none is known."""
    names = {name.rpartition(":")[2] for name in entered}
    return "+".join(sorted(told for function, told in known.items() if function in names))


def said(indexer: Any) -> str:
    return str(getattr(indexer, "last_path", ""))


def expanded_arguments(
    kernel: Callable[..., Any], case: Mapping[str, Any], inputs: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    """q [B, next_n, H, D] as one row a token; lengths 1D or [rows, 1], whichever this commit's kernel names."""
    q, next_n = inputs["q"].view(torch.float8_e4m3fn), inputs["q"].shape[1]
    two = "lens_2d" in inspect.signature(kernel).parameters
    lens = {"lens_2d": inputs["row_lens"].view(-1, 1)} if two else {"context_lens": inputs["row_lens"]}
    return {
        "q": q.flatten(0, 1).unsqueeze(1),
        "kv_cache": inputs["kv_cache"],
        "weights": inputs["weights"],
        "block_table": inputs["block_table"].repeat_interleave(next_n, 0),
        "clean_logits": bool(case["shape"].get("clean", True)),
        **lens,
    }


def native_arguments(
    kernel: Callable[..., Any], case: Mapping[str, Any], inputs: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    """Lengths [B, next_n]: causal, or the full context for every draft token as sglang's serving path passes them."""
    batch, next_n = inputs["q"].shape[:2]
    full = case["facets"].get("lens", "causal") == "full"
    lens = inputs["context_lens"].view(-1, 1).expand(batch, next_n) if full else inputs["row_lens"].view(batch, next_n)
    return {
        "q": inputs["q"].view(torch.float8_e4m3fn),
        "kv_cache": inputs["kv_cache"],
        "weights": inputs["weights"],
        "context_lens": lens,
        "block_table": inputs["block_table"],
    }


def ragged_arguments(
    kernel: Callable[..., Any], case: Mapping[str, Any], inputs: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    """q [T, H, D] against keys [S, D] that lie side by side, from ks to ke."""
    return {
        "q": inputs["q"].view(torch.float8_e4m3fn),
        "k": inputs["k"].view(torch.float8_e4m3fn),
        "clean_logits": bool(case["shape"].get("clean", True)),
        **{name: inputs[name] for name in ("k_scale", "weights", "ks", "ke")},
    }


ARGUMENTS = {"expanded": expanded_arguments, "native": native_arguments, "ragged": ragged_arguments}
