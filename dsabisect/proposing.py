"""`dsabisect propose`: from a finding to a measured proposal. Files go to RUN_DIR/proposal, and on request one branch.

The order: read the run, make the tree in a private repository, measure old, new and new with the action, write.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsabisect import targets
from dsabisect.errors import UsageError
from dsabisect.model import Action, Column, Limits, Observation, Verdict, to_json
from dsabisect.outside import store
from dsabisect.outside.gitrepo import GitRepo
from dsabisect.outside.pushing import Pushing
from dsabisect.outside.workshop import Workshop
from dsabisect.propose import actions, prove, pulltext
from dsabisect.report import build, text

Say = Callable[[str], None]
EXIT_PROPOSED, EXIT_NOT_PROVEN = 0, 1
DEPENDENTS_LIMIT = 8  # later commits that are looked at when columns break
KIND_WORDS = {
    "revert": "the change is taken back as a whole",
    "revert_hunk": "part of the change is taken back",
    "gate": "a gate in the source: the path is off under the condition and stays on elsewhere",
    "switch": "the default of the existing switch is turned round (no gate in the source could be made)",
}


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What a person asks of `propose`."""

    run_dir: Path
    action: str = "auto"  # auto | revert | revert_hunk | gate
    onto: str = ""  # "" = the bad end of the run
    repo: Path | None = None
    device: str = ""  # "" = the run's
    branch: bool = False
    push: str = ""
    pull_request: bool = False
    dry_run: bool = False
    force: bool = False
    reason: str = ""
    subsets: int = 60  # parts of a change that may be measured for one hunk
    build_env: Mapping[str, str] = field(default_factory=dict)
    submodules: Mapping[str, Path] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Proposal:
    markdown: str
    exit_code: int
    folder: Path
    branch: str = ""
    sha: str = ""


@dataclass(kw_only=True)
class _Bench:
    """A run that was read, and what measures on top of it."""

    wish: Wish
    report: Mapping[str, Any]
    workshop: Workshop
    target: Any
    onto: str
    say: Say
    columns: tuple[Column, ...] = ()
    measure: prove.Measure | None = None


def propose(wish: Wish, say: Say) -> Proposal:
    """Make, measure and write a proposal.

    Raises:
        UsageError: the run has no finding, an action that cannot be made, or options that do not go together.
        RepositoryError, StoreError, EnvironmentFault: see the modules that raise them.
    """
    if wish.force and not wish.reason.strip():
        raise UsageError("--force needs a reason", remedy='Say why: --force --reason "TEXT"')
    report = build.build(store.read_events(wish.run_dir))
    given, first = report["recommendation"], report["first_diverging"]
    action = (given or {}).get("action", "none") if wish.action == "auto" else wish.action
    folder = wish.run_dir.absolute() / "proposal"
    if first is None or action in ("hold", "none"):
        return _hold(report, folder)
    user = GitRepo(wish.repo or Path(report["run"]["repo"]), store.work_root())
    onto = user.resolve(wish.onto or report["run"]["bad"])
    shutil.rmtree(folder, ignore_errors=True)
    store.writable(folder)
    target = targets.load(report["run"]["target"])
    bench = _Bench(wish=wish, report=report, workshop=Workshop(user, folder / "workshop"), target=target, onto=onto,
                   say=say)  # fmt: skip
    try:
        with ExitStack() as stack:
            return _made(bench, action, folder, stack)
    finally:
        shutil.rmtree(folder / "workshop", ignore_errors=True)


# ---- HOLD ---------------------------------------------------------------------------------------------------


def _hold(report: Mapping[str, Any], folder: Path) -> Proposal:
    """What is missing, as commands to copy."""
    from dsabisect.report import markdown

    given = report["recommendation"] or {}
    missing = list(given.get("missing", ())) or [_wider(report)]
    body = markdown.render(report) + "\n" + pulltext.missing_runs(missing)
    store.writable(folder)
    store.write_text(folder / "pull.md", body)
    return Proposal(markdown=body, exit_code=EXIT_PROPOSED, folder=folder)


def _wider(report: Mapping[str, Any]) -> str:
    """The run once more, with everything that it has."""
    run = report["run"]
    words = ["dsabisect", "run", "--repo", run["repo"], "--target", run["target"], "--good", run["good"][:12],
             "--bad", run["bad"][:12], "--device", run["device"]["name"], "--suite", "full", "--rerun"]  # fmt: skip
    return pulltext.command(words)


# ---- making -------------------------------------------------------------------------------------------------


def _made(bench: _Bench, action: str, folder: Path, stack: ExitStack) -> Proposal:
    first, given = bench.report["first_diverging"], bench.report["recommendation"]
    culprit = (given or {}).get("change") or first["sha"]
    parent = bench.workshop.repo.resolve(f"{culprit}^1")
    if action == "gate" and not (given or {}).get("gate"):
        raise UsageError("the run found no condition for a gate", where=str(bench.wish.run_dir),
                         remedy="Use --action revert, or measure more cases")  # fmt: skip
    made = _change(bench, action, culprit, folder, stack)
    if made.refused:
        bench.say(made.refused)
        return _write(bench, made, None, {}, folder, culprit)
    message = pulltext.message(title=made.title, culprit=culprit, kind=made.kind, reason=first["detail"] or
                               first["reason"], proof="see the pull request: old, new, new with this")  # fmt: skip
    sha = bench.workshop.commit(tree=made.tree, parents=(bench.onto,), message=message,
                                date=bench.workshop.date_of(bench.onto))  # fmt: skip
    measure = _measure(bench, folder, stack)
    bench.say("proof: old, new, new with the action")
    kind = Action.REVERT if made.kind == "switch" else Action(made.kind)
    columns = _relevant_columns(bench, made.kind)
    proof = prove.prove(action=kind, old=parent, new=bench.onto, applied=sha, columns=columns, measure=measure)
    dependents = _dependents(bench, proof, culprit, parent, measure) if made.kind == "revert" else {}
    return _write(bench, made, proof, dependents, folder, culprit, sha=sha)


def _change(bench: _Bench, action: str, culprit: str, folder: Path, stack: ExitStack) -> actions.Made:
    if action == "revert":
        return actions.by_revert(bench.workshop, culprit, bench.onto)
    if action == "gate":
        gate = bench.report["recommendation"]["gate"]
        path = bench.report["first_diverging"]["column"].partition("/")[0]
        forced = [c.partition("/")[0] for c in bench.report["recommendation"]["columns"]]
        name = next((p for p in forced if p != "default"), path)
        return actions.by_gate(bench.workshop, bench.onto, gate["predicate"], name, bench.target, gate["switch"])
    broken = tuple(_column(name) for name in bench.report["recommendation"]["columns"])
    measure = _measure(bench, folder, stack)

    def mends(sha: str) -> bool:
        return all(o.verdict is Verdict.GOOD for o in measure(sha, broken))

    return actions.by_hunks(bench.workshop, culprit, bench.onto, mends, bench.wish.subsets)


def _column(name: str) -> Column:
    path, _, case = name.partition("/")
    return Column(path=path, case=case)


def _relevant_columns(bench: _Bench, kind: str) -> tuple[Column, ...]:
    """All of them; a default alone only moves what a commit selects by itself."""
    if kind not in ("switch", "revert_hunk"):
        return bench.columns
    default = {p.name for p in bench.target.PATHS if p.default_selection}
    return tuple(c for c in bench.columns if c.path in default) or bench.columns


# ---- measuring ----------------------------------------------------------------------------------------------


def _measure(bench: _Bench, folder: Path, stack: ExitStack) -> prove.Measure:
    """The narrow way to the measuring side: a session on the private repository, opened at the first use."""
    if bench.measure is not None:
        return bench.measure
    from dsabisect import session

    run = bench.report["run"]
    kept = {name: given.get("value") for name, given in run.get("settings", {}).items()}
    cases = tuple(dict.fromkeys(o["case"] for o in bench.report["observations"]))
    request = session.Request(
        repo=bench.workshop.git_dir, target=run["target"], bad=bench.onto, paths=tuple(run["paths"]), cases=cases,
        suite=run["suite"], device=bench.wish.device or run["device"]["name"], out=folder / "measured",
        golden=tuple(map(Path, kept.get("golden") or ())), build_env=bench.wish.build_env or _pairs(kept, "build-env"),
        submodules=bench.wish.submodules or {k: Path(v) for k, v in _pairs(kept, "submodule").items()},
        limits=_limits(kept),
    )  # fmt: skip
    opened, _, _ = session.open_session(request, bench.say, stack)
    evaluator = opened.evaluator
    stack.callback(lambda: evaluator.close(keep=False))
    asked = {(o["path"], o["case"]) for o in bench.report["observations"]}
    bench.columns = tuple(c for c in opened.columns if (c.path, c.case) in asked)

    def measure(sha: str, columns: Sequence[Column]) -> Sequence[Observation]:
        seen = evaluator.evaluate(sha, columns, purpose="verify")
        bench.say(f"{sha[:9]}  {session.summary(seen)}")
        return seen

    bench.measure = measure
    return measure


def _pairs(kept: Mapping[str, Any], name: str) -> dict[str, str]:
    return dict(item.split("=", 1) for item in kept.get(name) or () if "=" in item)


def _limits(kept: Mapping[str, Any]) -> Limits:
    usual = Limits()
    memory = kept.get("memory")
    return Limits(cell_seconds=float(kept.get("cell-seconds") or usual.cell_seconds),
                  memory_bytes=int(float(memory) * (1 << 30)) if memory else usual.memory_bytes)  # fmt: skip


def _dependents(
    bench: _Bench, proof: prove.Proof, culprit: str, parent: str, measure: prove.Measure
) -> dict[str, tuple[Column, ...]]:
    """Only when something breaks or is lost: which later commit had made it good."""
    columns = tuple(dict.fromkeys((*proof.newly_broken, *proof.lost)))
    if not columns:
        return {}
    shop = bench.workshop
    later = shop.repo.later_touching(culprit, bench.onto)[-DEPENDENTS_LIMIT:]

    def reverted(sha: str) -> str:
        merged = shop.merge(base=culprit, ours=sha, theirs=parent)
        if merged.conflicts:
            return ""
        return shop.commit(tree=merged.tree, parents=(sha,), message="without\n", date=shop.date_of(sha))

    plain = {c.id: shop.repo.resolve(f"{c.id}^1") for c in later}
    return prove.dependents(plain=plain, reverted=reverted, columns=columns, measure=measure)


# ---- writing ------------------------------------------------------------------------------------------------


def _write(
    bench: _Bench,
    made: actions.Made,
    proof: prove.Proof | None,
    dependents: Mapping[str, tuple[Column, ...]],
    folder: Path,
    culprit: str,
    sha: str = "",
) -> Proposal:
    wish = bench.wish
    holds = proof is not None and proof.holds
    forced = wish.reason if wish.force and sha and not holds else ""
    body = pulltext.pull_request(_values(bench, made, proof, dependents, forced))
    store.write_text(folder / "pull.md", body)
    if proof is not None:
        store.write_text(folder / "proof.json", json.dumps(to_json(proof), indent=1, sort_keys=True) + "\n")
    branch = f"dsabisect/{made.kind}-{culprit[:9]}"
    if not sha:
        _nothing_to_publish(wish, made.refused)
        return Proposal(markdown=body, exit_code=EXIT_PROPOSED, folder=folder)
    store.write_text(folder / "change.patch", bench.workshop.format_patch(sha).decode("utf-8", "surrogateescape"))
    store.write_text(folder / "branch.txt", f"{branch} {sha}\n")
    bench.say(f"proposal: {folder / 'pull.md'}")
    if not holds and not forced:
        _nothing_to_publish(wish, f"the proof failed: {proof.why_not if proof else 'nothing was measured'}")
        return Proposal(markdown=body, exit_code=EXIT_NOT_PROVEN, folder=folder)
    _publish(bench, branch, sha, made.title, folder)
    return Proposal(markdown=body, exit_code=EXIT_PROPOSED, folder=folder, branch=branch, sha=sha)


def _nothing_to_publish(wish: Wish, why: str) -> None:
    if wish.branch or wish.push or wish.pull_request:
        raise UsageError(f"no branch is made: {why}", where=str(wish.run_dir / "proposal" / "pull.md"),
                         remedy='Read pull.md; a failed proof yields to --force --reason "TEXT"')  # fmt: skip


def _publish(bench: _Bench, branch: str, sha: str, title: str, folder: Path) -> None:
    """The branch, the push and the pull request that were asked for; each is printed before it is done."""
    wish = bench.wish
    if not (wish.branch or wish.push or wish.pull_request):
        return
    pushing = Pushing(repo=bench.workshop.user, branch=branch, sha=sha, remote=wish.push,
                      title=text.plain(title), body=folder / "pull.md")  # fmt: skip
    commands = pushing.check(pull_request=wish.pull_request)
    bench.say(f"new branch in {bench.workshop.user.path}: {branch} at {sha[:12]}")
    for command in commands:
        bench.say(f"to run: {pulltext.command(command)}")
    if wish.dry_run:
        bench.say("dry run: nothing of this was done")
        return
    bench.workshop.publish(branch, sha)
    for command in commands:
        pushing.run(command)


def _values(
    bench: _Bench,
    made: actions.Made,
    proof: prove.Proof | None,
    dependents: Mapping[str, tuple[Column, ...]],
    forced: str,
) -> dict[str, Any]:
    report, given = bench.report, bench.report["recommendation"]
    first, run = report["first_diverging"], report["run"]
    verdict = ""
    if proof is not None:
        verdict = (f"The proof holds: {len(proof.mended)} cells mended, none broken" if proof.holds
                   else f"The proof failed: {proof.why_not}")  # fmt: skip
    return {
        "title": made.title, "advice": text.advice_line(given) if given else "none", "first": first,
        "diverges": text.diverges(report, first), "onto": bench.onto, "kind_words": KIND_WORDS[made.kind],
        "files": made.files if not made.refused else (), "notes": made.notes, "refused": made.refused,
        "conflicts": actions.lines_of(made.conflicts), "rows": pulltext.table(proof.rows) if proof else [],
        "verdict": verdict, "forced": forced, "why": text.because(report),
        "dependents": [(sha, ", ".join(map(str, columns))) for sha, columns in dependents.items()],
        "lost": pulltext.lost_lines(proof), "unknown": _unknown(report, proof),
        "again": [text.again(report, sha) for sha in (first["parent"], first["sha"]) if sha],
        "environment": sorted(run["environment"].items()), "golden": run["golden"]["key"],
    }  # fmt: skip


def _unknown(report: Mapping[str, Any], proof: prove.Proof | None) -> list[str]:
    """What was not run: other devices, columns without an answer, speed."""
    lines = [f"measured on {report['run']['device']['arch']} only; no other arch was run"]
    if proof is None:
        return [*lines, "nothing was built or measured for this proposal"]
    skipped = [r.column for r in proof.rows if r.applied.verdict is Verdict.SKIP]
    if skipped:
        lines.append(f"{len(skipped)} cells gave no answer with the action: " + ", ".join(map(str, skipped[:5])))
    if proof.still_bad:
        lines.append(
            f"{len(proof.still_bad)} cells are bad before and after: " + ", ".join(map(str, proof.still_bad[:5]))
        )
    return [*lines, "speed was not measured"]
