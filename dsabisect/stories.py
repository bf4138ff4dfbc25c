"""`dsabisect demo`: write the bundled history, run the engine on both stories, print what it says.

The story's known names choose the two ranges; nothing of them reaches the search.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from dsabisect import conclude, engine
from dsabisect.outside import pages
from dsabisect.report import text
from dsabisect.session import Request
from dsabisect.targets import demo

STORIES = {
    "native": ("1. native next_n added, reverted, relanded", ("native", "expanded", "default")),
    "fused": ("2. fused path right only for interleaved RoPE", ("split", "fused", "default")),
}
# Every rope with every head count, every mode once: what tells the conditions apart, in about half of the suite.
CASES = ("e2e-neox-h32", "e2e-interleaved-h32", "e2e-neox-h64-decode", "e2e-interleaved-h64-decode", "logits-")


def ends(history: demo.DemoHistory, story: str) -> tuple[str, str]:
    if story == "native":
        return history.story1_good, history.story1_bad
    return history.story2_good, history.story2_bad


def play(folder: Path, story: str, *, say: Callable[[str], None], out: Callable[[str], None], keep: bool) -> int:
    """Returns 0 when each story ended with a confirmed culprit, else the exit code of the first that did not."""
    repo = folder / "miniindexer"
    history = demo.write_history(repo)
    say(f"history: {repo}")
    code = 0
    for name in STORIES if story == "both" else (story,):
        title, paths = STORIES[name]
        good, bad = ends(history, name)
        out(f"\n=== Story {title}\n")
        request = Request(
            repo=repo,
            target="demo",
            good=good,
            bad=bad,
            paths=paths,
            suite="smoke",
            cases=CASES,
            out=folder / f"run-{name}",
            jobs=max(1, (os.cpu_count() or 1) // 2),
            command=tuple(sys.argv[1:]),
        )
        answer = engine.run(request, say)
        out(text.render(answer.report))
        if keep:
            pages.write(answer.run_dir, answer.report, say)
        if answer.exit_code != conclude.EXIT_CONFIRMED:
            code = code or answer.exit_code or conclude.EXIT_SUSPECTS
    if keep:
        say(f"kept: {folder} (`{shlex.join(['dsabisect', 'report', str(answer.run_dir), '--format', 'md'])}`)")
    return code
