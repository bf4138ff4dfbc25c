"""The real sglang history, when this machine has it: nothing of it is committed here."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# .carry/ lies beside the checkout or, in a linked worktree, beside the main one.
PLACES = (os.environ.get("SGLANG_REPO", ""), *(str(p / ".carry" / "sglang.git") for p in Path(__file__).parents),
          "/work/main/.carry/sglang.git")  # fmt: skip
SGLANG = next((Path(p) for p in PLACES if p and Path(p).is_dir()), None)
needs_sglang = pytest.mark.skipif(
    SGLANG is None, reason="THE REAL SGLANG HISTORY IS NOT HERE: set SGLANG_REPO to a clone; this is not tested"
)
