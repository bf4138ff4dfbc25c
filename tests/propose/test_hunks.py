"""Hunks are taken back exactly; the smallest subset is found on every small case, interacting pairs included."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from real_history import SGLANG, needs_sglang

from dsabisect.outside.gitrepo import GitRepo
from dsabisect.outside.workshop import Workshop
from dsabisect.propose import hunks

CONTENT = st.lists(st.sampled_from([b"a\n", b"b\n", b"c\r\n", b"\n", b"d"]), max_size=8).map(b"".join) | st.none()


@given(old=st.dictionaries(st.sampled_from("xy"), CONTENT), new=st.dictionaries(st.sampled_from("xy"), CONTENT))
@settings(max_examples=200, deadline=None)
def test_all_hunks_give_the_parent_and_none_the_culprit(
    old: dict[str, bytes | None], new: dict[str, bytes | None]
) -> None:
    found = hunks.split(old, new)
    assert hunks.reverted(found, (), old, new) == {}
    back = hunks.reverted(found, range(len(found)), old, new)
    for path in {*old, *new}:
        assert back.get(path, new.get(path)) == old.get(path)


def test_one_hunk_alone_leaves_the_others() -> None:
    new = "".join(f"{n}\n" for n in range(10)).encode()
    old = new.replace(b"1\n", b"one\n").replace(b"5\n", b"").replace(b"8\n", b"8\neight\n")
    found = hunks.split({"f": old}, {"f": new})
    assert len(found) == 3
    assert hunks.reverted(found, [1], {"f": old}, {"f": new}) == {"f": new.replace(b"5\n", b"")}
    both = new.replace(b"1\n", b"one\n").replace(b"8\n", b"8\neight\n")
    assert hunks.reverted(found, [2, 0], {"f": old}, {"f": new}) == {"f": both}


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6])
def test_every_needed_subset_is_found_exactly(count: int) -> None:
    for size in range(1, count + 1):
        for needed in combinations(range(count), size):
            answer = hunks.smallest(count, lambda subset, needed=needed: set(needed) <= set(subset))  # type: ignore[misc]
            assert answer is not None
            assert (answer.hunks, answer.interacting) == (needed, size > 1)


@pytest.mark.parametrize("count", [12, 40])
def test_interacting_pairs_are_found_among_many_hunks(count: int) -> None:
    for needed in ((0, 1), (0, count - 1), (count // 2, count // 2 + 1), (3, 3)):
        asked: list[tuple[int, ...]] = []

        def mends(
            subset: tuple[int, ...], needed: tuple[int, int] = needed, asked: list[tuple[int, ...]] = asked
        ) -> bool:
            asked.append(subset)
            return set(needed) <= set(subset)

        answer = hunks.smallest(count, mends)
        assert answer is not None and set(answer.hunks) == set(needed)
        assert len(asked) == len(set(asked)) == answer.tried <= 200, "each subset is measured once"


def test_a_hunk_that_hinders_is_left_out() -> None:
    """Not monotone: hunk 1 mends only while 2 stays, and all of them together mend too."""
    answer = hunks.smallest(3, lambda s: s in ((0, 1, 2), (0, 1)))
    assert answer is not None and (answer.hunks, answer.smallest) == ((0, 1), True)


def test_nothing_mends_and_the_limit() -> None:
    assert hunks.smallest(3, lambda s: False) is None
    assert hunks.smallest(0, lambda s: True) is None
    asked: list[tuple[int, ...]] = []
    answer = hunks.smallest(50, lambda s: bool(asked.append(s)) or {7, 30} <= set(s), limit=5)
    assert answer is not None and len(asked) == 5 and {7, 30} <= set(answer.hunks) and not answer.smallest


@needs_sglang
def test_sglang_30025_only_the_flip_is_chosen(tmp_path: Path) -> None:
    """The measurement reads the tree instead of running it: no GPU here. Bad = fusion on by default."""
    assert SGLANG is not None
    user = GitRepo(SGLANG, tmp_path / "cache")
    shop = Workshop(user, tmp_path / "workshop")
    culprit = user.resolve("6ce02b95a")
    parent = user.resolve("6ce02b95a~1")
    paths = user.changed_files(culprit)
    old, new = ({p: user.read(sha, p) for p in paths} for sha in (parent, culprit))
    found = hunks.split(old, new)

    def mends(subset: tuple[int, ...]) -> bool:
        tree = shop.tree_with(culprit, hunks.reverted(found, subset, old, new))
        content = shop.read_tree_file(tree, "python/sglang/srt/environ.py")
        assert content is not None
        return b"SGLANG_DISABLE_DSA_INDEXER_FUSION = EnvBool(True)" in content

    answer = hunks.smallest(len(found), mends)
    assert answer is not None and len(found) >= 3 and len(answer.hunks) == 1 and answer.smallest
    only = found[answer.hunks[0]]
    assert only.path == "python/sglang/srt/environ.py"
    assert only.old == (b"    SGLANG_DISABLE_DSA_INDEXER_FUSION = EnvBool(True)\n",)
    tree = shop.tree_with(culprit, hunks.reverted(found, answer.hunks, old, new))
    assert shop.differing(culprit, tree) == ("python/sglang/srt/environ.py",), "the reorder stays"
