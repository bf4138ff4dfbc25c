"""The command line: parse, call the engine, echo, exit code. No logic.

Results go to stdout, progress to stderr. Exit codes: see errors.py and docs/usage.md.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

import dsabisect
from dsabisect.errors import EXIT_INTERNAL, EXIT_INTERRUPTED, EXIT_USAGE, DsabisectError

EPILOG = (
    "Exit codes of run: 0 nothing diverges, 1 first diverging change confirmed, 2 narrowed to suspects or unconfirmed, "
    "3 the good endpoint does not hold. Of check: 0 good, 1 bad, 125 skip. "
    "Of every command: 128 error with a remedy, 129 usage, 130 interrupted (resumable), 131 internal error."
)


def say(text: str) -> None:
    _write(text + "\n", sys.stderr)


def tell(text: str) -> None:
    """A result, on stdout."""
    _write(text if text.endswith("\n") else text + "\n", sys.stdout)


def _write(text: str, stream: Any) -> None:
    """A reader that went away (`| head`) must not change the exit code: click would make it 1, which is a verdict."""
    try:
        click.echo(text, nl=False, file=stream)
        stream.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def pairs(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    """`NAME=VALUE` options as a mapping."""
    found = {}
    for value in values:
        name, equals, rest = value.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"{value!r} is not NAME=VALUE")
        found[name] = rest
    return found


def measuring(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options shared by run and check."""
    options = (
        click.option(
            "--repo",
            type=click.Path(path_type=Path),
            default=".",
            show_default=True,
            help="Repository to read; never changed.",
        ),
        click.option(
            "--target", "target", required=True, help="What kind of repository it is: see `dsabisect targets`."
        ),
        click.option(
            "--path", "paths", multiple=True, help="Path to measure; may be repeated. Default: the target's own choice."
        ),
        click.option(
            "--case",
            "cases",
            multiple=True,
            help="Case id or its beginning; may be repeated. Default: the whole suite.",
        ),
        click.option("--suite", default="default", show_default=True, help="smoke, default or full."),
        click.option("--device", default="cpu", show_default=True, help="cpu or cuda:N."),
        click.option(
            "--golden",
            type=click.Path(path_type=Path),
            multiple=True,
            help="Folder of a golden set; several are joined, such as the own set and imported cases.",
        ),
        click.option(
            "--out",
            type=click.Path(path_type=Path),
            help="Run folder. Default: dsabisect-runs/ below the current folder.",
        ),
        click.option(
            "--build-env",
            "build_env",
            multiple=True,
            callback=pairs,
            metavar="K=V",
            help="Variable for builds and candidates, such as CC=/usr/bin/gcc.",
        ),
        click.option(
            "--submodule",
            "submodules",
            multiple=True,
            callback=pairs,
            metavar="NAME=PATH",
            help="Folder or repository that holds a submodule's files.",
        ),
        click.option(
            "--python", "interpreter", default=sys.executable, help="Interpreter for candidates. Default: this one."
        ),
        click.option(
            "--cell-seconds",
            type=click.FloatRange(min=0.1),
            default=120.0,
            show_default=True,
            help="Time limit of one cell.",
        ),
        click.option(
            "--memory",
            "memory_gib",
            type=click.FloatRange(min=0.1),
            default=8.0,
            show_default=True,
            help="Memory limit of a candidate, GiB.",
        ),
        click.option("--json", "as_json", is_flag=True, help="Print the report as JSON."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def request_of(**given: Any) -> Any:
    from dsabisect import engine
    from dsabisect.model import Limits

    given.pop("as_json")
    limits = Limits(cell_seconds=given.pop("cell_seconds"), memory_bytes=int(given.pop("memory_gib") * (1 << 30)))
    submodules = {name: Path(path) for name, path in given.pop("submodules").items()}
    return engine.Request(limits=limits, submodules=submodules, command=tuple(sys.argv[1:]), **given)


def show(answer: Any, as_json: bool) -> None:
    from dsabisect.report import build, text

    tell(build.dumps(answer.report) if as_json else text.render(answer.report))
    say(f"report: {answer.run_dir / 'report.json'}")


@click.group(epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(dsabisect.__version__, prog_name="dsabisect")
def cli() -> None:
    """Name the first change after which the DSA indexer gives different answers, and say: revert it, or gate it."""


@cli.command(epilog=EPILOG)
@measuring
@click.option("--good", required=True, help="Commit whose answers are right.")
@click.option("--bad", required=True, help="Commit whose answers are wrong.")
@click.option("--skip", multiple=True, metavar="REV", help="Commit that cannot be tested; may be repeated.")
@click.option("--max-evals", type=click.IntRange(min=2), help="Stop after so many commits were measured.")
@click.option("--max-minutes", type=click.FloatRange(min=0), help="Stop after so many minutes.")
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=max(1, (os.cpu_count() or 1) // 4),
    show_default="cores / 4",
    help="Checkouts and builds at a time.",
)
@click.option("--resume", is_flag=True, help="Go on with the run in --out.")
def run(as_json: bool, **given: Any) -> None:
    """Find the first diverging change between two commits."""
    from dsabisect import engine

    if given["resume"] and given["out"] is None:
        raise click.UsageError("--resume needs --out RUN_DIR")
    answer = engine.run(request_of(as_json=as_json, **given), say)
    show(answer, as_json)
    sys.exit(answer.exit_code)


@cli.command(epilog=EPILOG)
@measuring
@click.argument("rev", default="HEAD")
def check(rev: str, as_json: bool, **given: Any) -> None:
    """Measure one commit: exit 0 good, 1 bad, 125 skip, so that `git bisect run` understands it."""
    from dsabisect import engine

    answer = engine.check(request_of(as_json=as_json, bad=rev, **given), say)
    show(answer, as_json)
    sys.exit(answer.exit_code)


@cli.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--format", "form", type=click.Choice(["text", "md", "json"]), default="text", show_default=True)
def report(run_dir: Path, form: str) -> None:
    """Print the report of a run, made anew from its journal."""
    tell(_render(run_dir, form))


def _render(run_dir: Path, form: str) -> str:
    from dsabisect.outside import store
    from dsabisect.report import build, markdown, text

    document = build.build(store.read_events(run_dir))
    return {"text": text.render, "md": markdown.render, "json": build.dumps}[form](document)


@cli.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--action", type=click.Choice(["auto", "revert", "gate"]), default="auto", show_default=True)
def propose(run_dir: Path, action: str) -> None:
    """Print the advice of a run as pull-request text. Nothing is written, nothing is pushed."""
    from dsabisect.outside import store
    from dsabisect.report import build, markdown

    document = build.build(store.read_events(run_dir))
    advised = (document["recommendation"] or {}).get("action", "none")
    if action != "auto" and action != advised:
        say(f"the run advises {advised}, not {action}: no proof of {action} was made")
    tell(markdown.render(document))


@cli.command()
@click.option("--keep", type=click.Path(path_type=Path), help="Write the history and the runs here and keep them.")
@click.option("--story", type=click.Choice(["native", "fused", "both"]), default="both", show_default=True)
def demo(keep: Path | None, story: str) -> None:
    """Both stories in miniature, on the CPU: write a bundled history, find both culprits, advise."""
    from dsabisect import stories

    with tempfile.TemporaryDirectory(prefix="dsabisect-demo-") as scratch:
        folder = keep or Path(scratch)
        sys.exit(stories.play(folder, story, say=say, out=tell, keep=keep is not None))


@cli.command()
@click.option("--golden", type=click.Path(path_type=Path), help="Folder of the golden set.")
@click.option("--build-env", "build_env", multiple=True, callback=pairs, metavar="K=V", help="Such as CC=/usr/bin/gcc.")
@click.option("--json", "as_json", is_flag=True)
def doctor(golden: Path | None, build_env: dict[str, str], as_json: bool) -> None:
    """Say what this machine can measure and what is in the way."""
    from dsabisect.outside import doctor as diagnosis
    from dsabisect.outside import golden as goldens

    lines = diagnosis.diagnose(build_env=build_env, golden_check=lambda: goldens.load(golden).describe())
    if as_json:
        tell(json.dumps([diagnosis.as_json(line) for line in lines], indent=2))
    else:
        for line in lines:
            tell(diagnosis.render(line))
    sys.exit(1 if any(line.status == "fault" for line in lines) else 0)


@cli.command("targets")
def list_targets() -> None:
    """List the kinds of repository and their paths."""
    from dsabisect import targets

    for name in targets.names():
        target = targets.load(name)
        tell(f"{name}: {target.TITLE}")
        for path in target.PATHS:
            mark = "*" if path.name in target.DEFAULT_PATHS else " "
            tell(f"  {mark} {path.name:<10} {path.title}")
    tell("* measured when no --path is given")


@cli.command("cases")
@click.option("--suite", default="default", show_default=True)
@click.option("--target", "target_name", help="Show which paths of this target take each case.")
@click.option("--device", "device_name", default="cpu", show_default=True, help="cpu, or cuda:N with --arch.")
@click.option("--arch", default="cpu", show_default=True, help="cpu, sm90, sm100 …")
@click.option("--golden", type=click.Path(path_type=Path), multiple=True)
def list_cases(suite: str, target_name: str | None, device_name: str, arch: str, golden: tuple[Path, ...]) -> None:
    """List the cases of a suite with their facets and cost: multiply-adds of the logits, in millions."""
    from dsabisect import targets
    from dsabisect.indexer import cases as grid
    from dsabisect.model import Device
    from dsabisect.outside import golden as goldens

    target = targets.load(target_name) if target_name else None
    device = Device(name=device_name, arch=arch)
    for case in goldens.load(golden).cases(suite):
        facets = " ".join(f"{k}={v}" for k, v in case.facets.items())
        takes = ""
        if target is not None:
            takes = "  <- " + (
                " ".join(p.name for p in target.PATHS if target.supports(p, case, device) is None) or "none"
            )
        tell(f"{case.id:<44} {case.stage.value:<10} {grid.cost(case) / 1e6:9.1f} M  {facets}{takes}")


@cli.group("golden")
def golden_group() -> None:
    """Look at the golden set and verify it."""


@golden_group.command("list")
@click.option("--golden", type=click.Path(path_type=Path), multiple=True)
def golden_list(golden: tuple[Path, ...]) -> None:
    """Say where the golden set is and what it holds."""
    from dsabisect.outside import golden as goldens

    tell(goldens.load(golden).describe())


@golden_group.command("show")
@click.argument("case_id")
@click.option("--golden", type=click.Path(path_type=Path), multiple=True)
def golden_show(case_id: str, golden: tuple[Path, ...]) -> None:
    """Show one case: facets, shape, hashes, tensors, which comparison rejects which negative control."""
    from dsabisect.outside import golden as goldens

    tell(json.dumps(goldens.load(golden).show(case_id), indent=2, sort_keys=True))


@golden_group.command("verify")
@click.option(
    "--deep", is_flag=True, help="Also rebuild inputs and oracle outputs and run the negative controls again."
)
@click.option("--golden", type=click.Path(path_type=Path), multiple=True)
def golden_verify(deep: bool, golden: tuple[Path, ...]) -> None:
    """Check every hash; with --deep make everything anew and compare (about a minute)."""
    from dsabisect.outside import golden as goldens
    from dsabisect.outside import regenerate

    loaded = goldens.load(golden)
    tell(f"{loaded.describe()}\nevery hash agrees")
    if deep:
        tensors = regenerate.verify_deep(loaded, tuple(loaded.by_id.values()))
        tell(f"{len(loaded.by_id)} cases rebuilt: input hashes identical, {tensors} oracle tensors agree")
        count = goldens.verify_controls(loaded, tuple(loaded.by_id.values()), None)
        tell(f"{count} negative controls rejected")


@golden_group.command("propose")
@click.option("--to", "folder", type=click.Path(path_type=Path), required=True, help="Folder for the proposal.")
@click.option("--golden", type=click.Path(path_type=Path), help="Folder of the current set.")
def golden_propose(folder: Path, golden: Path | None) -> None:
    """Make the golden set anew into a folder of its own and print what differs from the current one."""
    from dsabisect.outside import golden as goldens
    from dsabisect.outside import regenerate

    new, found = regenerate.propose(folder, goldens.load(golden))
    tell("\n".join([regenerate.HEADER, *map(str, found)]) if found else "nothing differs")
    say(f"{new.describe()}\naccept it: dsabisect golden accept {folder} --reason TEXT")


@golden_group.command("accept")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--reason", required=True, help="Why the goldens change; kept in accepted.json.")
@click.option("--by", help="Who accepts. Default: the name of this account.")
@click.option("--force", is_flag=True, help="Accept also when the oracle or a tolerance changed with the goldens.")
@click.option("--golden", type=click.Path(path_type=Path), help="Folder of the set that is replaced.")
def golden_accept(folder: Path, reason: str, by: str | None, force: bool, golden: Path | None) -> None:
    """Promote a proposal, with the reason. Refused when the oracle or a tolerance changes with it."""
    import getpass

    from dsabisect.outside import golden as goldens
    from dsabisect.outside import regenerate

    into = golden or goldens.default_root()
    record = regenerate.accept(folder, into, reason=reason, by=by or getpass.getuser(), force=force)
    tell(f"accepted {record['key'][:12]} into {into}: {reason}")


@golden_group.command("import")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--id", "case_id", required=True, help="Id of the new case, such as v32-layer3-decode.")
@click.option("--facet", "facets", multiple=True, callback=pairs, metavar="K=V", help="rope= and mode= are needed.")
@click.option("--topk", type=click.IntRange(min=1), default=2048, show_default=True)
@click.option("--to", "folder", type=click.Path(path_type=Path), required=True, help="Folder of imported cases.")
def golden_import(file: Path, case_id: str, facets: dict[str, str], topk: int, folder: Path) -> None:
    """Make a case of captured activations (safetensors). Use it with a second --golden FOLDER."""
    from dsabisect.outside import importing

    case = importing.add(file, folder, id=case_id, given=facets, topk=topk)
    told = " ".join(f"{name}={value}" for name, value in case.facets.items())
    tell(
        f"{case.id} imported into {folder}: {told}\nmeasure it with --golden {folder} (beside --golden of another set)"
    )


@golden_group.command("calibrate")
@measuring
@click.option("--commit", required=True, help="Commit that is known to be good.")
@click.option(
    "--to", "folder", type=click.Path(path_type=Path), help="Default: calibration/ in the golden set's folder."
)
def golden_calibrate(commit: str, folder: Path | None, as_json: bool, **given: Any) -> None:
    """Measure a good commit's rounding errors on this device; runs on the same arch then use them as baselines."""
    from dsabisect import calibrate

    path, told = calibrate.calibrate(request_of(as_json=as_json, bad=commit, **given), say, folder)
    tell(path.read_text() if as_json else told)
    say(f"calibration: {path}")


@golden_group.command("prove")
@click.option("--suite", default="full", show_default=True)
@click.option("--golden", type=click.Path(path_type=Path))
def golden_prove(suite: str, golden: Path | None) -> None:
    """Print the tables of planted faults and legitimate differences; fail when a fault passes or a right answer fails.

    Plants every fault into every case of the suite: about a minute for `full`.
    """
    from dsabisect.errors import BadOracle
    from dsabisect.indexer import prove
    from dsabisect.outside import golden as goldens

    loaded = goldens.load(golden)
    proof = prove.prove(loaded.cases(suite), loaded.golden)
    tell(f"{loaded.describe()}\n\n{prove.text(proof)}")
    if not proof.holds:
        wrong = ", ".join("/".join(key) for key in (*proof.accepted_faults, *proof.false_alarms))
        raise BadOracle(f"the set is not sound: {wrong or 'no fault was planted'}", where=str(loaded.root))


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point. Click's own exit codes (1, 2) would be verdicts to `git bisect run`: they become 129 and 130."""
    try:
        cli.main(args=argv, prog_name="dsabisect", standalone_mode=False)
    except click.UsageError as error:
        error.show()
        sys.exit(EXIT_USAGE)
    except click.ClickException as error:
        error.show()
        sys.exit(EXIT_USAGE)
    except (click.exceptions.Abort, KeyboardInterrupt):
        say("interrupted")
        sys.exit(EXIT_INTERRUPTED)
    except DsabisectError as error:
        say(f"dsabisect: {error}")
        sys.exit(error.exit_code)
    except Exception as error:
        say(f"dsabisect: internal error: {type(error).__name__}: {error}")
        say(f"  log: {_crash_log()}  (please report it)")
        sys.exit(EXIT_INTERNAL)
    sys.exit(0)


def _crash_log() -> str:
    handle, name = tempfile.mkstemp(prefix="dsabisect-crash-", suffix=".log")
    with os.fdopen(handle, "w") as stream:
        stream.write(f"dsabisect {dsabisect.__version__} {' '.join(sys.argv[1:])}\n\n{traceback.format_exc()}")
    return name


if __name__ == "__main__":
    main()
