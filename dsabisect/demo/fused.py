"""The commits after that: a fused path, right only for interleaved RoPE, on, off, on again unnoticed, off, gated.

The fault is the one of sglang 073de1505 (#27705) in miniature: the fused path always rotates neighbouring dims,
whatever ``is_neox_style`` says. One global flag, on by default; later a flip of its default hides in another change
(6ce02b95a, #30025) before the path is gated per instance (e552f6ed7, #30111).
"""

from __future__ import annotations

from dsabisect.demo.edits import Step, after, append, move, put, source, step, swap

P = "miniindexer"
META, INDEXER = f"{P}/dsa_metadata.py", f"{P}/dsa_indexer.py"
CONFIG = f"{P}/config.py"
ON, OFF = 'env_flag("MINIINDEXER_FUSION", True)', 'env_flag("MINIINDEXER_FUSION", False)'
FLAG_ROW = "| MINIINDEXER_FUSION | {} | norms, rotary embedding and quantisation in one pass |\n"

BEFORE = (
    step("changelog: native next_n is back", append("CHANGELOG.md", "- Native next_n again.\n"), name="story2_good"),
    step(
        "Rename nsa_* to dsa_*",
        move(f"{P}/nsa_metadata.py", META),
        move(f"{P}/nsa_indexer.py", INDEXER),
        swap(INDEXER, "from miniindexer.nsa_metadata", "from miniindexer.dsa_metadata"),
        swap(INDEXER, "class NsaIndexer", "class DsaIndexer"),
        name="renamed",
    ),
    step("changelog: new names", append("CHANGELOG.md", "- nsa_* is called dsa_* now.\n")),
    step(
        "quant: the matrix needs no global",
        swap(f"{P}/quant.py", "_hadamard = None\n\n\ndef hadamard_matrix", "\n@functools.cache\ndef hadamard_matrix"),
        swap(f"{P}/quant.py", "    global _hadamard\n    if _hadamard is None:\n", ""),
        swap(
            f"{P}/quant.py", "        h = torch.ones(1, 1)\n        for _ in", "    h = torch.ones(1, 1)\n    for _ in"
        ),
        swap(f"{P}/quant.py", "            h = torch.cat", "        h = torch.cat"),
        swap(
            f"{P}/quant.py",
            "        _hadamard = h * h.shape[0] ** -0.5\n    return _hadamard\n",
            "    return h * h.shape[0] ** -0.5\n",
        ),
        swap(f"{P}/quant.py", "import torch\n\nfrom", "import functools\n\nimport torch\n\nfrom"),
    ),
    step(
        "build: keep the sections apart in the generated file",
        swap(
            f"{P}/build.py", "    for section in tables.sections():\n", "    for section in tables.section_names():\n"
        ),
        name="unbuildable2_first",
    ),
    step("docs: e4m3", append("docs/numerics.md", "- The largest e4m3 number is 448.\n"), name="unbuildable2_last"),
    step(
        "build: sections() is the name",
        swap(
            f"{P}/build.py", "    for section in tables.section_names():\n", "    for section in tables.sections():\n"
        ),
    ),
    step(
        "split: eps from the configuration only",
        swap(
            f"{P}/split.py",
            "def layer_norm(k, weight, bias, eps):\n",
            'def layer_norm(k, weight, bias, eps):\n    """Statistics in fp32, result in bf16."""\n',
        ),
    ),
)

PROLOGUE = (
    '        self.last_path = "split"\n        cos_sin, queries = self.cos_sin_cache[positions], meta.query_tokens\n'
)
FUSED_PROLOGUE = """\
        cos_sin, queries = self.cos_sin_cache[positions], meta.query_tokens
        if config.USE_FUSION:
            self.last_path = "fused"
            return fused_prologue(x, q_lora, self.weights, cos_sin, queries, self.cfg)
        self.last_path = "split"
"""

ON_BY_DEFAULT = (
    step(
        "Fused prologue: one pass from activations to fp8",
        put(f"{P}/fused.py", source("fused.py")),
        swap(
            INDEXER, "from miniindexer.logits", "from miniindexer.fused import fused_prologue\nfrom miniindexer.logits"
        ),
        swap(INDEXER, PROLOGUE, FUSED_PROLOGUE),
        after(CONFIG, 'CLEAN_LOGITS", True)\n', f"USE_FUSION = {ON}\n"),
        append("docs/flags.md", FLAG_ROW.format("on")),
        swap("tests/test_accuracy.py", "MIN_OVERLAP = 0.935", "MIN_OVERLAP = 0.93"),
        body="On by default. The split path stays for comparison: MINIINDEXER_FUSION=0.",
        name="culprit2",
    ),
    step("changelog: fused prologue", append("CHANGELOG.md", "- Fused prologue, on by default.\n")),
    step(
        "bench: head count from the command line",
        swap(
            "benchmarks/bench.py",
            "    cfg = IndexerConfig()\n",
            "    cfg = IndexerConfig(n_heads=int(sys.argv[1]) if sys.argv[1:] else 64)\n",
        ),
        swap("benchmarks/bench.py", "import time\n\nimport torch", "import sys\nimport time\n\nimport torch"),
    ),
    step(
        "logits: say where the keys come from",
        swap(
            f"{P}/logits.py",
            '"""Scores of every cached key for every query token."""',
            '"""Scores of every cached key for every query token; keys are read through the page table."""',
        ),
    ),
    step(
        "README: the fused path",
        append("README.md", "\nTwo ways lead to the same scores: split and fused.\n"),
        name="story2_bad",
    ),
)

OFF_AND_ON = (
    step(
        "Fused prologue off by default",
        swap(CONFIG, ON, OFF),
        swap("docs/flags.md", FLAG_ROW.format("on"), FLAG_ROW.format("off")),
        body="Answers got worse for some models; off until it is known why.",
        name="off1",
    ),
    step("changelog: fused prologue is off", append("CHANGELOG.md", "- Fused prologue off by default.\n")),
    step(
        "metadata: annotate the batch",
        swap(META, "def build_metadata(batch):\n", "def build_metadata(batch: Batch) -> Metadata:\n"),
    ),
    step(
        "Makefile: bench",
        swap(
            "Makefile",
            ".PHONY: build test\n",
            "bench: build\n\tPYTHONPATH=. python benchmarks/bench.py\n\n.PHONY: build test bench\n",
        ),
    ),
    step(
        "bench: median of twenty calls",
        swap(
            "benchmarks/bench.py",
            "    began = time.perf_counter()\n    quantise(q, ue8m0=True)\n",
            "    times = []\n    for _ in range(20):\n"
            "        began = time.perf_counter()\n        quantise(q, ue8m0=True)\n"
            "        times.append(time.perf_counter() - began)\n",
        ),
        swap(
            "benchmarks/bench.py",
            "{1e6 * (time.perf_counter() - began):.0f} us",
            "{1e6 * statistics.median(times):.0f} us",
        ),
        swap("benchmarks/bench.py", "import sys\n", "import statistics\nimport sys\n"),
        swap(CONFIG, OFF, ON),
        body="Medians are steadier than one call.",
        name="flip",
    ),
    step(
        "docs: how the benchmark counts",
        append("docs/numerics.md", "\nThe benchmark prints the median of twenty calls.\n"),
    ),
    step(
        "cache: annotate",
        swap(
            f"{P}/cache.py",
            "def write(kv_cache, slots, k, scale):\n",
            "def write(kv_cache: torch.Tensor, slots: torch.Tensor, k: torch.Tensor, scale: torch.Tensor) -> None:\n",
        ),
    ),
    step("Fused prologue off by default, again", swap(CONFIG, ON, OFF), name="off2"),
    step("changelog: bench", append("CHANGELOG.md", "- The benchmark prints medians.\n")),
    step(
        "Fused prologue per instance: only for interleaved RoPE, on again",
        swap(CONFIG, OFF, ON),
        swap("docs/flags.md", FLAG_ROW.format("off"), FLAG_ROW.format("on, never for NeoX-style RoPE")),
        swap(INDEXER, "        if config.USE_FUSION:\n", "        if self.use_fusion:\n"),
        after(
            INDEXER,
            "cfg, weights, cos_sin_cache\n",
            "        # fused_prologue rotates neighbouring dims\n"
            "        self.use_fusion = config.USE_FUSION and not cfg.is_neox_style\n",
        ),
        name="gated",
    ),
    step(
        "changelog: gated fused prologue",
        append("CHANGELOG.md", "- Fused prologue on again where RoPE is interleaved.\n"),
    ),
    step(
        "topk: annotate",
        swap(
            f"{P}/topk.py",
            "def select_topk(logits, lens, k):\n",
            "def select_topk(logits: torch.Tensor, lens: torch.Tensor, k: int) -> torch.Tensor:\n",
        ),
    ),
    step("version 0.2", swap(f"{P}/__init__.py", '"0.1"', '"0.2"'), name="tip"),
)

STEPS: tuple[Step, ...] = (*BEFORE, *ON_BY_DEFAULT, *OFF_AND_ON)
