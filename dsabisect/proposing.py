"""`dsabisect propose`: from a finding to a measured proposal. Files go to RUN_DIR/proposal, and on request one branch.

The order: read the run, make the tree in a private repository, measure old, new and new with the action, write.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dsabisect import targets
from dsabisect.errors import UsageError
from dsabisect.indexer.cases import cost
from dsabisect.model import Action, Column, Limits, Observation, Outcome, Verdict, to_json
from dsabisect.outside import pages, store
from dsabisect.outside.gitrepo import GitRepo
from dsabisect.outside.pushing import Pushing
from dsabisect.outside.workshop import Workshop
from dsabisect.propose import actions, prove, pulltext, speed
from dsabisect.propose.evidence import Evidence
from dsabisect.report import build, text

Say = Callable[[str], None]
EXIT_PROPOSED, EXIT_NOT_PROVEN = 0, 1
CALLS = 30  # of each cell that is timed on a GPU
DEPENDENTS_LIMIT = 8  # later commits that are looked at when columns break


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What a person asks of `propose`."""

    run_dir: Path
    action: str = "auto"  # auto | revert | revert_hunk | gate
    change: str = ""  # sha of the change to act on; "" = the one that the run's advice is about
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
    calls: int | None = None  # timed calls of each cell; None: 30 on a GPU, none elsewhere
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
    journal: store.Journal  # the run's, held: no resumed run and no other proposal meanwhile
    run: Mapping[str, Any]  # device, environment and golden set: of the run until something is measured here
    columns: tuple[Column, ...] = ()
    evaluator: Any = None  # evaluate.Evaluator, once something is to be measured


def propose(wish: Wish, say: Say) -> Proposal:
    """Make, measure and write a proposal.

    Raises:
        UsageError: the run has no finding, an action that cannot be made, or options that do not go together.
        RepositoryError, StoreError, EnvironmentFault: see the modules that raise them.
    """
    if wish.force and not wish.reason.strip():
        raise UsageError("--force needs a reason", remedy='Say why: --force --reason "TEXT"')
    with ExitStack() as stack:
        journal = store.Journal.resume(wish.run_dir)
        stack.callback(journal.close)
        return _proposed(wish, say, journal, stack)


def _proposed(wish: Wish, say: Say, journal: store.Journal, stack: ExitStack) -> Proposal:
    report = build.build(journal.events())
    _finished(report, wish)
    report = _about(report, wish.change, wish.run_dir)
    given, first = report["recommendation"], report["first_diverging"]
    action = (given or {}).get("action", "none") if wish.action == "auto" else wish.action
    folder = wish.run_dir.absolute() / "proposal"
    if first is None or action in ("hold", "none"):
        return _hold(wish, report, folder)
    user = GitRepo(wish.repo or Path(report["run"]["repo"]), store.work_root())
    onto = user.resolve(wish.onto or report["run"]["bad"])
    shutil.rmtree(folder / "measured", ignore_errors=True)  # what an earlier proposal says stays until this one is done
    shutil.rmtree(folder / "workshop", ignore_errors=True)
    store.writable(folder)
    target = targets.load(report["run"]["target"])
    stack.callback(shutil.rmtree, folder / "workshop", ignore_errors=True)
    bench = _Bench(wish=wish, report=report, workshop=Workshop(user, folder / "workshop"), target=target, onto=onto,
                   say=say, journal=journal, run=report["run"])  # fmt: skip
    return _made(bench, action, folder, stack)


def _finished(report: Mapping[str, Any], wish: Wish) -> None:
    """UsageError when the run has not come to its end, or looked for no change."""
    run, where = report["run"], str(wish.run_dir)
    if not report["range"]["commits"] or not run["good"]:
        one = "this was a check of one commit" if run["bad"] else "the run has not begun"
        raise UsageError(
            f"{one}: there is no change to act on", where=where, remedy="dsabisect run --good REV --bad REV"
        )
    if report["exit_code"] is None:
        remedy = f"Go on with it: the same `dsabisect run` with {pulltext.command(['--out', where])} --resume"
        raise UsageError("the run is not finished", where=where, remedy=remedy)


def _about(report: dict[str, Any], change: str, run_dir: Path) -> dict[str, Any]:
    """The report with another change of its timeline in the middle: what was exposed is taken back, hunk by hunk."""
    given = report["recommendation"]
    if not change or (given and given["change"].startswith(change.lower())):
        return report
    told = [t for t in report["transitions"] if t["kind"] in ("introduced", "exposed") and len(t["suspects"]) == 1]
    mine = [t for t in told if len(change) >= 4 and t["suspects"][0].startswith(change.lower())]
    if len({t["suspects"][0] for t in mine}) != 1:
        known = ", ".join(dict.fromkeys(f"{t['suspects'][0][:9]} ({t['kind']})" for t in told)) or "none"
        raise UsageError(f"{change!r} brought nothing in this run", where=str(run_dir), remedy=f"One of: {known}")
    exposed = all(t["kind"] == "exposed" for t in mine)
    first = build.first_diverging(report["range"]["commits"], mine, report["observations"])
    advice = {"action": "revert_hunk" if exposed else "revert", "change": mine[0]["suspects"][0], "gate": None,
              "because": [f"{len(mine)} columns: {mine[0]['kind']} here"], "missing": [], "verified": None,
              "columns": [build.column_of(t) for t in mine]}  # fmt: skip
    return {**report, "first_diverging": first, "recommendation": advice}


# ---- HOLD ---------------------------------------------------------------------------------------------------


def _hold(wish: Wish, report: Mapping[str, Any], folder: Path) -> Proposal:
    """What is missing, as commands to copy."""
    from dsabisect.report import markdown

    given = report["recommendation"] or {}
    missing = list(given.get("missing", ())) or [_wider(report)]
    body = markdown.render(report) + "\n" + pulltext.missing_runs(missing)
    store.writable(folder)
    _without_the_last(folder)
    store.write_text(folder / "pull.md", body)
    _nothing_to_publish(wish, "the run's advice is to hold")
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
    if action == "gate" and not (given or {}).get("gate"):
        raise UsageError("the run found no condition for a gate", where=str(bench.wish.run_dir),
                         remedy="Use --action revert, or measure more cases")  # fmt: skip
    measure = _measuring(bench, folder, stack)
    made = _change(bench, action, culprit, measure)
    if not made.refused and not _still_bad(bench, measure(bench.onto, _accused(bench))):
        made = replace(made, tree="", refused=_mended_already(bench))
    if made.refused:
        bench.say(f"nothing is proposed: {made.refused}")
        return _write(bench, made, Evidence(), folder, culprit)
    words = {"title": made.title, "culprit": culprit, "kind": made.kind, "reason": first["detail"] or first["reason"]}
    draft = _commit(bench, made, pulltext.message(**words, proof="not measured yet"))
    bench.say("proof: old, new, new with the action")
    kind = Action.REVERT if made.kind == "switch" else Action(made.kind)
    parent = bench.workshop.repo.resolve(f"{culprit}^1")
    columns = _relevant_columns(bench, made.kind)
    proof = prove.prove(action=kind, old=parent, new=bench.onto, applied=draft, columns=columns, measure=measure)
    dependents = _dependents(bench, proof, culprit, parent, measure) if made.kind == "revert" else {}
    evidence = Evidence(proof=proof, dependents=dependents, speeds=_speeds(bench, proof, draft))
    # The same tree again, now that there is something to say of it: what was measured is a tree, not a message.
    run, measured = bench.run, prove.cells(len(proof.rows))
    told = f"{proof.words}; {measured} on {run['device']['arch']}, golden set {run['golden']['key'][:12]}"
    sha = _commit(bench, made, pulltext.message(**words, proof=told))
    return _write(bench, made, evidence, folder, culprit, sha=sha)


def _commit(bench: _Bench, made: actions.Made, message: str) -> str:
    shop = bench.workshop
    return shop.commit(tree=made.tree, parents=(bench.onto,), message=message, date=shop.date_of(bench.onto))


def _change(bench: _Bench, action: str, culprit: str, measure: prove.Measure) -> actions.Made:
    if action == "revert":
        return actions.by_revert(bench.workshop, culprit, bench.onto)
    if action == "gate":
        gate = bench.report["recommendation"]["gate"]
        paths = [column.path for column in _accused(bench)]
        path = next((p for p in paths if p not in _defaults(bench)), paths[0])
        return actions.by_gate(bench.workshop, bench.onto, gate["predicate"], path, bench.target, gate["switch"])
    broken = _accused(bench)

    def mends(sha: str) -> bool:
        return all(o.verdict is Verdict.GOOD for o in measure(sha, broken))

    return actions.by_hunks(bench.workshop, culprit, bench.onto, mends, bench.wish.subsets)


def _still_bad(bench: _Bench, seen: Sequence[Observation]) -> bool:
    """Is there something to mend?

    Raises:
        UsageError: these columns cannot be measured here, so that nobody knows.
    """
    skipped = [o for o in seen if o.verdict is Verdict.SKIP and not _gated_off(bench, o)]
    if any(o.verdict is Verdict.BAD for o in seen):
        return True
    if skipped:
        raise UsageError(
            f"{len(skipped)} of {len(seen)} columns give no answer at {bench.onto[:9]}: {skipped[0].detail}",
            where=str(skipped[0].column), remedy="Measure where the run did: --device, --build-env, --submodule",
        )  # fmt: skip
    return False


def _gated_off(bench: _Bench, seen: Observation) -> bool:
    """The path that is asked for by name was not taken, but another: somebody has gated it. That is an answer."""
    path, taken = seen.column.path, (seen.proof or {}).get("path")
    named = path not in _defaults(bench)
    return seen.outcome is Outcome.NOT_EXERCISED and named and taken is not None and taken != path


def _mended_already(bench: _Bench) -> str:
    """No column that the finding is about is bad on top of what the action would be applied to."""
    names = {str(column) for column in _accused(bench)}
    later = {(t["kind"], t["suspects"][-1][:9]) for t in bench.report["transitions"]
             if t["kind"] not in ("introduced", "exposed") and build.column_of(t) in names}  # fmt: skip
    told = ", ".join(f"{kind} by {sha}" for kind, sha in sorted(later))
    return f"nothing that it could mend is bad at {bench.onto[:9]}{f' ({told})' if told else ''}"


def _accused(bench: _Bench) -> tuple[Column, ...]:
    """The columns that the finding is about."""
    names = bench.report["recommendation"]["columns"] or [bench.report["first_diverging"]["column"]]
    return tuple(Column(path=path, case=case) for path, _, case in (name.partition("/") for name in names))


def _defaults(bench: _Bench) -> set[str]:
    """Names of the paths that force nothing."""
    return {p.name for p in bench.target.PATHS if p.default_selection}


def _relevant_columns(bench: _Bench, kind: str) -> tuple[Column, ...]:
    """All of them; a default alone only moves what a commit selects by itself."""
    if kind not in ("switch", "revert_hunk"):
        return bench.columns
    return tuple(c for c in bench.columns if c.path in _defaults(bench)) or bench.columns


# ---- measuring ----------------------------------------------------------------------------------------------


def _measuring(bench: _Bench, folder: Path, stack: ExitStack) -> prove.Measure:
    """The narrow way to the measuring side. Nothing is started before something is measured."""

    def measure(sha: str, columns: Sequence[Column]) -> Sequence[Observation]:
        from dsabisect import session

        if bench.evaluator is None:
            _open(bench, folder, stack)
        seen = bench.evaluator.evaluate(sha, columns, purpose="verify")
        bench.say(f"{sha[:9]}  {session.summary(seen)}")
        return list(seen)

    return measure


def _open(bench: _Bench, folder: Path, stack: ExitStack) -> None:
    """A session on the private repository, with what the run was made with."""
    from dsabisect import session

    run, wish = bench.report["run"], bench.wish
    kept = {name: given.get("value") for name, given in run.get("settings", {}).items()}
    cases = tuple(dict.fromkeys(o["case"] for o in bench.report["observations"]))
    request = session.Request(
        repo=bench.workshop.git_dir, target=run["target"], bad=bench.onto, paths=tuple(run["paths"]), cases=cases,
        suite=run["suite"], device=wish.device or run["device"]["name"], out=folder / "measured",
        golden=tuple(map(Path, kept.get("golden") or ())), build_env=wish.build_env or _pairs(kept, "build-env"),
        submodules=wish.submodules or {k: Path(v) for k, v in _pairs(kept, "submodule").items()},
        interpreter=kept.get("python") or sys.executable, limits=_limits(kept),
    )  # fmt: skip
    opened, _, _ = session.open_session(request, bench.say, stack)
    bench.evaluator, bench.run = opened.evaluator, build.build(opened.journal.events())["run"]
    stack.callback(lambda: opened.evaluator.close(keep=False))
    asked = {(o["path"], o["case"]) for o in bench.report["observations"]}
    bench.columns = tuple(c for c in opened.columns if (c.path, c.case) in asked)


def _speeds(bench: _Bench, proof: prove.Proof, applied: str) -> tuple[speed.Speed, ...]:
    """The default selection with and without the action, timed: on a GPU, or where it was asked for."""
    device, calls = bench.run["device"]["name"], bench.wish.calls
    calls = (CALLS if device.startswith("cuda") else 0) if calls is None else calls
    cases = bench.evaluator.cases
    columns = speed.columns_of(proof, _defaults(bench), lambda case: cost(cases[case])) if calls and proof.holds else ()
    if not columns:
        return ()
    bench.say(f"speed: {len(columns)} cells, {calls} calls of each, {speed.ROUNDS} times in turns")

    def timed(sha: str, columns: Sequence[Column], turn: int) -> Sequence[Observation]:
        return list(bench.evaluator.evaluate(sha, columns, purpose="speed", turn=turn, calls=calls))

    return speed.measure(bench.onto, applied, columns, timed)


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
    bench: _Bench, made: actions.Made, evidence: Evidence, folder: Path, culprit: str, sha: str = ""
) -> Proposal:
    wish, proof = bench.wish, evidence.proof
    holds = proof is not None and proof.holds
    forced = wish.reason if wish.force and sha and not holds else ""
    body = pulltext.body(
        bench.report, made, evidence, run=bench.run, onto=bench.onto, defaults=_defaults(bench), forced=forced
    )
    _without_the_last(folder)
    store.write_text(folder / "pull.md", body)
    if proof is not None:
        told = {"proof": to_json(proof), "speed": to_json(evidence.speeds)}
        store.write_text(folder / "proof.json", json.dumps(told, indent=1, sort_keys=True) + "\n")
    _record(bench, made, evidence)
    branch = f"dsabisect/{made.kind.replace('_', '-')}-{culprit[:9]}"
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


def _without_the_last(folder: Path) -> None:
    """What an earlier proposal left, when there is something to take its place; nothing else that lies there."""
    for name in ("pull.md", "proof.json", "change.patch", "branch.txt"):
        (folder / name).unlink(missing_ok=True)


def _record(bench: _Bench, made: actions.Made, evidence: Evidence) -> None:
    """Into the journal of the run, so that its report and its page show the proof; written anew."""
    proof = evidence.proof
    told: dict[str, Any] = {
        "change": bench.report["recommendation"]["change"], "action": made.kind, "onto": bench.onto,
        "holds": proof is not None and proof.holds, "said": made.refused or (proof.words if proof else ""),
    }  # fmt: skip
    if proof is not None:
        for name in ("old", "new", "applied"):
            side = {str(row.column): prove.shown(getattr(row, name)) for row in proof.rows}
            told["action_applied" if name == "applied" else name] = side
    told |= {"conflicts": [c.path for c in made.conflicts], "dependents": list(evidence.dependents),
             "speed": pulltext.speed_lines(evidence.speeds)}  # fmt: skip
    bench.journal.append("proposal", told)
    report = build.build(bench.journal.events())
    store.write_text(bench.wish.run_dir / "report.json", build.dumps(report))
    pages.write(bench.wish.run_dir, report, bench.say)


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
