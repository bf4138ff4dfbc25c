"""Commits 1 to 36: the package grows; native next_n comes with a fault, is reverted and comes back right.

The fault is the one of sglang 13852d3f3 (#24870) in miniature: the lengths of *every* extending batch are laid out as
[B, next_n], which fits target-verify alone. A draft-extend batch has fewer tokens than that wherever a draft was
refused, a prefill has any number, and the sizes of two tensors no longer match. What breaks is the path that was there
before, and it depends on the batch.
"""

from __future__ import annotations

from dsabisect.demo.edits import Edit, Step, after, append, put, source, step, swap, undone

P = "miniindexer"
META, INDEXER = f"{P}/nsa_metadata.py", f"{P}/nsa_indexer.py"

BEGIN = step(
    "miniindexer: split path, paged logits, top-k",
    *(
        put(path, source(name))
        for path, name in {
            ".gitignore": "gitignore",
            "README.md": "README.md",
            "CHANGELOG.md": "CHANGELOG.md",
            "benchmarks/bench.py": "bench.py",
            "tests/test_accuracy.py": "test_accuracy.py",
            **{
                f"{P}/{name}": name
                for name in (
                    "__init__.py",
                    "tables.ini",
                    "build.py",
                    "config.py",
                    "rope.py",
                    "quant.py",
                    "cache.py",
                    "logits.py",
                    "topk.py",
                    "split.py",
                    "nsa_metadata.py",
                    "nsa_indexer.py",
                )
            },
        }.items()
    ),
)

GROWTH = (
    step("Makefile: build and test", put("Makefile", source("Makefile"))),
    step("docs: layout of the key cache", put("docs/cache.md", source("doc_cache.md"))),
    step(
        "quant: say why the amax has a floor",
        after(
            f"{P}/quant.py",
            'powers of two when ue8m0."""\n',
            "    # an all-zero vector would else divide by zero\n",
        ),
    ),
    step("tests: rotary embedding", put("tests/test_rope.py", source("test_rope.py"))),
    step(
        "cache: name the page size",
        after(f"{P}/cache.py", "import torch\n", "\nPAGE = 64\n"),
        swap(f"{P}/cache.py", "slots // 64, slots % 64", "slots // PAGE, slots % PAGE"),
        swap(
            f"{P}/cache.py",
            "block_table[position // 64].long(), position % 64",
            "block_table[position // PAGE].long(), position % PAGE",
        ),
    ),
    step("docs: numerics", put("docs/numerics.md", source("doc_numerics.md"))),
    step(
        "metadata: first token of each sequence computed once",
        swap(META, "    first = torch.cumsum(seq_lens, 0) - seq_lens\n    return", "    return"),
        after(META, "    place, owner = _inside(seq_lens)\n", "    first = torch.cumsum(seq_lens, 0) - seq_lens\n"),
    ),
    step(
        "README: what it is not",
        append("README.md", "\nIt is no fast kernel: it shows what a fast one has to compute.\n"),
    ),
    step("docs: switches", put("docs/flags.md", source("doc_flags.md"))),
    step(
        "rope: take the cosines and sines apart in one place",
        swap(
            f"{P}/rope.py",
            "    cos, sin = cos_sin.view(x.shape[0], *[1] * (x.dim() - 2), rope_dim).chunk(2, dim=-1)\n",
            "    cos, sin = cos_and_sin(x, cos_sin)\n",
        ),
        after(
            f"{P}/rope.py",
            "import torch\n",
            "\n\ndef cos_and_sin(x, cos_sin):\n"
            '    """cos_sin [T, R] as two [T, 1.., R/2] that broadcast over the heads of x."""\n'
            "    return cos_sin.view(x.shape[0], *[1] * (x.dim() - 2), cos_sin.shape[-1]).chunk(2, dim=-1)\n",
        ),
        name="story1_good",
    ),
    step(
        "bench: one warm-up call",
        after("benchmarks/bench.py", "dtype=torch.bfloat16)\n", "    quantise(q, ue8m0=True)\n"),
    ),
)

# `448.0f` is right in C++ and a syntax error in the generated Python: four commits that cannot be built.
UNBUILDABLE = (
    step(
        "tables: share the constants with the C++ kernels",
        swap(f"{P}/tables.ini", "max = 448.0", "max = 448.0f"),
        swap(f"{P}/tables.ini", "amax_floor = 1e-4", "amax_floor = 1e-4f"),
        name="unbuildable_first",
    ),
    step(
        "topk: a name for the padding",
        after(f"{P}/topk.py", "import torch\n", "\nPADDING = -1\n"),
        swap(f"{P}/topk.py", "(logits.shape[0], k), -1,", "(logits.shape[0], k), PADDING,"),
        swap(f"{P}/topk.py", "found, -1)", "found, PADDING)"),
    ),
    step(
        "docs: numerics of the head gate",
        append("docs/numerics.md", "- Head weights may be negative, and so may scores.\n"),
    ),
    step(
        "logits: no scores for empty rows",
        swap(f"{P}/logits.py", "        if length:\n", "        if length > 0:\n"),
        name="unbuildable_last",
    ),
    step(
        "tables: constants without C suffixes",
        swap(f"{P}/tables.ini", "max = 448.0f", "max = 448.0"),
        swap(f"{P}/tables.ini", "amax_floor = 1e-4f", "amax_floor = 1e-4"),
        body="The generated module did not compile since the constants are shared with the C++ kernels.",
        name="buildable_again",
    ),
)

BATCH = '''
@dataclass
class Batch:
    """What the scheduler hands over. seq_lens count the new tokens too; the last extend_lens of each are queries."""

    mode: str  # decode, prefill, target_verify or draft_extend
    seq_lens: torch.Tensor  # [B]
    extend_lens: torch.Tensor  # [B]
    page_table: torch.Tensor  # [B, blocks]
    next_n: int = 1  # draft tokens a sequence


'''

BEFORE_NATIVE = (
    step("changelog", append("CHANGELOG.md", "- Constants come from tables.ini.\n")),
    step(
        "config: say what the dataclass is",
        after(f"{P}/config.py", "class IndexerConfig:\n", '    """Sizes as in the model\'s own configuration."""\n\n'),
    ),
    step(
        "One Batch object instead of five arguments",
        swap(META, "\n@dataclass\nclass Metadata", BATCH + "@dataclass\nclass Metadata"),
        swap(
            META,
            "def build_metadata(mode, seq_lens, extend_lens, page_table, next_n):\n"
            '    """seq_lens, extend_lens [B]: all keys of a sequence, '
            'and how many of its last tokens are queries."""\n'
            "    seq_lens, extend_lens = seq_lens.long(), extend_lens.long()\n",
            "def build_metadata(batch):\n    seq_lens, extend_lens = batch.seq_lens.long(), batch.extend_lens.long()\n",
        ),
        swap(META, "slots = page_table[", "slots = batch.page_table["),
        swap(
            INDEXER,
            "positions, mode, seq_lens, extend_lens, page_table, next_n, kv_cache)",
            "positions, batch, kv_cache)",
        ),
        swap(INDEXER, "build_metadata(mode, seq_lens, extend_lens, page_table, next_n)", "build_metadata(batch)"),
        swap(INDEXER, "self.score(q, w, kv_cache, mode, page_table,", "self.score(q, w, kv_cache, batch,"),
        swap(INDEXER, "score(self, q, w, kv_cache, mode, page_table,", "score(self, q, w, kv_cache, batch,"),
        swap(INDEXER, 'if mode == "prefill":', 'if batch.mode == "prefill":'),
        swap(INDEXER, "self.score_prefill(q, w, kv_cache, page", "self.score_prefill(q, w, kv_cache, batch.page"),
        swap(INDEXER, "rows = page_table[meta.row_sequence]", "rows = batch.page_table[meta.row_sequence]"),
        name="refactored",
    ),
)

ROW_LENS = "    row_lens = seq_lens[sequence] - extend_lens[sequence] + step + 1\n"
ROW_LENS_2D = """\
    if batch.mode {modes}:
        # one line of lengths a sequence, as the native kernel takes them
        row_lens = (seq_lens.view(-1, 1) - batch.next_n + 1 + torch.arange(batch.next_n)).flatten()
    else:
        row_lens = seq_lens[sequence] - extend_lens[sequence] + step + 1
"""


def native_edits(modes: str) -> tuple[Edit, ...]:
    """Kernel, lengths and selection of native next_n; ``modes``: modes with 2D lengths, as the rest of an `if`."""
    return (
        append(f"{P}/logits.py", source("native_kernel.py")),
        swap(META, ROW_LENS, ROW_LENS_2D.format(modes=modes)),
        swap(META, "first[sequence] + row_lens - 1", "row_lens + first[sequence] - 1"),
        swap(INDEXER, "mqa_logits, paged_mqa_logits\n", "mqa_logits, paged_mqa_logits, paged_mqa_logits_native\n"),
        swap(
            INDEXER,
            '        self.last_kernel = "expanded"\n',
            '        if batch.mode == "target_verify":\n'
            '            self.last_kernel = "native"\n'
            "            shape = (len(batch.seq_lens), batch.next_n)\n"
            "            q, lens = q.unflatten(0, shape), meta.row_lens.view(shape)\n"
            "            return paged_mqa_logits_native(q, kv_cache, w, lens, batch.page_table)\n"
            '        self.last_kernel = "expanded"\n',
        ),
    )


FAULTY = native_edits('!= "decode"')
NATIVE_TITLE = "Native next_n for speculative batches"

RED = (
    step(
        NATIVE_TITLE,
        *FAULTY,
        body="Keys of a sequence are read once for all of its draft tokens. Lengths of extending batches are 2D now.",
        name="culprit1",
    ),
    step(
        "docs: native next_n",
        append("docs/numerics.md", "- Native next_n scores all drafts of a sequence in one product.\n"),
    ),
    step(
        "bench: number of rows as a constant",
        swap("benchmarks/bench.py", "torch.randn(4,", "torch.randn(ROWS,"),
        after("benchmarks/bench.py", "import quantise\n", "\nROWS = 4\n"),
    ),
    step(
        "cache: say what _regions gives",
        after(
            f"{P}/cache.py",
            "def _regions(kv_cache):\n",
            '    """Views of all values [pages, 64, 128] and all scales [pages, 64, 4], as bytes."""\n',
        ),
    ),
    step("tests: padding of short rows", put("tests/test_topk.py", source("test_topk.py"))),
    step("changelog: native next_n", append("CHANGELOG.md", "- Native next_n.\n"), name="story1_bad"),
)

AFTER_REVERT = (
    step(
        f'Revert "{NATIVE_TITLE}"',
        *undone(FAULTY),
        body="Draft-extend and prefill batches fail since then.",
        name="revert1",
    ),
    step("changelog: native next_n is out again", append("CHANGELOG.md", "- Native next_n taken out again.\n")),
    step(
        "logits: lengths come as [rows, 1]",
        swap(
            f"{P}/logits.py",
            "weights, context_lens, block_table, clean_logits",
            "weights, lens_2d, block_table, clean_logits",
        ),
        swap(f"{P}/logits.py", "weights [rows, H], context_lens [rows],", "weights [rows, H], lens_2d [rows, 1],"),
        swap(f"{P}/logits.py", "context_lens.tolist()", "lens_2d.flatten().tolist()"),
        swap(INDEXER, "w, meta.row_lens, rows,", "w, meta.row_lens.view(-1, 1), rows,"),
        name="lens_2d",
    ),
    step("README: page size", append("README.md", "\nPages hold 64 keys.\n")),
    step(
        f"Reland: {NATIVE_TITLE[0].lower()}{NATIVE_TITLE[1:]}",
        *native_edits('== "target_verify"'),
        body="Only target-verify has as many tokens in every sequence; other batches keep one length a token.",
        name="reland1",
    ),
    step(
        "docs: draft-extend is ragged",
        append("docs/numerics.md", "- Draft-extend batches are ragged and take one row a token.\n"),
    ),
    step(
        "topk: clearer name for the found positions",
        swap(
            f"{P}/topk.py",
            "    found = masked.topk(n, dim=-1).indices\n",
            "    best = masked.topk(n, dim=-1).indices\n",
        ),
        swap(f"{P}/topk.py", "inside.gather(1, found), found, PADDING", "inside.gather(1, best), best, PADDING"),
    ),
)

STEPS: tuple[Step, ...] = (BEGIN, *GROWTH, *UNBUILDABLE, *BEFORE_NATIVE, *RED, *AFTER_REVERT)
