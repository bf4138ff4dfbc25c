"""Opens a checkout that holds ``candidate_code.py`` and has it do the action of the case, then score once."""

from __future__ import annotations

import importlib
import os
import sys
import threading
from typing import Any

import torch

from dsabisect.candidate.probes import Absent, BlockedImport, HarnessFault, NotExercised, Ran, Setup


class Blocked:
    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "deep_gemm":
            raise BlockedImport(f"No module named {name!r}", name=name)


class Opened:
    def __init__(self, setup: Setup) -> None:
        sys.path.insert(0, setup.checkout)
        sys.meta_path.insert(0, Blocked())  # type: ignore[arg-type]
        self.setup = setup
        self.code: Any = importlib.import_module("candidate_code")
        self.process_proof = {"taken": "scores"}

    def run(self, path: dict[str, Any], case: dict[str, Any], inputs: dict[str, torch.Tensor]) -> Ran:
        shape = case["shape"]
        if shape.get("probe") in PROBE_DEEDS:
            PROBE_DEEDS[shape["probe"]](self)
        self.code.misbehave(shape.get("action", "nothing"), shape.get("notes", "/tmp"))
        x = inputs["x"]
        y = self.code.scores(x)
        x.fill_(-1)  # the next run must get a fresh copy
        if os.environ.get("CONTEXT_LOST"):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if shape.get("probe") == "odd_output":
            return Ran(outputs={"logits": [1, 2]}, proof={"taken": "scores"})
        if shape.get("probe") == "views":
            both = torch.arange(12.0).reshape(3, 4)
            return Ran(outputs={"logits": both.t(), "topk": both[0]}, proof={"taken": "scores"})
        proof = (
            {}
            if shape.get("probe") == "no_proof"
            else {
                "taken": "scores",
                "pid": str(os.getpid()),
                "cwd": os.getcwd(),
                "calls": str(len(self.code.CALLS)),
                "threads": str(threading.active_count()),
                "env": ",".join(f"{k}={v}" for k, v in sorted(os.environ.items())),
                "flag": str(path["settings"].get("flag", "")),
            }
        )
        return Ran(outputs={"logits": y}, proof=proof, notes=("a note",), stood_in=("sgl_kernel",))


def _raise(error: BaseException) -> None:
    raise error


PROBE_DEEDS = {
    "absent": lambda opened: _raise(Absent("no such path yet")),
    "not_exercised": lambda opened: _raise(NotExercised("split ran", {"taken": "split"})),
    "harness": lambda opened: _raise(HarnessFault("the stand-in of sgl_kernel is short of a name", "Add it")),
    "own_bug": lambda opened: {}["missing key of ours"],
}


def open(setup: Setup) -> Opened:
    return Opened(setup)
