"""The bundled target: `miniindexer`, a small real indexer on a CPU whose history is written into a folder.

The history itself is the pure :mod:`dsabisect.demo`; here git is told to store it, and the target says how its
commits are built, which paths they have and what each can run.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dsabisect.demo import history
from dsabisect.errors import EnvironmentFault, StoreError
from dsabisect.model import Case, Device, PathSpec, Stage
from dsabisect.targets import BuildRequest, BuildStep, GateSource, Part, Read

NAME = "demo"
TITLE = "miniindexer: the bundled history of a small indexer, CPU only"
PROBE = "dsabisect.candidate.probes.demo"

FUSION_FLAG = "MINIINDEXER_FUSION"
SPLIT = PathSpec(
    name="split", title="separate projections, Hadamard, ue8m0 query scales", env={FUSION_FLAG: "0"},
    settings={"takes": "split"}, outputs=("logits", "topk"),
)  # fmt: skip
FUSED = PathSpec(
    name="fused", title="one pass, fp32 scales, bf16 head gate", env={FUSION_FLAG: "1"},
    settings={"takes": "fused"}, outputs=("logits", "topk"),
)  # fmt: skip
EXPANDED = PathSpec(name="expanded", title="paged logits, one row a token")
NATIVE = PathSpec(name="native", title="paged logits, all draft tokens of a sequence at once")
RAGGED = PathSpec(name="ragged", title="logits over keys that lie side by side, as in a prefill")
SELECT = PathSpec(name="select", title="top-k alone", outputs=("topk",))
DEFAULT = PathSpec(
    name="default", title="what the commit selects by itself", default_selection=True, outputs=("logits", "topk")
)
PATHS = (SPLIT, FUSED, EXPANDED, NATIVE, RAGGED, SELECT, DEFAULT)
DEFAULT_PATHS = ("split", "fused", "expanded", "native", "ragged", "default")
RELEVANT = ("miniindexer",)
CHECKOUT = ("miniindexer",)
SUBMODULES: tuple[str, ...] = ()
JIT_SOURCES: tuple[str, ...] = ()
DEPENDENCY_CACHES: tuple[str, ...] = ()

FLAG = re.compile(rb'^\s*\w+ = env_flag\("(\w+)", ([^)]*)\)', re.MULTILINE)


def _flags(content: bytes, others: Collection[bytes]) -> Mapping[str, str]:
    return {name.decode(): default.decode() for name, default in FLAG.findall(content)}


PARTS = (Part(path="miniindexer/config.py", distil=lambda content, others: content, flags=_flags),)

STAGE_OF = {
    "split": Stage.END_TO_END, "fused": Stage.END_TO_END, "default": Stage.END_TO_END,
    "expanded": Stage.LOGITS, "native": Stage.LOGITS, "ragged": Stage.LOGITS, "select": Stage.TOPK,
}  # fmt: skip
BUILD_SECONDS = 60.0


def supports(path: PathSpec, case: Case, device: Device) -> str | None:
    """None when the cell can run, else why it cannot."""
    if device.kind != "cpu":
        return f"miniindexer runs on a CPU only, not on {device.name}"
    stage = STAGE_OF[path.name]
    if case.stage is not stage:
        return f"path {path.name} takes {stage.value} cases"
    layout = case.facets.get("layout", path.name)
    if stage is Stage.LOGITS and layout != path.name:
        return f"path {path.name} takes layout {path.name}, not {layout}"
    if stage is Stage.LOGITS and path is EXPANDED and case.facets.get("lens", "causal") != "causal":
        return "one row a token: the lengths are causal by nature"
    for name, only in (("page", 64), ("arch", "cpu"), ("graph", "eager"), ("deep_gemm", "present")):
        if case.facets.get(name, only) != only:
            return f"miniindexer knows {name} = {only} only"
    return None


def pins(read: Read) -> Mapping[str, str]:
    """miniindexer pins nothing: it takes the torch that is installed."""
    return {}


def environment(checkout: Path, device: Device) -> Mapping[str, str]:
    return {}


def prepare(request: BuildRequest) -> Sequence[BuildStep]:
    """Generate miniindexer/_tables.py."""
    argv = (request.interpreter, "-m", "miniindexer.build")
    return (BuildStep(argv=argv, title="generate the tables", seconds=BUILD_SECONDS),)


def gate_switch(path: PathSpec) -> str:
    return FUSION_FLAG if path.name == "fused" else ""


GATES = (
    GateSource(
        path="fused", files=("miniindexer/dsa_indexer.py",), switch="config.USE_FUSION",
        arguments={"rope": {"neox": "cfg.is_neox_style", "interleaved": "not cfg.is_neox_style"}},
    ),
)  # fmt: skip


# ---- the history -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class DemoHistory:
    """A written history and the commits that the demo and the tests speak of. The search never sees these names."""

    path: Path
    tip: str
    shas: tuple[str, ...]  # oldest first
    story1_good: str
    culprit1: str
    story1_bad: str  # the last red commit
    revert1: str
    reland1: str
    story2_good: str
    culprit2: str
    story2_bad: str  # the last commit before the first switch-off
    off1: str
    flip: str  # on again, bundled with another change
    off2: str
    gated: str
    named: Mapping[str, str]  # every other name too: refactored, renamed, unbuildable_first, ...


FIELDS = (
    "tip", "story1_good", "culprit1", "story1_bad", "revert1", "reland1", "story2_good", "culprit2", "story2_bad",
    "off1", "flip", "off2", "gated",
)  # fmt: skip


def write_history(dest: Path) -> DemoHistory:
    """Write the repository into ``dest`` (new or empty), with ``main`` checked out.

    Always the same shas: fixed authors and dates, and nothing of the user's git gets in.

    Raises:
        StoreError: ``dest`` holds something, or cannot be written.
        EnvironmentFault: git is missing, or too old.
    """
    dest = dest.absolute()
    try:
        dest.parent.mkdir(parents=True, exist_ok=True)
        if dest.exists() and (not dest.is_dir() or any(dest.iterdir())):
            raise StoreError("the demo history needs a new or empty folder", where=str(dest), remedy="Name another")
        with tempfile.TemporaryDirectory(dir=dest.parent, prefix=f".{dest.name}-") as scratch:
            shas = _store(Path(scratch) / "repo", Path(scratch))
            os.replace(Path(scratch) / "repo", dest)  # takes the place of an empty folder too
    except OSError as error:
        raise StoreError(
            f"cannot write the demo history: {error.strerror or error}", where=str(dest), remedy="Name another folder"
        ) from error
    named = history.named(shas)
    return DemoHistory(path=dest, shas=shas, named=named, **{name: named[name] for name in FIELDS})


def _store(repo: Path, home: Path) -> tuple[str, ...]:
    """A new repository with the whole history, and its shas in order."""
    repo.mkdir()
    _git(repo, home, "init", "--quiet", "--template=", "--object-format=sha1")
    _git(repo, home, "symbolic-ref", "HEAD", "refs/heads/main")
    told = _git(repo, home, "fast-import", "--quiet", "--done", data=history.stream())
    shas = tuple(told.decode().split())
    if len(shas) != len(history.STEPS) or not all(re.fullmatch("[0-9a-f]{40}", sha) for sha in shas):
        raise EnvironmentFault(
            "git fast-import did not name the commits that it stored",
            where=str(repo),
            remedy="Install git 2.29 or newer",
        )
    _git(repo, home, "reset", "--quiet", "--hard")
    return shas


def _git(repo: Path, home: Path, *args: str, data: bytes = b"") -> bytes:
    """Run git in ``repo`` with nothing but PATH of our environment: no configuration, hooks or signing of a person."""
    git = shutil.which("git")
    if git is None:
        raise EnvironmentFault("git is not installed", where="PATH", remedy="Install git 2.29 or newer")
    env = {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": str(home),
        "XDG_CONFIG_HOME": str(home),
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_DIR": str(repo / ".git"),
        "GIT_WORK_TREE": str(repo),
        "LC_ALL": "C",
        "TZ": "UTC",
    }
    done = subprocess.run([git, *args], cwd=repo, env=env, input=data, capture_output=True, check=False)
    if done.returncode:
        raise EnvironmentFault(
            f"git {args[0]} failed: {done.stderr.decode(errors='replace').strip()}",
            where=str(repo), remedy="The demo needs git 2.29 or newer and a writable folder",
        )  # fmt: skip
    return done.stdout
