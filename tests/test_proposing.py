"""`dsabisect propose` as a whole: the demo's two findings, measured; the user's repository keeps what it had."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsabisect import engine, proposing
from dsabisect.errors import DsabisectError, StoreError, UsageError
from dsabisect.outside import store
from dsabisect.report import build, html, text
from dsabisect.session import Request
from dsabisect.targets import demo

CASES = {
    "native": ("e2e-neox-h32-decode", "e2e-neox-h32-draft_extend", "logits-native-h32-n2", "logits-expanded-h32-n2"),
    "fused": ("e2e-neox-h32-decode", "e2e-interleaved-h32-decode"),
}
PATHS = {"native": ("native", "expanded", "default"), "fused": ("split", "fused", "default")}
Propose = Callable[..., tuple[proposing.Proposal, list[str]]]


def git(repo: Path, *words: str, check: bool = True) -> str:
    done = subprocess.run(["git", "-C", str(repo), *words], capture_output=True, text=True)
    assert not check or done.returncode == 0, done.stderr
    return done.stdout.strip()


class Made:
    """A demo history with somebody's work in it, and a finished run for each story."""

    def __init__(self, home: Path) -> None:
        self.home, self.repo = home, home / "miniindexer"
        self.history = demo.write_history(self.repo)
        git(self.repo, "checkout", "-q", "-B", "mine", self.history.story1_good)
        (self.repo / "README.md").write_text("stashed\n")
        git(self.repo, "stash", "-q")
        (self.repo / "README.md").write_text("being edited\n")
        (self.repo / "staged").write_text("s\n")
        git(self.repo, "add", "staged")
        (self.repo / "untracked").write_text("u\n")

    def run(self, story: str) -> Path:
        """A run over the culprit and its neighbours, done once."""
        out = self.home / f"run-{story}"
        if not out.exists():
            first = {"native": self.history.story1_bad, "fused": self.history.story2_bad}[story]
            good = {"native": self.history.story1_good, "fused": self.history.story2_good}[story]
            request = Request(repo=self.repo, target="demo", good=good, bad=first, paths=PATHS[story], suite="smoke",
                              cases=CASES[story], out=out, first=True)  # fmt: skip
            assert engine.run(request, lambda line: None).exit_code == 1
        return out

    def state(self) -> tuple[Any, ...]:
        """Everything of the person's: refs but ours, status, stash, configuration, index, HEAD, work files."""
        refs = [r for r in git(self.repo, "for-each-ref").splitlines() if "refs/heads/dsabisect/" not in r]
        words = (("status", "--porcelain"), ("stash", "list"), ("config", "--list", "--local"), ("worktree", "list"))
        files = {p.name: p.read_bytes() for p in self.repo.iterdir() if p.is_file()}
        private = {name: (self.repo / ".git" / name).read_bytes() for name in ("index", "HEAD", "config")}
        return (refs, *(git(self.repo, *w) for w in words), files, private)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("propose"))


@pytest.fixture
def propose(monkeypatch: pytest.MonkeyPatch, made: Made) -> Propose:
    monkeypatch.setenv("DSABISECT_CACHE", str(made.home / "cache"))  # what the run has measured is known

    def run(story: str, **wish: Any) -> tuple[proposing.Proposal, list[str]]:
        said: list[str] = []
        return proposing.propose(proposing.Wish(run_dir=made.run(story), **wish), said.append), said

    return run


def test_revert_of_the_native_path(made: Made, propose: Propose) -> None:
    made.run("native")
    before = made.state()
    proposal, _ = propose("native", branch=True)
    assert made.state() == before
    culprit = json.loads((made.run("native") / "report.json").read_text())["first_diverging"]["sha"]
    assert (proposal.exit_code, proposal.branch) == (0, f"dsabisect/revert-{culprit[:9]}")
    # the branch is the tip with exactly the culprit taken back
    ref = f"refs/heads/{proposal.branch}"
    assert git(made.repo, "rev-parse", f"{ref}^") == made.history.story1_bad
    for path in git(made.repo, "diff", "--name-only", f"{culprit}^", culprit).splitlines():
        assert git(made.repo, "rev-parse", f"{ref}:{path}") == git(made.repo, "rev-parse", f"{culprit}^:{path}")
    message = git(made.repo, "log", "-1", "--format=%B", ref)
    assert message.startswith('Revert "Native next_n') and f"This reverts commit {culprit}." in message
    assert "Proof: 1 cell mended, none broken; 5 cells on cpu" in message
    assert "| default mode=draft_extend (1) | good (split/expanded) | bad: raised | good (split/expanded) |" in (
        proposal.markdown.replace("\\_", "_")
    )
    assert "path native is not taken any more in 2 cells" in proposal.markdown
    # the patch is the branch
    patch = (proposal.folder / "change.patch").read_text()
    assert patch.startswith(f"From {proposal.sha}") and "+++ b/miniindexer/nsa_metadata.py" in patch
    # the report and the page of the run show it
    report = build.build(store.read_events(made.run("native")))
    assert report["recommendation"]["verified"]["holds"] is True
    assert json.loads((made.run("native") / "report.json").read_text()) == report
    assert f"PROVEN    revert onto {made.history.story1_bad[:9]}: 1 cell mended, none broken" in text.render(report)
    assert "1 cell mended, none broken" in html.render(report)
    # the same again says the same
    again, _ = propose("native", branch=True)
    assert (again.sha, again.markdown) == (proposal.sha, proposal.markdown)


def test_gate_of_the_fused_path_with_its_speed(made: Made, propose: Propose) -> None:
    made.run("fused")
    before = made.state()
    proposal, _ = propose("fused", branch=True, calls=5)
    assert made.state() == before
    ref = f"refs/heads/{proposal.branch}"
    assert proposal.exit_code == 0 and proposal.branch.startswith("dsabisect/gate-")
    assert git(made.repo, "diff", "--name-only", f"{ref}^", ref) == "miniindexer/dsa_indexer.py"
    added = [line for line in git(made.repo, "diff", f"{ref}^", ref).splitlines() if line.startswith("+ ")]
    assert [line.strip("+ ") for line in added] == [
        "self.use_fusion = config.USE_FUSION and not cfg.is_neox_style", "if self.use_fusion:",
    ]  # fmt: skip
    shown = proposal.markdown.replace("\\_", "_")
    assert "| fused rope=neox (1) | absent | bad: diverged | off: the path is not taken |" in shown
    assert "| fused rope=interleaved (1) | absent | good | good |" in shown
    row = "| default rope=neox (1) | good (split/expanded) | bad: diverged (fused/expanded) | good (split/expanded) |"
    assert row in shown
    for ways in ("fused/expanded → split/expanded, 1 cell", "fused/expanded → fused/expanded, 1 cell"):
        assert f"time of the default selection: {ways}:" in shown
    proof = json.loads((proposal.folder / "proof.json").read_text())
    assert {(s["without"], s["applied"]) for s in proof["speed"]} == {
        ("fused/expanded", "split/expanded"), ("fused/expanded", "fused/expanded"),
    }  # fmt: skip
    assert all(s["ratio"] > 0 and s["cells"] == 1 for s in proof["speed"])


def test_what_is_reverted_already_is_not_proposed(made: Made, propose: Propose) -> None:
    with pytest.raises(UsageError, match="no condition for a gate"):
        propose("native", action="gate")
    proposal, _ = propose("native", onto=made.history.story2_bad)
    assert (proposal.exit_code, proposal.sha) == (0, "")
    assert proposal.markdown.startswith("# Nothing is proposed")
    assert "already reverted by" in proposal.markdown and "relanded by" in proposal.markdown
    with pytest.raises(UsageError, match="no branch is made"):
        propose("native", onto=made.history.story2_bad, branch=True)


def test_dry_run_and_force_and_wrong_changes(made: Made, propose: Propose) -> None:
    git(made.repo, "update-ref", "-d", f"refs/heads/dsabisect/gate-{_culprit(made, 'fused')[:9]}")
    refs = git(made.repo, "for-each-ref")
    _, said = propose("fused", branch=True, dry_run=True)
    assert git(made.repo, "for-each-ref") == refs and "dry run: nothing of this was done" in said
    with pytest.raises(UsageError, match="--force needs a reason"):
        propose("fused", force=True)
    with pytest.raises(UsageError, match="brought nothing"):
        propose("fused", change="abcdef0")


def _culprit(made: Made, story: str) -> str:
    return str(json.loads((made.run(story) / "report.json").read_text())["first_diverging"]["sha"])


def test_a_run_without_a_finding_gives_what_is_missing(made: Made, propose: Propose, tmp_path: Path) -> None:
    request = Request(repo=made.repo, target="demo", good=made.history.story2_good, bad=made.history.story2_bad,
                      paths=("split",), suite="smoke", cases=CASES["fused"], out=tmp_path / "run")  # fmt: skip
    engine.run(request, lambda line: None)
    proposal = proposing.propose(proposing.Wish(run_dir=tmp_path / "run"), lambda line: None)
    assert (proposal.exit_code, proposal.sha) == (0, "")
    assert "Runs that are missing" in proposal.markdown and "dsabisect run --repo" in proposal.markdown


def test_what_was_proposed_stays_until_there_is_something_new(made: Made, propose: Propose) -> None:
    folder = propose("native")[0].folder
    (folder / "my-notes.txt").write_text("mine\n")
    before = {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}
    assert {"pull.md", "change.patch", "proof.json", "branch.txt"} <= set(before)
    with pytest.raises(DsabisectError):
        propose("native", device="nonsense")
    assert {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()} == before
    propose("native", onto=made.history.story2_bad)  # reverted already: no patch any more
    assert {p.name for p in folder.iterdir() if p.is_file()} == {"pull.md", "my-notes.txt"}


def test_what_was_gated_since_is_not_proposed(made: Made, propose: Propose) -> None:
    """At the tip the fused path is not taken for NeoX any more: another path runs, and nothing is bad."""
    proposal, said = propose("fused", onto=made.history.tip)
    assert (proposal.exit_code, proposal.sha) == (0, "") and any("nothing is proposed" in line for line in said)


def test_no_change_to_act_on(made: Made, tmp_path: Path) -> None:
    request = Request(repo=made.repo, target="demo", bad=made.history.tip, paths=("split",), suite="smoke",
                      cases=CASES["fused"], out=tmp_path / "one")  # fmt: skip
    engine.check(request, lambda line: None)
    with pytest.raises(UsageError, match="this was a check of one commit"):
        proposing.propose(proposing.Wish(run_dir=tmp_path / "one"), lambda line: None)
    unfinished = tmp_path / "two"
    shutil.copytree(made.run("fused"), unfinished)
    lines = (unfinished / "journal.jsonl").read_bytes().splitlines(keepends=True)
    (unfinished / "journal.jsonl").write_bytes(b"".join(lines[:10]))
    with pytest.raises(UsageError, match="not finished") as caught:
        proposing.propose(proposing.Wish(run_dir=unfinished, branch=True), lambda line: None)
    assert "--resume" in caught.value.remedy


def test_the_run_is_held_meanwhile(made: Made, propose: Propose) -> None:
    with store.Journal.resume(made.run("fused")), pytest.raises(StoreError, match=r"held|use|running"):
        propose("fused")
    assert (made.run("fused") / "report.json").exists()
