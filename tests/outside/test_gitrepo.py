"""Real git on real repositories: what is read is right, and what is the user's never changes by a byte."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dsabisect.errors import DsabisectError, EnvironmentFault, RepositoryError, StoreError
from dsabisect.model import Change
from dsabisect.outside import gitrepo
from dsabisect.outside.commitwords import Told, says_relands, says_reverts, title_layers
from dsabisect.outside.gitrepo import GitRepo

if TYPE_CHECKING:
    from tests.conftest import MadeRepo

    Make = Callable[..., MadeRepo]


@pytest.fixture
def work(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def line(make_repo: Make) -> tuple[MadeRepo, list[str]]:
    """Six commits on one line: kernel, docs, rename, kernel again, mode change, docs."""
    made = make_repo()
    shas = [
        made.commit("Add kernel (#1)", {"src/kernel.py": "one\n", "README": "r\n", "run.sh": "#!/bin/sh\n"}),
        made.commit("Docs (#2)", {"docs/a.md": "a\n"}),
        made.commit("Rename kernel (#3)", {"src/kernel.py": None, "src/dsa/kernel.py": "one\n"}),
        made.commit("Faster kernel (#4)", {"src/dsa/kernel.py": "two\n"}),
    ]
    (made.path / "run.sh").chmod(0o755)
    shas += [made.commit("Make it executable (#5)"), made.commit("More docs (#6)", {"docs/a.md": "b\n"})]
    return made, shas


def listing(*folders: Path) -> dict[str, tuple[object, ...]]:
    """Every file and folder with its mode, size, times and bytes (access times aside)."""
    found: dict[str, tuple[object, ...]] = {}
    for folder in folders:
        for path in [folder, *folder.rglob("*")]:
            info = path.lstat()
            if path.is_symlink():
                content = os.readlink(path)
            else:
                content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
            found[str(path)] = (info.st_mode, info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino, content)
    return found


def files_of(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_symlink() or p.is_file())


def use_everything(repo: GitRepo, good: str, bad: str, out: Path) -> None:
    """Call every method once."""
    history = repo.history(good, bad)
    repo.touching(history, ["src"])
    sha = history.changes[-1].id
    repo.change(sha), repo.tree_key(sha, ["src"]), repo.files(sha, []), repo.read(sha, "README")
    repo.changed_files(sha), repo.patch(sha), repo.submodules(sha), repo.is_shallow()
    repo.reverts_of(good, bad), repo.relands_of(good, bad), repo.later_touching(good, bad)
    repo.checkout(sha, out / "all", ())
    repo.checkout(history.changes[0].id, out / "src", ["src"])
    assert repo.place_submodule(sha, out / "all", "no/such", None) == ""
    with pytest.raises(RepositoryError):
        repo.resolve("no-such-branch")


# ---- opening -----------------------------------------------------------------------------------------------


def test_opens_every_shape_of_repository(line: tuple[MadeRepo, list[str]], tmp_path: Path, work: Path) -> None:
    made, shas = line
    made.git("worktree", "add", "-q", "--detach", str(tmp_path / "linked"), shas[1])
    made.git("clone", "-q", "--bare", ".", str(tmp_path / "bare.git"))
    bones = tmp_path / "bones"  # a git directory without a config, as mirrors keep them
    (bones / "refs").mkdir(parents=True)
    made.git("clone", "-q", "--bare", ".", str(tmp_path / "second.git"))
    (tmp_path / "second.git" / "objects").rename(bones / "objects")
    (tmp_path / "second.git" / "packed-refs").rename(bones / "packed-refs")
    (bones / "HEAD").write_text("ref: refs/heads/main\n")
    shapes = [made.path, made.path / "src" / "dsa", made.path / ".git", tmp_path / "bare.git", bones]
    for path in shapes:
        assert GitRepo(path, work).resolve("HEAD") == shas[-1], path
    linked = GitRepo(tmp_path / "linked", work)
    assert linked.resolve("HEAD") == shas[1] and linked.resolve("main") == shas[-1]


def test_relative_paths_and_names_that_need_quoting(
    make_repo: Make, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ('"quoted"', "#hash", "with space", "new\nline", "-dash", "ünï"):
        made = make_repo(f"{name}/repo")
        sha = made.commit("One", {"f": "x"})
        monkeypatch.chdir(made.path.parent)
        repo = GitRepo(Path("repo"), work)
        assert repo.read(repo.resolve("HEAD"), "f") == b"x", name
        assert repo.resolve("main") == sha
    top = make_repo('"top')
    monkeypatch.chdir(top.path.parent)
    sha = top.commit("One", {"f": "y"})
    assert GitRepo(Path('"top'), work).read(sha, "f") == b"y"


def test_borrowed_objects_of_a_borrower(line: tuple[MadeRepo, list[str]], tmp_path: Path, work: Path) -> None:
    made, shas = line
    made.git("clone", "-q", "--shared", ".", str(tmp_path / "second"))
    subprocess.run(["git", "clone", "-q", "--shared", "second", "third"], cwd=tmp_path, check=True)
    (tmp_path / "third/.git/objects/info/alternates").write_text("../../../second/.git/objects\n")  # relative
    assert GitRepo(tmp_path / "third", work).read(shas[0], "README") == b"r\n"


def test_what_is_no_repository(tmp_path: Path, work: Path) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "file").write_text("")
    for name, what in (("plain", "not a git repository"), ("none", "no such folder"), ("file", "not a folder")):
        with pytest.raises(RepositoryError, match=f"{what}.*{name}.*--repo") as caught:
            GitRepo(tmp_path / name, work)
        assert caught.value.exit_code == 128 and "\n" not in str(caught.value)


def test_unwritable_cache_is_an_error_with_its_remedy(line: tuple[MadeRepo, list[str]], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="DSABISECT_CACHE"):
        GitRepo(line[0].path, tmp_path / "file")


def test_git_not_installed(line: tuple[MadeRepo, list[str]], work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    GitRepo(line[0].path, work)
    (work / "bin").mkdir()
    (work / "bin" / "env").symlink_to(str(shutil.which("env")))
    for path in ("/nonexistent", str(work / "bin")):
        monkeypatch.setenv("PATH", path)
        with pytest.raises(EnvironmentFault, match="Install git"):
            GitRepo(line[0].path, work)


# ---- revisions ---------------------------------------------------------------------------------------------


def test_resolves_what_git_resolves(line: tuple[MadeRepo, list[str]], work: Path) -> None:
    made, shas = line
    made.git("tag", "-a", "v1", "-m", "annotated", shas[2])
    made.git("branch", "topic/one", shas[1])
    repo = GitRepo(made.path, work)
    names = {"HEAD": 5, "main": 5, "HEAD~2": 3, "v1": 2, "v1^{commit}": 2, "topic/one": 1, "refs/heads/topic/one": 1,
             shas[3]: 3, shas[3][:8]: 3, "main@{0}": 5, "@": 5, "HEAD^{/Docs}": 1}  # fmt: skip
    for name, at in names.items():
        assert repo.resolve(name) == shas[at], name
    made.commit("Later", {"x": "x"})
    assert repo.resolve("main") != shas[-1], "names are looked up when asked, not when opened"


@pytest.mark.parametrize(
    ("rev", "what"),
    [
        ("--upload-pack=x", "looks like an option"), ("-n1", "looks like an option"), ("", "is empty"),
        ("  ", "is empty"), ("HEAD~1..HEAD", "is a range"), ("HEAD...main", "is a range"), ("^HEAD", "is a range"),
        ("HEAD^@", "is a range"), ("HEAD^!", "is a range"), ("HEAD\nmain", "control characters"),
        ("HEAD\0", "control characters"), (" HEAD", "control characters"), ("nope", "names no commit"),
        ("f" * 40, "names no commit"), ("HEAD:README", "names no commit"), ("HEAD~99", "names no commit"),
        ("HEAD^{tree}", "names no commit"), ("README", "names no commit"), ("$(touch x)", "names no commit"),
    ],
)  # fmt: skip
def test_bad_revisions_are_one_clear_line(line: tuple[MadeRepo, list[str]], work: Path, rev: str, what: str) -> None:
    repo = GitRepo(line[0].path, work)
    with pytest.raises(RepositoryError, match=what) as caught:
        repo.resolve(rev)
    assert "\n" not in str(caught.value) and caught.value.remedy and str(line[0].path) in str(caught.value)


def test_ambiguous_short_sha(make_repo: Make, work: Path) -> None:
    made = make_repo()
    seen: dict[str, str] = {}
    short = ""
    for n in range(200):  # 16 first digits: two commits share four of them soon enough for two
        sha = made.commit(str(n)) if n < 2 else _loose_commit(made, str(n))
        if sha[:4] in seen:
            short = sha[:4]
            break
        seen[sha[:4]] = sha
    if not short:
        pytest.skip("no two commits share four digits")
    with pytest.raises(RepositoryError, match="ambiguous"):
        GitRepo(made.path, work).resolve(short)


def _loose_commit(made: MadeRepo, text: str) -> str:
    return made.git("commit-tree", "HEAD^{tree}", "-m", text)


def test_change_tells_sha_title_author_and_date(line: tuple[MadeRepo, list[str]], work: Path) -> None:
    made, shas = line
    change = GitRepo(made.path, work).change(shas[0])
    assert (change.id, change.title, change.author, change.kind) == (shas[0], "Add kernel (#1)", "Ada Author", "commit")
    assert change.date == "2026-05-28T20:27:40+00:00"
    empty = made.commit("")
    assert GitRepo(made.path, work).change(empty).title == ""
    latin = made.git("-c", "i18n.commitEncoding=latin1", "commit-tree", "HEAD^{tree}", "-m", "x")
    assert GitRepo(made.path, work).change(latin).title == "x"
    with pytest.raises(RepositoryError):
        GitRepo(made.path, work).change("e" * 40)


# ---- ranges ------------------------------------------------------------------------------------------------


def test_a_straight_range_is_oldest_first_with_both_ends(line: tuple[MadeRepo, list[str]], work: Path) -> None:
    made, shas = line
    history = GitRepo(made.path, work).history(shas[1], "main")
    assert [c.id for c in history.changes] == shas[1:] and history.note == ""
    direct = GitRepo(made.path, work).history(shas[4], shas[5])
    assert [c.id for c in direct.changes] == shas[4:], "neighbours are the smallest range"


def merged(make_repo: Make) -> tuple[MadeRepo, dict[str, str]]:
    """base ─ main1 ─ M ─ main2, and base ─ side1 ─ side2 merged by M; fork lies beside main2."""
    made = make_repo()
    at = {"base": made.commit("base", {"f": "0\n"})}
    made.git("checkout", "-q", "-b", "side")
    at["side1"] = made.commit("side1", {"s": "1\n"})
    at["side2"] = made.commit("side2", {"s": "2\n"})
    made.git("checkout", "-q", "main")
    at["main1"] = made.commit("main1", {"f": "1\n"})
    made.minutes += 1
    made.git("merge", "-q", "--no-ff", "-m", "M", "side")
    at["M"] = made.git("rev-parse", "HEAD")
    at["main2"] = made.commit("main2", {"f": "2\n"})
    made.git("checkout", "-q", "-b", "fork", at["main1"])
    at["fork"] = made.commit("fork", {"k": "1\n"})
    made.git("checkout", "-q", "main")
    return made, at


def test_first_parent_only(make_repo: Make, work: Path) -> None:
    made, at = merged(make_repo)
    repo = GitRepo(made.path, work)
    history = repo.history("main~3", "main")
    assert [c.title for c in history.changes] == ["base", "main1", "M", "main2"]
    assert repo.touching(history, ["s"]) == {at["M"]}, "the merge brings the side branch's change to this line"
    assert repo.changed_files(at["M"]) == ("s",)


def test_good_that_came_in_through_a_merge(make_repo: Make, work: Path) -> None:
    made, at = merged(make_repo)
    history = GitRepo(made.path, work).history(at["side1"], "main")
    assert [c.title for c in history.changes] == ["base", "main1", "M", "main2"]
    assert "came in through a merge" in history.note and "takes its place" in history.note
    assert at["base"][:9] in history.note and at["side1"][:9] in history.note


def test_good_on_another_branch_gives_way_to_what_both_share(make_repo: Make, work: Path) -> None:
    made, at = merged(make_repo)
    history = GitRepo(made.path, work).history("fork", "main")
    assert [c.title for c in history.changes] == ["main1", "M", "main2"]
    assert "is not an ancestor" in history.note and at["main1"][:9] in history.note


def test_every_step_of_a_history_is_a_first_parent_step(make_repo: Make, work: Path) -> None:
    made, at = merged(make_repo)
    repo = GitRepo(made.path, work)
    for good in at.values():
        for bad in at.values():
            try:
                changes = repo.history(good, bad).changes
            except RepositoryError:
                continue
            assert changes[-1].id == bad
            assert all(made.git("rev-parse", f"{b.id}^1") == a.id for a, b in pairwise(changes))
            assert made.git("merge-base", changes[0].id, good) == changes[0].id, "good contains what takes its place"


def test_ranges_that_are_none(line: tuple[MadeRepo, list[str]], work: Path) -> None:
    made, shas = line
    repo = GitRepo(made.path, work)
    with pytest.raises(RepositoryError, match="same commit"):
        repo.history("main", shas[-1])
    with pytest.raises(RepositoryError, match=rf"is newer than bad.*Swap them: --good {shas[0]} --bad main"):
        repo.history("main", shas[0])
    made.git("checkout", "-q", "--orphan", "island")
    made.commit("island", {"i": "i"})
    with pytest.raises(RepositoryError, match="share no history"):
        repo.history("island", "main")


def test_shallow_clone(line: tuple[MadeRepo, list[str]], tmp_path: Path, work: Path) -> None:
    made, shas = line
    made.git("clone", "-q", "--depth", "3", f"file://{made.path}", str(tmp_path / "shallow"))
    repo = GitRepo(tmp_path / "shallow", work)
    assert repo.is_shallow() and not GitRepo(made.path, work).is_shallow()
    assert [c.id for c in repo.history(shas[3], "HEAD").changes] == shas[3:]
    with pytest.raises(RepositoryError, match=r"shallow.*--deepen.*--unshallow"):
        repo.resolve(shas[0])
    with pytest.raises(RepositoryError, match="shallow"):
        repo.changed_files(shas[3])  # its parent is beyond the boundary: not "everything is new"
    subprocess.run(["git", "fetch", "-q", "--depth", "1", f"file://{made.path}", shas[0]], check=True,
                   cwd=tmp_path / "shallow")  # fmt: skip
    with pytest.raises(RepositoryError, match=r"lacks part of the range.*--unshallow"):
        GitRepo(tmp_path / "shallow", work).history(shas[0], "HEAD")
    subprocess.run(["git", "fetch", "-q", "--unshallow"], cwd=tmp_path / "shallow", check=True)
    whole = GitRepo(tmp_path / "shallow", work)
    assert not whole.is_shallow() and len(whole.history(shas[0], "HEAD").changes) == 6


def test_replacements_are_part_of_the_history(line: tuple[MadeRepo, list[str]], work: Path) -> None:
    made, shas = line
    made.git("replace", "--graft", shas[4], shas[1])
    assert [c.id for c in GitRepo(made.path, work).history(shas[0], "main").changes] == [*shas[:2], *shas[4:]]


# ---- trees -------------------------------------------------------------------------------------------------


def test_touching_sees_both_names_of_a_rename(line: tuple[MadeRepo, list[str]], work: Path) -> None:
    made, shas = line
    repo = GitRepo(made.path, work)
    history = repo.history(shas[0], shas[5])
    assert repo.touching(history, ["src/kernel.py"]) == {shas[2]}
    assert repo.touching(history, ["src/dsa/"]) == {shas[2], shas[3]}
    assert repo.touching(history, ["*.md"]) == {shas[1], shas[5]}
    assert repo.touching(history, ["run.sh"]) == {shas[4]}, "a mode is a change"
    assert repo.touching(history, ["src", ":(exclude)src/dsa"]) == {shas[2]}
    assert repo.touching(history, ["none"]) == frozenset()
    assert repo.changed_files(shas[2]) == ("src/dsa/kernel.py", "src/kernel.py")
    assert repo.changed_files(shas[0]) == ("README", "run.sh", "src/kernel.py"), "a root commit adds everything"


def test_a_file_called_like_a_sha_is_not_a_commit(make_repo: Make, work: Path) -> None:
    made = make_repo()
    first = made.commit("one", {"a": "1"})
    second = made.commit("two", {"b": "1"})
    third = made.commit("three", {second: "a file"})
    repo = GitRepo(made.path, work)
    assert repo.touching(repo.history(first, third), [second]) == {third}


def test_tree_key_is_shared_by_a_revert_and_by_nothing_else(line: tuple[MadeRepo, list[str]], work: Path) -> None:
    made, shas = line
    made.git("revert", "--no-edit", shas[3])
    reverted = made.git("rev-parse", "HEAD")
    repo = GitRepo(made.path, work)
    keys = {sha: repo.tree_key(sha, ["src"]) for sha in [*shas, reverted]}
    assert keys[reverted] == keys[shas[2]] != keys[shas[3]]
    assert keys[shas[0]] == keys[shas[1]] != keys[shas[2]], "the same blob under another name is another tree"
    assert repo.tree_key(shas[3], ["run.sh"]) != repo.tree_key(shas[4], ["run.sh"]), "the mode counts"
    assert repo.tree_key(shas[3], ["src", "docs"]) == repo.tree_key(shas[3], ["docs", "src"])


def test_reading_files(line: tuple[MadeRepo, list[str]], work: Path) -> None:
    made, shas = line
    odd = {"a*b": b"star", "sp ace": b"\0\xff", "übung\n": b"nl", ":(top)x": b"magic", "axb": b"x"}
    sha = made.commit("odd names", odd)
    repo = GitRepo(made.path, work)
    want = {**odd, "README": b"r\n"}
    assert {name: repo.read(sha, name) for name in want} == want
    for name in ("none", "src", "src/", "", "/README", "README/x", "../README", "a*", "./README"):
        assert repo.read(sha, name) is None, name
    assert repo.read(shas[0], "src/dsa/kernel.py") is None
    assert repo.files(sha, ["src", "*.md"]) == ("docs/a.md", "src/dsa/kernel.py")
    assert "übung\n" in repo.files(sha, ())


def test_patch_applies_and_shows_renames(line: tuple[MadeRepo, list[str]], work: Path, tmp_path: Path) -> None:
    made, shas = line
    repo = GitRepo(made.path, work)
    assert "rename from src/kernel.py" in repo.patch(shas[2])
    text = repo.patch(shas[3])
    assert text.startswith("diff --git a/src/dsa/kernel.py") and "\n-one\n+two\n" in text
    assert repo.patch(shas[3], ["docs"]) == ""
    made.git("checkout", "-q", shas[2])
    made.git("apply", "--index", data=text)
    assert made.git("write-tree") == made.git("rev-parse", f"{shas[3]}^{{tree}}")


def test_the_persons_diff_settings_change_nothing(line: tuple[MadeRepo, list[str]], work: Path) -> None:
    made, shas = line
    repo = GitRepo(made.path, work)
    before = repo.patch(shas[3]), repo.history(shas[0], "main"), repo.changed_files(shas[2])
    settings = {
        "diff.noprefix": "true", "diff.external": "false", "color.ui": "always", "log.showSignature": "true",
        "diff.renames": "false", "core.quotePath": "true", "log.date": "raw", "diff.algorithm": "patience",
    }  # fmt: skip
    for name, value in settings.items():
        made.git("config", name, value)
    again = GitRepo(made.path, work)
    assert (again.patch(shas[3]), again.history(shas[0], "main"), again.changed_files(shas[2])) == before


# ---- checkouts ---------------------------------------------------------------------------------------------


def test_checkout_of_chosen_folders_and_of_everything(
    line: tuple[MadeRepo, list[str]], work: Path, tmp_path: Path
) -> None:
    made, shas = line
    repo = GitRepo(made.path, work)
    repo.checkout(shas[5], tmp_path / "co" / "some", ["src", "run.sh", "not/there"])
    assert files_of(tmp_path / "co" / "some") == ["run.sh", "src/dsa/kernel.py"]
    assert os.access(tmp_path / "co" / "some" / "run.sh", os.X_OK)
    (tmp_path / "co" / "all").mkdir()
    repo.checkout(shas[0], tmp_path / "co" / "all", ())
    assert files_of(tmp_path / "co" / "all") == ["README", "run.sh", "src/kernel.py"]
    assert (tmp_path / "co" / "all" / "src" / "kernel.py").read_text() == "one\n"
    assert sorted(os.listdir(tmp_path / "co")) == ["all", "some"], "no temporary folder is left"


def test_checkout_errors_leave_nothing(line: tuple[MadeRepo, list[str]], work: Path, tmp_path: Path) -> None:
    made, shas = line
    repo = GitRepo(made.path, work)
    with pytest.raises(RepositoryError, match="has none of python/sglang"):
        repo.checkout(shas[0], tmp_path / "co" / "x", ["python/sglang"])
    assert not (tmp_path / "co").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    with pytest.raises(StoreError, match="not empty"):
        repo.checkout(shas[0], tmp_path / "full", ())
    assert files_of(tmp_path / "full") == ["mine"]
    with pytest.raises(StoreError, match="--out"):
        repo.checkout(shas[0], tmp_path / "full" / "mine" / "below", ())
    blob = made.git("rev-parse", f"{shas[0]}:README")
    (made.path / ".git" / "objects" / blob[:2] / blob[2:]).unlink()
    with pytest.raises(RepositoryError, match="fsck"):
        repo.checkout(shas[0], tmp_path / "co" / "y", ())
    assert not os.listdir(tmp_path / "co")


def test_disk_full_while_checking_out(make_repo: Make, work: Path, tmp_path: Path) -> None:
    made = make_repo()
    made.commit("big", {f"big{n}": bytes([n]) * 300_000 for n in range(4)})
    code = (
        "import resource,sys;from pathlib import Path;from dsabisect.outside.gitrepo import GitRepo\n"
        "from dsabisect.errors import StoreError\n"
        "r=GitRepo(Path(sys.argv[1]),Path(sys.argv[2]));resource.setrlimit(resource.RLIMIT_FSIZE,(100000,100000))\n"
        "try: r.checkout('HEAD',Path(sys.argv[3])/'x',())\n"
        "except StoreError as e: print('store',e)\n"
    )
    root = Path(gitrepo.__file__).resolve().parents[2]
    (tmp_path / "out").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", code, made.path, work, tmp_path / "out"], text=True, capture_output=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip
    assert done.stdout.startswith("store ") and "Free some space" in done.stdout, done.stdout + done.stderr
    assert not os.listdir(tmp_path / "out")


def test_files_are_the_blobs_whatever_attributes_ask_for(make_repo: Make, work: Path, tmp_path: Path) -> None:
    made = make_repo()
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    want = {"a.bin": pointer, "id.txt": "$Id$\n", "eol.txt": "a\nb\n", "enc.txt": "plain\n", "auto.txt": "x\ny\n"}
    attributes = (
        "*.bin filter=lfs diff=lfs merge=lfs -text\nid.txt ident\neol.txt text eol=crlf\nauto.txt text=auto\n"
        "enc.txt working-tree-encoding=UTF-16\n[attr]evil filter=evil\n*.txt evil export-subst\n"
    )
    made.commit("plain", want)
    tree = made.git("rev-parse", "HEAD^{tree}")
    blob = made.git("hash-object", "-w", "--stdin", data=attributes)
    listed = made.git("ls-tree", tree) + f"\n100644 blob {blob}\t.gitattributes\n"
    sha = made.git("commit-tree", made.git("mktree", data=listed), "-m", "attributes")
    marker = tmp_path / "ran"
    for name in ("lfs", "evil"):
        made.git("config", f"filter.{name}.smudge", f"touch {marker}; cat")
        made.git("config", f"filter.{name}.required", "true")
    made.git("config", "core.autocrlf", "true")
    hook = made.path / ".git" / "hooks" / "post-checkout"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\ntouch {marker}\n")
    hook.chmod(0o755)
    repo = GitRepo(made.path, work)
    repo.checkout(sha, tmp_path / "co", ())
    assert {n: (tmp_path / "co" / n).read_bytes() for n in want} == {n: t.encode() for n, t in want.items()}
    assert not marker.exists()


def test_symbolic_links_that_lead_out_are_left_out(make_repo: Make, work: Path, tmp_path: Path) -> None:
    made = make_repo()
    (tmp_path / "secret").write_text("secret")
    links = {
        "in": "d/file", "d/up": "../d/file", "dangling": "nowhere", "abs": str(tmp_path / "secret"), "out": "../secret",
        "d/out": "../../secret", "hop": "d/door/secret", "d/door": "../..", "self": ".",
    }  # fmt: skip
    made.write({"d/file": "x"})
    for name, target in links.items():
        (made.path / name).symlink_to(target)
    sha = made.commit("links")
    GitRepo(made.path, work).checkout(sha, tmp_path / "co", ())
    assert files_of(tmp_path / "co") == ["d/file", "d/up", "dangling", "in", "self"]


def test_hostile_trees_write_nothing_outside(make_repo: Make, work: Path, tmp_path: Path) -> None:
    made = make_repo()
    blob = made.git("hash-object", "-w", "--stdin", data="x")
    link = made.git("hash-object", "-w", "--stdin", data="..")
    evil_tree = made.git("mktree", data=f"100644 blob {blob}\tpwned\n")
    trees = (
        f"040000 tree {evil_tree}\t..",
        f"040000 tree {evil_tree}\t.git",
        f"120000 blob {link}\ta\n040000 tree {evil_tree}\ta",
    )
    for entries in trees:
        sha = made.git("commit-tree", _tree(made, entries), "-m", "evil")
        with contextlib.suppress(DsabisectError):
            GitRepo(made.path, work).checkout(sha, tmp_path / "co", ())
        assert not list(tmp_path.glob("pwned")) and not (tmp_path / "co" / ".git").exists()
        shutil.rmtree(tmp_path / "co", ignore_errors=True)


def _tree(made: MadeRepo, listing: str) -> str:
    """A tree object with entries that git itself would refuse to write."""
    raw = b""
    for entry in listing.split("\n"):
        meta, name = entry.split("\t")
        mode, _, sha = meta.split()
        raw += f"{mode.lstrip('0')} {name}\0".encode() + bytes.fromhex(sha)
    done = subprocess.run(["git", "hash-object", "-w", "-t", "tree", "--literally", "--stdin"], input=raw,
                          cwd=made.path, capture_output=True, check=True)  # fmt: skip
    return done.stdout.decode().strip()


def test_many_checkouts_at_a_time(line: tuple[MadeRepo, list[str]], work: Path, tmp_path: Path) -> None:
    made, shas = line
    repo = GitRepo(made.path, work)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: repo.checkout(shas[n % 6], tmp_path / f"co{n}", ()), range(12)))
    assert all(files_of(tmp_path / f"co{n}") == files_of(tmp_path / f"co{n % 6}") for n in range(12))
    assert not list(repo.mirror.glob("index-*"))


# ---- submodules --------------------------------------------------------------------------------------------


@pytest.fixture
def nested(make_repo: Make) -> tuple[MadeRepo, MadeRepo, list[str]]:
    """A repository with submodule third-party/lib (section "lib"), moved once; shas: without, old pin, new pin."""
    lib, outer = make_repo("lib"), make_repo("outer")
    lib.commit("old", {"include/lib.h": "old\n"})
    shas = [outer.commit("start", {"main.c": "m\n"})]
    outer.git("submodule", "--quiet", "add", "--name", "lib", str(lib.path), "third-party/lib")
    shas.append(outer.commit("add lib"))
    new = lib.commit("new", {"include/lib.h": "new\n"})
    outer.git("-C", "third-party/lib", "fetch", "-q")
    outer.git("-C", "third-party/lib", "checkout", "-q", new)
    shas.append(outer.commit("move lib"))
    return outer, lib, shas


def test_submodules_are_read_from_the_commit(nested: tuple[MadeRepo, MadeRepo, list[str]], work: Path) -> None:
    outer, lib, shas = nested
    repo = GitRepo(outer.path, work)
    assert repo.submodules(shas[0]) == {}
    old, new = repo.submodules(shas[1])["third-party/lib"], repo.submodules(shas[2])["third-party/lib"]
    assert (old.url, old.name, old.path) == (str(lib.path), "lib", "third-party/lib")
    assert old.sha == lib.git("rev-parse", "HEAD~1") and new.sha == lib.git("rev-parse", "HEAD")
    assert repo.touching(repo.history(shas[0], shas[2]), ["third-party/lib"]) == {shas[1], shas[2]}
    assert repo.files(shas[2], ["third-party"]) == ()


def test_submodule_from_the_users_own_clone(
    nested: tuple[MadeRepo, MadeRepo, list[str]], work: Path, tmp_path: Path
) -> None:
    outer, _, shas = nested
    repo = GitRepo(outer.path, work)
    before = listing(outer.path)
    repo.checkout(shas[1], tmp_path / "co", ())
    assert repo.place_submodule(shas[1], tmp_path / "co", "third-party/lib", None) == ""
    assert (tmp_path / "co/third-party/lib/include/lib.h").read_text() == "old\n"
    assert repo.place_submodule(shas[0], tmp_path / "co", "third-party/lib", None) == ""
    (outer.path / "deep").mkdir()
    deep = GitRepo(outer.path / "deep", work)
    deep.checkout(shas[2], tmp_path / "second", ["main.c"])
    assert deep.place_submodule(shas[2], tmp_path / "second", "third-party/lib", None) == ""
    assert (tmp_path / "second/third-party/lib/include/lib.h").read_text() == "new\n"
    (outer.path / "deep").rmdir()
    after = listing(outer.path)
    assert {k: v for k, v in after.items() if k != str(outer.path)} == {
        k: v
        for k, v in before.items()
        if k != str(outer.path)  # its own time: this test made a folder in it
    }


def test_submodule_from_a_given_source(
    nested: tuple[MadeRepo, MadeRepo, list[str]], work: Path, tmp_path: Path
) -> None:
    outer, lib, shas = nested
    repo = GitRepo(outer.path, work)
    plain = tmp_path / "plain"
    (plain / "include").mkdir(parents=True)
    (plain / "include/lib.h").write_text("plain\n")
    (plain / "etc").symlink_to("/etc")
    lib.git("clone", "-q", "--bare", ".", str(tmp_path / "lib.git"))
    lib.git("clone", "-q", "--depth", "1", f"file://{lib.path}", str(tmp_path / "young"))
    inside = outer.path / "vendored"  # a plain folder inside some repository is a plain folder
    inside.mkdir()
    (inside / "x.h").write_text("x\n")
    cases = {
        lib.path: ("include/lib.h", "old\n", ""),
        tmp_path / "lib.git": ("include/lib.h", "old\n", ""),
        plain: ("include/lib.h", "plain\n", "not checked against the pinned"),
        tmp_path / "young": ("include/lib.h", "new\n", "which lacks the pinned"),
        inside: ("x.h", "x\n", "not checked against the pinned"),
    }
    for number, (source, (name, content, said)) in enumerate(cases.items()):
        dest = tmp_path / f"co{number}"
        repo.checkout(shas[1], dest, ())
        before = listing(source)
        note = repo.place_submodule(shas[1], dest, "third-party/lib", source)
        assert (dest / "third-party/lib" / name).read_text() == content, source
        assert said in note and bool(said) == bool(note), source
        assert not (dest / "third-party/lib/.git").exists() and not (dest / "third-party/lib/etc").is_symlink()
        assert listing(source) == before


def test_submodule_that_cannot_be_had(nested: tuple[MadeRepo, MadeRepo, list[str]], work: Path, tmp_path: Path) -> None:
    outer, lib, shas = nested
    outer.git("clone", "-q", "--bare", ".", str(tmp_path / "bare.git"))
    lib.git("clone", "-q", "--bare", "--depth", "1", f"file://{lib.path}", str(tmp_path / "young.git"))
    repo = GitRepo(tmp_path / "bare.git", work)
    repo.checkout(shas[1], tmp_path / "co", ())
    for source in (None, tmp_path / "none", tmp_path / "young.git"):
        with pytest.raises(RepositoryError, match=r"--submodule third-party/lib=PATH") as caught:
            repo.place_submodule(shas[1], tmp_path / "co", "third-party/lib", source)
        assert "\n" not in str(caught.value)
    assert files_of(tmp_path / "co") == [".gitmodules", "main.c"]


# ---- words of commits --------------------------------------------------------------------------------------


def told(title: str, body: str = "", sha: str = "a" * 40) -> Told:
    return Told(change=Change(id=sha, title=title), parents=(), body=f"{title}\n\n{body}")


ORIGINAL = told("[DSA] Support NextN = 2/4 (#24870)", sha="13852d3f311750811c24d8ed0a5eeb1b6ada4688")


@pytest.mark.parametrize(
    ("title", "body", "reverts", "relands"),
    [
        ('Revert "[DSA] Support NextN = 2/4" (#27138)', "", True, False),
        ('Revert "[DSA] Support NextN = 2/4 (#24870)" (#27138)', "", True, False),
        ('revert: "[dsa] support  nextn = 2/4"', "", True, False),
        ('[CI] Revert "[DSA] Support NextN = 2/4"', "", True, False),
        ('Revert "[DSA] Support…" (#9)', "", False, False),  # too short a beginning proves nothing
        ('Revert "[DSA] Support NextN = 2…" (#9)', "", True, False),
        ("Back out NextN", "This reverts commit 13852d3f311750811c24d8ed0a5eeb1b6ada4688.", True, False),
        ("Back out NextN", "This reverts commit 13852d3f3, reversing\nchanges made to aaaaaaaaa.", True, False),
        ("Back out NextN", "This reverts commit 13852d3f4.", False, False),
        ("Back out NextN", "Reverts sgl-project/sglang#24870", True, False),
        ("Back out NextN", "Reverts sgl-project/sglang#248701", False, False),
        ("Revert #24870: it breaks replay (#3)", "", True, False),
        ("Fix what #24870 broke (#3)", "See #24870", False, False),
        ('Reland "[DSA] Support NextN = 2/4" (#27166)', "", False, True),
        ('Reapply "[DSA] Support NextN = 2/4"', "", False, True),
        ('Revert "Revert "[DSA] Support NextN = 2/4" (#27138)" (#5)', "", False, True),
        ("[Reland] [DSA] Support NextN = 2/4", "", False, True),
        ("[DSA] Support NextN = 2/4 (reland) (#6)", "", False, True),
        ("Re-land #24870: NextN with a fix (#7)", "", False, True),
        ('Revert "Reland "[DSA] Support NextN = 2/4" (#27166)" (#8)', "", False, False),
        ('Reland "Support something else" (#9)', "", False, False),
        ('Revert "Support something else" (#9)', "", False, False),
        ("[DSA] Support NextN = 2/4 (#24870)", "", False, False),
    ],
)  # fmt: skip
def test_words_that_revert_and_reland(title: str, body: str, reverts: bool, relands: bool) -> None:
    later = told(title, body)
    assert (says_reverts(later, ORIGINAL), says_relands(later, ORIGINAL)) == (reverts, relands)


def test_layers_of_a_title() -> None:
    assert title_layers('Revert "Reland "X" (#2)" (#3)') == (("revert", "reland"), "x")
    assert title_layers("Plain (#1) (#2)") == ((), "plain")


def test_reverts_and_relands_of_a_reland_itself(make_repo: Make, work: Path) -> None:
    made = make_repo()
    titles = ["Start", "Add X (#1)", 'Revert "Add X" (#2)', 'Reland "Add X" (#3)', 'Revert "Reland "Add X"" (#4)']
    shas = [made.commit(title, {"f": str(n)}) for n, title in enumerate(titles)]
    made.git("checkout", "-q", "-b", "side")
    inner = made.commit(f"Undo\n\nThis reverts commit {shas[4]}.", {"s": "1"})
    made.git("checkout", "-q", "main")
    made.git("merge", "-q", "--no-ff", "-m", "Merge side", "side")
    repo = GitRepo(made.path, work)

    def ids(changes: tuple[Change, ...]) -> list[str]:
        return [c.id for c in changes]

    assert ids(repo.reverts_of(shas[1], "main")) == [shas[2]]
    assert ids(repo.relands_of(shas[1], "main")) == [shas[3]]
    assert ids(repo.reverts_of(shas[3], "main")) == [shas[4]]
    assert ids(repo.relands_of(shas[3], "main")) == [inner], "found by sha, also on a merged branch"
    assert ids(repo.reverts_of(shas[1], shas[1])) == [] and ids(repo.reverts_of(shas[1], shas[2])) == [shas[2]]


def test_later_touching(line: tuple[MadeRepo, list[str]], work: Path) -> None:
    made, shas = line
    repo = GitRepo(made.path, work)
    assert [c.id for c in repo.later_touching(shas[0], "main")] == [shas[2], shas[4]]
    assert [c.id for c in repo.later_touching(shas[1], "main")] == [shas[5]]
    assert repo.later_touching(shas[5], "main") == ()
    empty = made.commit("empty")
    assert repo.later_touching(empty, made.commit("more", {"x": "x"})) == ()


# ---- the user's repository stays as it is ------------------------------------------------------------------


def trouble(made: MadeRepo, shas: list[str], kind: str) -> None:
    """Put the repository into a state that must neither matter nor change."""
    git_dir = made.path / ".git"
    if kind == "dirty":
        made.write({"src/dsa/kernel.py": "edited\n", "untracked": "u\n", "staged": "s\n"})
        made.git("add", "staged")
        os.utime(made.path / "README", (1, 1))  # the index is stale: a refresh would rewrite it
    elif kind == "bisect":
        made.git("bisect", "start", shas[5], shas[0])
    elif kind == "rebase":
        made.git("checkout", "-q", "-b", "topic", shas[3])
        made.commit("conflict", {"docs/a.md": "c\n"})
        made.git("rebase", "main", check=False)
        assert (git_dir / "rebase-merge").is_dir()
    elif kind == "detached":
        made.git("checkout", "-q", shas[2])
    elif kind == "locked":
        for name in ("index.lock", "HEAD.lock", "config.lock", "packed-refs.lock", "shallow.lock"):
            (git_dir / name).write_text("")
    elif kind == "packed":
        made.git("gc", "-q")
    elif kind == "read-only":
        for path in [made.path, *made.path.rglob("*")]:
            path.chmod(path.stat().st_mode & ~0o222)
    elif kind == "worktrees":
        made.git("worktree", "add", "-q", "--detach", str(made.path.parent / "linked"), shas[1])
    elif kind == "monitored":
        made.git("config", "core.fsmonitor", "touch MONITORED")
        made.git("config", "core.hooksPath", "/nonexistent")
        made.git("config", "alias.log", "!touch ALIASED")
        made.git("config", "extensions.worktreeConfig", "true")
    elif kind == "broken index":
        (git_dir / "index").write_bytes(b"not an index")


TROUBLES = ["none", "dirty", "bisect", "rebase", "detached", "locked", "packed", "read-only", "worktrees", "monitored",
            "broken index"]  # fmt: skip


@pytest.mark.parametrize("kind", TROUBLES)
def test_no_state_matters_and_nothing_changes(
    line: tuple[MadeRepo, list[str]], work: Path, tmp_path: Path, kind: str
) -> None:
    made, shas = line
    trouble(made, shas, kind)
    before = listing(made.path)
    repo = GitRepo(made.path, work)
    use_everything(repo, shas[0], shas[5], tmp_path / "out")
    assert [c.id for c in repo.history(shas[0], shas[5]).changes] == shas
    assert files_of(tmp_path / "out" / "all") == ["README", "docs/a.md", "run.sh", "src/dsa/kernel.py"]
    assert (tmp_path / "out/all/src/dsa/kernel.py").read_text() == "two\n", "the commit's file, not the edited one"
    assert listing(made.path) == before


def test_the_listing_would_notice_what_git_does_in_passing(line: tuple[MadeRepo, list[str]]) -> None:
    """Negative control of the test above: a mere `git status` on a stale index rewrites it."""
    made, shas = line
    trouble(made, shas, "dirty")
    before = listing(made.path)
    made.git("status")
    assert listing(made.path) != before


def test_sha256_repository(make_repo: Make, work: Path, tmp_path: Path) -> None:
    made = make_repo("long", "sha256")
    shas = [made.commit(f"c{n}", {"src/f": f"{n}\n", "README": "r"}) for n in range(4)]
    assert len(shas[0]) == 64
    before = listing(made.path)
    repo = GitRepo(made.path, work)
    use_everything(repo, shas[0], shas[3], tmp_path / "out")
    assert [c.id for c in repo.history(shas[0][:8], "HEAD").changes] == shas
    assert repo.changed_files(shas[0]) == ("README", "src/f")
    assert listing(made.path) == before


def test_foreign_git_variables_are_stripped(
    line: tuple[MadeRepo, list[str]], make_repo: Make, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As inside a hook or under `git bisect run`, where GIT_DIR and friends point at another repository."""
    made, shas = line
    other = make_repo("other")
    other.commit("other", {"o": "o"})
    before = listing(made.path, other.path)
    foreign = str(other.path / ".git")
    variables = {
        "GIT_DIR": foreign, "GIT_WORK_TREE": str(other.path), "GIT_INDEX_FILE": f"{foreign}/index",
        "GIT_OBJECT_DIRECTORY": f"{foreign}/objects", "GIT_PREFIX": "src/", "GIT_NAMESPACE": "x",
        "GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "diff.noprefix", "GIT_CONFIG_VALUE_0": "true",
        "GIT_EXTERNAL_DIFF": "false", "GIT_LITERAL_PATHSPECS": "1", "GIT_TRACE": str(tmp_path / "trace"),
        "GIT_CEILING_DIRECTORIES": str(made.path.parent),
    }  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    repo = GitRepo(made.path, work)
    assert repo.resolve("HEAD") == shas[-1] and repo.files(shas[5], ["*.md"]) == ("docs/a.md",)
    assert "a/src/dsa/kernel.py" in repo.patch(shas[3])
    use_everything(repo, shas[0], shas[5], tmp_path / "out")
    for name in [n for n in os.environ if n.startswith("GIT_")]:
        monkeypatch.delenv(name)
    assert listing(made.path, other.path) == before and not (tmp_path / "trace").exists()


def test_somebody_elses_repository_may_be_read(line: tuple[MadeRepo, list[str]], work: Path) -> None:
    made, shas = line
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    for path in [made.path, *made.path.rglob("*")]:
        os.chown(path, 12345, 12345)
    refused = subprocess.run(["git", "status"], cwd=made.path, capture_output=True, text=True)
    assert "dubious ownership" in refused.stderr, "git itself would refuse it"
    assert GitRepo(made.path, work).resolve("HEAD") == shas[-1]


def test_partial_clone_fetches_nothing_and_says_so(
    line: tuple[MadeRepo, list[str]], work: Path, tmp_path: Path
) -> None:
    made, shas = line
    made.git("config", "uploadpack.allowFilter", "true")
    partial = tmp_path / "partial"
    made.git("clone", "-q", "--no-checkout", "--filter=blob:none", f"file://{made.path}", str(partial))
    before = listing(partial)
    repo = GitRepo(partial, work)
    for rev in ("f" * 40, made.git("rev-parse", f"{shas[0]}:README")):  # git would ask the server what these are
        with pytest.raises(RepositoryError, match="names no commit"):
            repo.resolve(rev)
    assert listing(partial) == before
    history = repo.history(shas[0], "HEAD")
    assert repo.touching(history, ["src/dsa"]) == {shas[2], shas[3]}, "trees are there: no blob is needed for this"
    assert repo.tree_key(shas[3], ["src"]) == GitRepo(made.path, work).tree_key(shas[3], ["src"])
    for asking in (lambda: repo.read(shas[0], "README"), lambda: repo.checkout(shas[0], tmp_path / "co", ()),
                   lambda: repo.patch(shas[3])):  # fmt: skip
        with pytest.raises(RepositoryError, match=r"partial clone.*fetch --refetch --no-filter") as caught:
            asking()
        assert "\n" not in str(caught.value)
    assert listing(partial) == before and not (tmp_path / "co").exists()
    remedy = re.search(r"`git -C (\S+) (fetch [^`]*)`", str(caught.value))
    assert remedy is not None
    subprocess.run(["git", *remedy[2].split()], cwd=partial, check=True, capture_output=True)
    assert GitRepo(partial, work).read(shas[0], "README") == b"r\n", "the remedy mends it"


def test_the_private_repository_holds_no_objects(line: tuple[MadeRepo, list[str]], work: Path, tmp_path: Path) -> None:
    made, shas = line
    repo = GitRepo(made.path, work)
    use_everything(repo, shas[0], shas[5], tmp_path / "out")
    assert files_of(repo.mirror) == ["HEAD", "config", "info/attributes", "objects/info/alternates"]
    before = listing(repo.mirror)
    GitRepo(made.path, work)
    assert listing(repo.mirror) == before, "opening again writes nothing"
