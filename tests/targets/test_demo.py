"""The bundled history: the same everywhere, whatever a person's git is set to, and each commit what its name says."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dsabisect import targets
from dsabisect.demo import edits, history
from dsabisect.errors import EnvironmentFault, StoreError
from dsabisect.model import Case, Device, Stage
from dsabisect.targets import demo

CPU = Device(name="cpu", arch="cpu")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> demo.DemoHistory:
    return demo.write_history(tmp_path_factory.mktemp("demo") / "miniindexer")


def git(repo: Path, *args: str) -> str:
    return subprocess.run(["git", *args], cwd=repo, check=True, capture_output=True, text=True).stdout.strip()


def checkout(written: demo.DemoHistory, sha: str, folder: Path) -> Path:
    folder.mkdir()
    archive = subprocess.run(["git", "archive", sha], cwd=written.path, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)
    return folder


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    request = targets.BuildRequest(checkout=folder, device=CPU, interpreter=sys.executable, submodules={}, build_env={})
    (step,) = demo.prepare(request)
    return subprocess.run(step.argv, cwd=folder, capture_output=True, text=True, timeout=step.seconds)


def position(written: demo.DemoHistory, name: str) -> int:
    return written.shas.index(written.named[name])


# ---- the repository ----------------------------------------------------------------------------------------


def test_same_shas_every_time_and_quickly(written: demo.DemoHistory, tmp_path: Path) -> None:
    again = demo.write_history(tmp_path / "again")
    assert again.shas == written.shas
    assert 55 <= len(written.shas) <= 65
    assert len(set(written.shas)) == len(written.shas)


def test_one_line_on_main_clean_and_whole(written: demo.DemoHistory) -> None:
    repo = written.path
    assert git(repo, "rev-list", "--reverse", "--first-parent", "main").split() == list(written.shas)
    assert git(repo, "rev-parse", "HEAD") == written.tip == written.shas[-1]
    assert git(repo, "status", "--porcelain") == ""
    assert git(repo, "symbolic-ref", "HEAD") == "refs/heads/main"
    git(repo, "fsck", "--strict")


def test_persons_git_does_not_matter(
    written: demo.DemoHistory, tmp_path: Path, hermetic: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hostile configuration in every place that git reads, and a template with a hook that fails."""
    hooks = tmp_path / "template" / "hooks"
    hooks.mkdir(parents=True)
    for hook in ("post-checkout", "reference-transaction", "pre-commit"):
        (hooks / hook).write_text("#!/bin/sh\nexit 1\n")
        (hooks / hook).chmod(0o755)
    config = hermetic / ".gitconfig"
    config.write_text(
        f"[init]\n\ttemplateDir = {hooks.parent}\n\tdefaultBranch = trunk\n\tdefaultObjectFormat = sha256\n"
        f"[core]\n\thooksPath = {hooks}\n\tautocrlf = true\n[commit]\n\tgpgSign = true\n[gpg]\n\tprogram = false\n"
        "[user]\n\tname = Somebody\n"
    )
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    monkeypatch.setenv("GIT_TEMPLATE_DIR", str(hooks.parent))
    monkeypatch.setenv("GIT_DEFAULT_HASH", "sha256")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("GIT_AUTHOR_NAME", "Somebody")
    repo = tmp_path / "repo"
    assert demo.write_history(repo).shas == written.shas
    assert not (repo / ".git" / "hooks").exists()
    assert b"\r" not in (repo / "README.md").read_bytes()
    assert not (tmp_path / "elsewhere").exists()


def test_an_empty_folder_will_do_and_a_full_one_will_not(written: demo.DemoHistory, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert demo.write_history(empty).tip == written.tip
    before = sorted(os.listdir(empty))
    with pytest.raises(StoreError, match="empty folder"):
        demo.write_history(empty)
    assert sorted(os.listdir(empty)) == before
    assert sorted(os.listdir(tmp_path)) == ["empty"]  # nothing half-written is left


def test_no_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EnvironmentFault, match="git is not installed"):
        demo.write_history(tmp_path / "repo")


# ---- the story -----------------------------------------------------------------------------------------------


def test_names_stand_in_the_order_of_the_stories(written: demo.DemoHistory) -> None:
    order = [
        "story1_good", "unbuildable_first", "unbuildable_last", "refactored", "culprit1", "story1_bad",
        "revert1", "lens_2d", "reland1", "story2_good", "renamed", "culprit2", "story2_bad",
        "off1", "flip", "off2", "gated", "tip",
    ]  # fmt: skip
    places = [position(written, name) for name in order]
    assert places == sorted(places)
    assert len(set(places)) == len(places)
    assert position(written, "revert1") == position(written, "story1_bad") + 1
    assert position(written, "off1") == position(written, "story2_bad") + 1
    assert position(written, "story1_bad") - position(written, "culprit1") >= 3
    for name in demo.FIELDS:
        assert getattr(written, name) == written.named[name]


def test_culprits_parents_can_be_built(written: demo.DemoHistory, tmp_path: Path) -> None:
    """Else the answer could only be a set."""
    for name in ("culprit1", "culprit2", "off1", "flip", "off2", "gated"):
        parent = written.shas[position(written, name) - 1]
        assert build(checkout(written, parent, tmp_path / name)).returncode == 0


def test_every_commit_builds_but_the_two_blocks(written: demo.DemoHistory, tmp_path: Path) -> None:
    first, last = position(written, "unbuildable_first"), position(written, "unbuildable_last")
    second = range(position(written, "unbuildable2_first"), position(written, "unbuildable2_last") + 1)
    assert last - first + 1 == 4
    failed = {}
    for index, sha in enumerate(written.shas):
        done = build(checkout(written, sha, tmp_path / sha))
        if done.returncode:
            failed[index] = done.stderr.strip().splitlines()[-1]
    assert list(failed) == [*range(first, last + 1), *second]
    assert {failed[i] for i in range(first, last + 1)} == {"SyntaxError: invalid decimal literal"}
    assert all(failed[i].startswith("AttributeError") for i in second)


def test_revert_gives_back_what_was_there(written: demo.DemoHistory) -> None:
    """Every file that the culprit touched stands after the revert as before it; so git reverts it without conflict."""
    touched = git(written.path, "diff", "--name-only", f"{written.culprit1}~1", written.culprit1).split()
    assert touched
    assert git(written.path, "diff", f"{written.culprit1}~1", written.revert1, "--", *touched) == ""
    title = git(written.path, "log", "-1", "--format=%s", written.culprit1).rpartition(" (#")[0]
    assert git(written.path, "log", "-1", "--format=%s", written.revert1).startswith(f'Revert "{title}"')


def test_flip_is_one_line_in_an_unrelated_change(written: demo.DemoHistory) -> None:
    stat = git(written.path, "diff", "--numstat", f"{written.flip}~1", written.flip).splitlines()
    assert {line.split("\t")[2]: line.split("\t")[:2] for line in stat}["miniindexer/config.py"] == ["1", "1"]
    assert [line.split("\t")[2] for line in stat] == ["benchmarks/bench.py", "miniindexer/config.py"]


def test_culprit2_lowers_a_threshold(written: demo.DemoHistory) -> None:
    diff = git(written.path, "diff", f"{written.culprit2}~1", written.culprit2, "--", "tests")
    assert "-MIN_OVERLAP = 0.935" in diff
    assert "+MIN_OVERLAP = 0.93\n" in diff


def test_many_commits_cannot_matter(written: demo.DemoHistory) -> None:
    touching = git(written.path, "rev-list", "main", "--", *demo.RELEVANT).split()
    assert 25 <= len(touching) <= 45
    needed = {"culprit1", "revert1", "reland1", "culprit2", "off1", "flip", "off2", "gated"}
    assert {written.named[name] for name in needed} <= set(touching)


def test_renaming_is_seen_by_git(written: demo.DemoHistory) -> None:
    status = git(written.path, "diff", "-M", "--name-status", f"{written.named['renamed']}~1", written.named["renamed"])
    assert [line[0] for line in status.splitlines()] == ["R", "R"]


def test_own_tests_of_the_tip_pass(written: demo.DemoHistory, tmp_path: Path) -> None:
    folder = checkout(written, written.tip, tmp_path / "tip")
    assert build(folder).returncode == 0
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "tests"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


# ---- edits ---------------------------------------------------------------------------------------------------


def test_every_commit_changes_something() -> None:
    tree: edits.Tree = {}
    for step in history.STEPS:
        before = dict(tree)
        for edit in step.edits:
            edit.apply(tree)
        assert tree != before, step.title


def test_undone_edits_come_in_reverse() -> None:
    tree = {"a": "one\n", "old": "text"}
    before = dict(tree)
    changes = (
        edits.swap("a", "one", "two"),
        edits.append("a", "more\n"),
        edits.put("b", "c"),
        edits.move("old", "new"),
    )
    for edit in changes:
        edit.apply(tree)
    assert tree == {"a": "two\nmore\n", "b": "c", "new": "text"}
    for edit in edits.undone(changes):
        edit.apply(tree)
    assert tree == before


def test_an_edit_that_fits_nowhere_is_an_error() -> None:
    with pytest.raises(ValueError, match="0 places"):
        edits.swap("a", "x", "y").apply({"a": "b"})
    with pytest.raises(ValueError, match="2 places"):
        edits.swap("a", "x", "y").apply({"a": "xx"})
    with pytest.raises(ValueError, match="already there"):
        edits.put("a", "b").apply({"a": "c"})


# ---- the target ----------------------------------------------------------------------------------------------


def case(stage: Stage, **facets: str | int) -> Case:
    return Case(id="x", stage=stage, facets=facets, shape={})


def test_conforms() -> None:
    assert targets.load("demo") is demo
    assert set(demo.STAGE_OF) == {path.name for path in demo.PATHS}
    assert [path.name for path in demo.PATHS if path.default_selection] == ["default"]


@pytest.mark.parametrize(
    ("name", "stage", "facets", "runs"),
    [
        ("fused", Stage.END_TO_END, {"rope": "neox", "heads": 64}, True),
        ("fused", Stage.LOGITS, {"layout": "native"}, False),
        ("native", Stage.LOGITS, {"layout": "native", "lens": "full"}, True),
        ("native", Stage.LOGITS, {"layout": "expanded"}, False),
        ("native", Stage.LOGITS, {"layout": "ragged"}, False),
        ("expanded", Stage.LOGITS, {"layout": "expanded", "lens": "causal"}, True),
        ("expanded", Stage.LOGITS, {"layout": "native"}, False),
        ("select", Stage.TOPK, {}, True),
        ("default", Stage.END_TO_END, {"arch": "sm90"}, False),
        ("default", Stage.END_TO_END, {"graph": "replay"}, False),
        ("default", Stage.METADATA, {}, False),
    ],
)
def test_supports(name: str, stage: Stage, facets: dict[str, str | int], runs: bool) -> None:
    path = next(p for p in demo.PATHS if p.name == name)
    why = demo.supports(path, case(stage, **facets), CPU)
    assert (why is None) == runs
    assert demo.supports(path, case(stage, **facets), Device(name="cuda:0", arch="sm90")) is not None


def test_gate_switch_is_a_flag_of_the_code(written: demo.DemoHistory) -> None:
    by_name = {path.name: path for path in demo.PATHS}
    flag = demo.gate_switch(by_name["fused"])
    assert flag in git(written.path, "show", f"{written.culprit2}:miniindexer/config.py")
    assert flag in by_name["fused"].env
    assert [name for name, path in by_name.items() if demo.gate_switch(path)] == ["fused"]


def test_sources_are_packaged() -> None:
    """Every file that the history reads is matched by setup.cfg's package_data."""
    root = Path(demo.__file__).parents[2]
    assert "dsabisect.demo = files/*.in" in (root / "setup.cfg").read_text()
    assert {p.suffix for p in (root / "dsabisect" / "demo" / "files").iterdir()} == {".in"}


def test_works_from_a_copy_of_the_package(written: demo.DemoHistory, tmp_path: Path) -> None:
    """Read-only and elsewhere, as an installed package is."""
    shutil.copytree(
        Path(demo.__file__).parents[1], tmp_path / "site" / "dsabisect", ignore=shutil.ignore_patterns("__pycache__")
    )
    code = (
        "import sys; from pathlib import Path; from dsabisect.targets import demo; "
        "print(demo.write_history(Path(sys.argv[1])).tip)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "r")], cwd=tmp_path / "site", capture_output=True, text=True
    )
    assert done.stdout.strip() == written.tip, done.stderr
