"""Reverts as merges of trees: what git itself would do, without a work tree, and nothing of the user's changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import MadeRepo
from real_history import SGLANG, needs_sglang

from dsabisect.errors import RepositoryError, UsageError
from dsabisect.outside.gitrepo import GitRepo
from dsabisect.outside.workshop import Workshop
from dsabisect.propose import revert

LINES = "".join(f"line {n}\n" for n in range(30))
Make = Callable[..., MadeRepo]


def bench(made: MadeRepo, tmp_path: Path) -> Workshop:
    return Workshop(GitRepo(made.path, tmp_path / "cache"), tmp_path / "workshop")


def state(made: MadeRepo) -> tuple[str, ...]:
    """Everything of the user's that must stay: refs, status, configuration, stash, index, objects."""
    files = sorted(str(p) for p in (made.path / ".git").rglob("*") if p.is_file())
    asked = (("for-each-ref",), ("status", "--porcelain"), ("config", "--list", "--local"), ("stash", "list"),
             ("ls-files", "-s"))  # fmt: skip
    return (*(made.git(*words) for words in asked), *files)


def test_a_revert_is_what_git_revert_makes(make_repo: Make, tmp_path: Path) -> None:
    made = make_repo()
    made.commit("begin", {"a": LINES, "gone": "x\n"})
    culprit = made.commit("culprit", {"a": LINES.replace("line 3\n", "LINE 3\n"), "gone": None, "new": "n\n"})
    tip = made.commit("later", {"a": (made.path / "a").read_text().replace("line 25\n", "LINE 25\n")})
    before = state(made)
    plan = revert.plan(bench(made, tmp_path), culprit, tip)
    assert state(made) == before
    assert (plan.applies, plan.conflicts, plan.existing) == (True, (), ())
    assert plan.files == ("a", "gone", "new")
    made.git("revert", "--no-edit", culprit)
    assert plan.tree == made.git("rev-parse", "HEAD^{tree}")


def test_conflicts_name_the_commits_that_touch_those_lines_only(make_repo: Make, tmp_path: Path) -> None:
    made = make_repo()
    made.commit("begin", {"a": LINES, "b": LINES})
    changed = LINES.replace("line 3\n", "LINE 3\n")
    culprit = made.commit("culprit", {"a": changed, "b": changed})
    made.commit("elsewhere in the file", {"a": changed.replace("line 25\n", "LINE 25\n")})
    touching = made.commit("the same line", {"a": (made.path / "a").read_text().replace("LINE 3\n", "LINE three\n")})
    plan = revert.plan(bench(made, tmp_path), culprit, "HEAD")
    assert not plan.applies
    assert [(c.path, [x.id for x in c.later]) for c in plan.conflicts] == [("a", [touching])]


@pytest.mark.parametrize("title", ["Undo it quietly", 'Revert "culprit"'])
def test_an_existing_revert_and_reland_are_found_by_words_or_by_patch(
    make_repo: Make, tmp_path: Path, title: str
) -> None:
    made = make_repo()
    made.commit("begin", {"a": LINES})
    changed = LINES.replace("line 3\n", "LINE 3\n")
    culprit = made.commit("culprit", {"a": changed})
    made.commit("above, so that line numbers move", {"a": "top\n" + changed})
    undone = made.commit(title, {"a": "top\n" + LINES})
    again = made.commit("And once more", {"a": "top\n" + changed})
    plan = revert.plan(bench(made, tmp_path), culprit, "HEAD")
    assert [(e.change.id, e.kind) for e in plan.existing] == [(undone, "revert"), (again, "reland")]
    assert plan.existing[0].by == ("its patch" if "quietly" in title else "its words")
    assert not plan.applies and not plan.tree


def test_a_culprit_that_the_tip_lacks_is_refused(make_repo: Make, tmp_path: Path) -> None:
    made = make_repo()
    first = made.commit("begin", {"a": "1\n"})
    culprit = made.commit("culprit", {"a": "2\n"})
    with pytest.raises(RepositoryError, match="does not contain"):
        revert.plan(bench(made, tmp_path), culprit, first)


def test_publishing_adds_one_ref_and_nothing_else(make_repo: Make, tmp_path: Path) -> None:
    made = make_repo()
    made.commit("begin", {"a": LINES})
    culprit = made.commit("culprit", {"a": LINES.replace("line 3\n", "LINE 3\n")})
    made.write({"a": "edited, not committed\n", "untracked": "u\n"})
    shop = bench(made, tmp_path)
    plan = revert.plan(shop, culprit, "HEAD")
    sha = shop.commit(tree=plan.tree, parents=(plan.onto,), message="-m \x1b[31mhostile\n\n--author=x\n")
    refs, status, stash = made.git("for-each-ref"), made.git("status", "--porcelain"), made.git("stash", "list")
    index, config = (made.path / ".git" / "index").read_bytes(), (made.path / ".git" / "config").read_bytes()
    ref = shop.publish("dsabisect/revert-1234567", sha)
    assert made.git("for-each-ref").splitlines() == sorted(
        [*refs.splitlines(), f"{sha} commit\t{ref}"], key=lambda line: line.split("\t")[1]
    )
    assert made.git("status", "--porcelain") == status and made.git("stash", "list") == stash
    assert (made.path / ".git" / "index").read_bytes() == index
    assert (made.path / ".git" / "config").read_bytes() == config
    assert made.git("show", f"{ref}:a") + "\n" == LINES
    assert made.git("fsck", "--strict") == ""
    assert shop.publish("dsabisect/revert-1234567", sha) == ref, "the same once more is no fault"
    other = shop.commit(tree=plan.tree, parents=(plan.onto,), message="other\n")
    with pytest.raises(UsageError, match="holds something else"):
        shop.publish("dsabisect/revert-1234567", other)


@pytest.mark.parametrize(
    "name", ["main", "dsabisect/../main", "--force", "dsabisect/revert-xyz", "dsabisect/a-1234567\n"]
)
def test_no_other_branch_can_be_written(make_repo: Make, tmp_path: Path, name: str) -> None:
    made = make_repo()
    sha = made.commit("begin", {"a": "1\n"})
    with pytest.raises(UsageError):
        bench(made, tmp_path).publish(name, sha)
    assert made.git("for-each-ref", "--format=%(refname)") == "refs/heads/main"


def test_a_patch_file_applies_with_git_am(make_repo: Make, tmp_path: Path) -> None:
    made = make_repo()
    made.commit("begin", {"a": LINES, "blob": b"\0\1\2"})
    culprit = made.commit("culprit", {"a": LINES.replace("line 3\n", "LINE 3\n"), "blob": b"\0\3"})
    shop = bench(made, tmp_path)
    plan = revert.plan(shop, culprit, "HEAD")
    sha = shop.commit(tree=plan.tree, parents=(plan.onto,), message="Revert\n\nWhy.\n", date=shop.date_of(plan.onto))
    (tmp_path / "x.patch").write_bytes(shop.format_patch(sha))
    made.git("am", "-q", str(tmp_path / "x.patch"))
    assert made.git("rev-parse", "HEAD^{tree}") == plan.tree


@needs_sglang
def test_sglang_revert_onto_the_child_gives_the_humans_files(tmp_path: Path) -> None:
    assert SGLANG is not None
    user = GitRepo(SGLANG, tmp_path / "cache")
    shop = Workshop(user, tmp_path / "workshop")
    child = user.history("13852d3f3", "e552f6ed7").changes[1].id
    plan = revert.plan(shop, "13852d3f3", child)
    assert plan.applies and len(plan.files) == 2
    for path in plan.files:
        assert shop.read_tree_file(plan.tree, path) == user.read("73b53e7a8", path) is not None


@needs_sglang
def test_sglang_revert_onto_a_later_tip_finds_revert_and_reland(tmp_path: Path) -> None:
    assert SGLANG is not None
    shop = Workshop(GitRepo(SGLANG, tmp_path / "cache"), tmp_path / "workshop")
    plan = revert.plan(shop, "13852d3f3", "e552f6ed7")
    assert [(e.change.short, e.kind) for e in plan.existing] == [("73b53e7a8", "revert"), ("3b62286fc", "reland")]
    assert not plan.applies
