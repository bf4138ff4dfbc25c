"""Source gates on small sources of our own, run for real, and on sglang's indexer when it is here."""

from __future__ import annotations

import difflib
import subprocess
import textwrap
from typing import Any

import pytest
from real_history import SGLANG, needs_sglang

from dsabisect.propose.gate import Gated, NoGate, gate


def source(text: str) -> str:
    return textwrap.dedent(text).lstrip("\n")


WHOLE = source('''
    # A comment at the top.
    import functools

    _FAST = True  # the switch


    def helper():   # module level
        return _FAST


    def note(value):
        return lambda f: f


    class Base:
        def __init__(self):
            self.ready = True


    class Indexer(Base):
        """Doc."""

        fast_at_definition = _FAST

        def __init__(self, dim, *, neox=False):
            """Doc of init."""
            super().__init__()
            self.dim = dim   # kept
            self.size = 2 if _FAST else 1

        @note(_FAST)
        @functools.lru_cache
        def decorated(self, x=_FAST):
            return _FAST   # also kept

        @property
        def shown(self):
            return (_FAST)

        def nested(self):
            def inner():
                return [_FAST for _ in range(1)][0]
            return inner(), (lambda: _FAST)()

        def shadowed(self, _FAST):
            return _FAST

        def local(self):
            _FAST = "mine"
            return _FAST

        def keyword(self):
            return dict(_FAST=3)["_FAST"], self._named()

        def _named(self):
            return f"{_FAST}"

        @staticmethod
        def static():
            return _FAST

        @classmethod
        def of_class(cls):
            return _FAST

        def other_self(self):
            def inner(self):
                return _FAST
            return inner(None)
''')


def run(code: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(code, "<test>", "exec"), names)
    return names


def whole() -> Gated:
    return gate(WHOLE, switch="_FAST", predicate="neox")


def test_the_instance_reads_its_own_switch_everywhere() -> None:
    names = run(whole().source)
    for neox in (False, True):
        one = names["Indexer"](3, neox=neox)
        fast = not neox
        assert one.ready and one.size == (2 if fast else 1)
        assert (one.decorated(), one.shown, one.nested(), one._named()) == (fast, fast, (fast, fast), str(fast))
        assert one.shadowed("given") == "given" and one.local() == "mine" and one.keyword()[0] == 3
        assert names["helper"]() is True and one.static() is True and one.of_class() is True
        assert one.other_self() is True, "`self` is something else in there: left alone"


def test_what_is_left_alone_is_listed() -> None:
    made = whole()
    assert [u.where for u in made.left] == [
        "helper", "Indexer", "Indexer", "Indexer", "Indexer.static", "Indexer.of_class", "Indexer.other_self.inner",
    ]  # fmt: skip
    assert [u.where for u in made.replaced] == [
        "Indexer.__init__", "Indexer.decorated", "Indexer.shown", "Indexer.nested.inner", "Indexer.nested.<lambda>",
        "Indexer._named",
    ]  # fmt: skip
    lines = WHOLE.splitlines()
    assert all("_FAST" in lines[u.line - 1] for u in (*made.left, *made.replaced))


def test_only_those_lines_change() -> None:
    made = whole()
    old, new = WHOLE.splitlines(), made.source.splitlines()
    changed = [line for line in difflib.ndiff(old, new) if line[0] in "+-"]
    removed = [line[2:] for line in changed if line[0] == "-"]
    added = [line[2:] for line in changed if line[0] == "+"]
    assert [line.replace("_FAST", "self.fast") for line in removed] == [a for a in added if " and not " not in a]
    assert [a for a in added if " and not " in a] == ["        self.fast = _FAST and not neox"]


def test_a_dotted_switch_and_a_predicate_over_an_argument() -> None:
    text = source("""
        from package import config


        class Indexer:
            def __init__(self, cfg, weights):
                self.cfg, self.weights = cfg, weights

            def forward(self):
                return config.USE_FUSION, config.OTHER
    """)
    made = gate(text, switch="config.USE_FUSION", predicate="cfg.rope == 'neox'")
    assert "        self.use_fusion = config.USE_FUSION and not (cfg.rope == 'neox')\n" in made.source
    assert "return self.use_fusion, config.OTHER" in made.source and made.left == ()


def test_needed_before_super_it_comes_first() -> None:
    text = source("""
        F = True

        class A(dict):
            def __init__(this, neox):
                if F:
                    this.a = 1
                super().__init__()
    """)
    made = gate(text, switch="F", predicate="neox", name="on")
    assert "    def __init__(this, neox):\n        this.on = F and not neox\n        if this.on:\n" in made.source


A = "F = True\nclass A:\n    def __init__(self, neox):\n        self.x = F\n"


@pytest.mark.parametrize(
    ("text", "predicate", "said"),
    [
        ("F = True\ndef f():\n    return F\n", "neox", "no method reads it"),
        ("F = True\nclass A:\n    def f(self):\n        return F\n", "neox", "no __init__"),
        (A + A.replace("A", "B").replace("F = True\n", ""), "neox", "several classes"),
        (A, "other", "reads other"),
        (A, "self.neox", "reads self"),
        (A, "True", "reads no argument"),
        (A, "neox\nimport os", "no expression"),
        (A, "neox; import os", "no expression"),
        (A + "    def g(self):\n        return self.f\n", "neox", "uses f already"),
        (A + "    def g(self):\n        global F\n        F = False\n", "neox", "assigned in A.g"),
        ("class A(:\n", "neox", "does not parse"),
    ],
)  # fmt: skip
def test_what_cannot_be_gated_is_refused_with_the_reason(text: str, predicate: str, said: str) -> None:
    with pytest.raises(NoGate, match=said) as caught:
        gate(text, switch="F", predicate=predicate)
    assert "\n" not in str(caught.value)


@needs_sglang
def test_sglang_gate_is_the_humans_inside_the_class() -> None:
    """e552f6ed7 changes the same reads; it also mends pcg_dsa_indexer_prefill_split, which we list."""
    path = "python/sglang/srt/layers/attention/dsa/dsa_indexer.py"

    def at(sha: str) -> str:
        asked = ["git", f"--git-dir={SGLANG}", "show", f"{sha}:{path}"]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout

    made = gate(at("073de1505"), switch="_use_dsa_indexer_fusion", predicate="is_neox_style")
    assert (made.cls, len(made.replaced)) == ("Indexer", 12)
    assert [u.where for u in made.left] == ["pcg_dsa_indexer_prefill_split"]
    made = gate(at("e552f6ed7~1"), switch="_use_dsa_indexer_fusion", predicate="is_neox_style")
    assert [u.where for u in made.left] == ["pcg_dsa_indexer_prefill_split"]
    theirs = [line.strip() for line in at("e552f6ed7").splitlines() if "self.use_dsa_indexer_fusion" in line]
    ours = [line.strip() for line in made.source.splitlines() if "self.use_dsa_indexer_fusion" in line]
    assert ours[0] == "self.use_dsa_indexer_fusion = _use_dsa_indexer_fusion and not is_neox_style"
    assert ours[1:] == theirs[1:]
