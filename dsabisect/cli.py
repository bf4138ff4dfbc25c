"""The command line: parse, call the engine, echo, exit code. No logic.

Results go to stdout, progress to stderr. Exit codes: see errors.py and docs/usage.md.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click

import dsabisect
from dsabisect.errors import EXIT_INTERNAL, EXIT_INTERRUPTED, EXIT_USAGE, DsabisectError, StoreError

EPILOG = (
    "Exit codes of run: 0 nothing diverges, 1 first diverging change confirmed, 2 narrowed to suspects or unconfirmed, "
    "3 the good endpoint does not hold. Of check: 0 good, 1 bad, 125 skip. "
    "Of every command: 128 error with a remedy, 129 usage, 130 interrupted (resumable), 131 internal error."
)


UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
ACTIONS = "GITHUB_ACTIONS"  # "true" in a job of GitHub Actions, where printed lines can be commands


def say(text: str) -> None:
    _write(_quiet(_harmless(text)) + "\n", sys.stderr)


def _harmless(text: str) -> str:
    """A commit title must not speak to the terminal. Lines stay lines."""
    return UNSEEN.sub(" ", text)


def tell(text: str, *, as_json: bool = False) -> None:
    """A result, on stdout."""
    shown = _quiet(text, as_json=as_json)
    _write(shown if shown.endswith("\n") else shown + "\n", sys.stdout)


def _quiet(text: str, *, as_json: bool = False) -> str:
    """In GitHub Actions a commit title must not become a command of the workflow."""
    if os.environ.get(ACTIONS) != "true":
        return text
    from dsabisect.report import github

    return github.quiet_json(text) if as_json else github.quiet(text)


def _write(text: str, stream: Any) -> None:
    """A reader that went away (`| head`) must not change the exit code: click would make it 1, which is a verdict."""
    try:
        click.echo(text, nl=False, file=stream)
        stream.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class Amount(click.FloatRange):
    """A number that one can count with: no limit would ever be reached by nan, and none is infinite by accident."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number


def pairs(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    """`NAME=VALUE` options as a mapping."""
    found = {}
    for value in values:
        name, equals, rest = value.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"{value!r} is not NAME=VALUE")
        found[name] = rest
    return found


# ---- configuration: a file of the repository, then environment variables, then options ----------------------


def configured(ctx: click.Context, _: click.Parameter, repo: Path) -> Path:
    """Callback of --repo, which is read first: what the repository's file says becomes click's default_map."""
    from dsabisect.outside import settings

    found = settings.load(repo)
    names = {opt.lstrip("-"): param.name for param in ctx.command.params for opt in param.opts}
    ctx.default_map = {names[key]: value for key, value in found.values.items() if key in names}
    ctx.meta["dsabisect.file"] = str(found.file or "")
    return repo


def from_environment(command: click.Command) -> click.Command:
    """DSABISECT_DEVICE for --device, and so on: words apart by spaces where an option may be repeated."""
    for param in command.params:
        if isinstance(param, click.Option) and param.name not in NOT_FROM_ENVIRONMENT:
            param.envvar = f"DSABISECT_{param.opts[0].lstrip('-').replace('-', '_').upper()}"
    return command


def say_unknown_variables() -> None:
    """A misspelt DSABISECT_… is not silently without effect."""
    known = {
        str(param.envvar) for command in (run, check) for param in command.params if getattr(param, "envvar", None)
    }
    known |= OTHER_VARIABLES
    for name in sorted(os.environ):
        if name.startswith("DSABISECT_") and name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.9)
            say(f"dsabisect: {name} is set and means nothing" + (f": {near[0]} does" if near else ""))


# Not an option of `run` or `check`: the cache folder, what scripts/ read, a mark of our own processes.
OTHER_VARIABLES = {f"DSABISECT_{name}" for name in (
    "CACHE", "GOLDEN", "TORCH", "TEST_JOBS", "NEEDS_CHROMIUM", "SGLANG_REPO", "UPDATE", "RUN", "COMPLETE"
)}  # fmt: skip
NOT_FROM_ENVIRONMENT = ("resume", "show_config", "as_json", "verbose", "quiet")


def settings_of() -> dict[str, dict[str, Any]]:
    """Option → its value and where it comes from: option, environment, file or default."""
    ctx = click.get_current_context()
    words = {"COMMANDLINE": "option", "ENVIRONMENT": "environment", "DEFAULT_MAP": "file"}
    found = {}
    for param in ctx.command.params:
        if param.name and param.name != "show_config":
            source = ctx.get_parameter_source(param.name)
            value = ctx.params.get(param.name)
            known = words.get(source.name if source else "", "default")
            found[param.opts[0].lstrip("-")] = {"value": _plain_value(value), "source": known}
    return found


def _plain_value(value: Any) -> Any:
    if isinstance(value, dict):
        return [f"{name}={item}" for name, item in value.items()]
    if isinstance(value, (tuple, list)):
        return [str(item) for item in value]
    return value if isinstance(value, (int, float, bool)) or value is None else str(value)


def show_settings() -> None:
    """`--show-config`: every option, its value, where it comes from; and nothing is run."""
    ctx = click.get_current_context()
    file = ctx.meta.get("dsabisect.file", "")
    tell(f"file: {file or 'none (dsabisect.toml, or [dsabisect] in setup.cfg, at the top of the repository)'}")
    for name, given in settings_of().items():
        value = " ".join(given["value"]) if isinstance(given["value"], list) else given["value"]
        shown = "-" if value in (None, "") else value
        tell(f"  {name:<14} {shown!s:<40} {given['source']}".rstrip())


def _target_names(_: click.Context, __: click.Parameter, begun: str) -> list[str]:
    from dsabisect import targets

    return [name for name in targets.names() if name.startswith(begun)]


def needed(*names: str) -> None:
    """As click's `required`, but after --show-config."""
    ctx = click.get_current_context()
    for param in ctx.command.params:
        if param.name in names and ctx.params.get(param.name) is None:
            raise click.MissingParameter(ctx=ctx, param=param)


def size(_: click.Context, __: click.Parameter, value: str | None) -> int | None:
    """`4096`, `100K`, `20M`, `1.5G` as bytes."""
    if value is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)", value.upper())
    if not found:
        raise click.BadParameter(f"{value!r} is no size such as 4096, 100K, 20M or 1G")
    return int(float(found[1]) * 1024 ** " KMG".index(found[2] or " "))


def measuring(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options shared by run and check."""
    options = (
        click.option(
            "--repo",
            type=click.Path(path_type=Path),
            default=".",
            show_default=True,
            is_eager=True,
            callback=configured,
            help="Repository to read; never changed.",
        ),
        click.option(
            "--target",
            "target",
            shell_complete=_target_names,
            help="What kind of repository it is: see `dsabisect targets`.  [required]",
        ),
        click.option(
            "--path", "paths", multiple=True, help="Path to measure; may be repeated. Default: the target's own choice."
        ),
        click.option(
            "--case",
            "cases",
            multiple=True,
            help="Case id, or the beginning of several; may be repeated. Default: the whole suite.",
        ),
        click.option(
            "--suite",
            default="default",
            show_default=True,
            shell_complete=lambda _, __, begun: [s for s in ("smoke", "default", "full") if s.startswith(begun)],
            help="smoke, default or full.",
        ),
        click.option(
            "--device",
            default="cpu",
            show_default=True,
            help="cpu or cuda:N; several of one kind, such as cuda:0,cuda:1, measure side by side.",
        ),
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
            type=Amount(min=0.1),
            default=120.0,
            show_default=True,
            help="Time limit of one cell.",
        ),
        click.option(
            "--memory",
            "memory_gib",
            type=Amount(min=0.1, max=1 << 20),
            default=8.0,
            show_default=True,
            help="Memory limit of a candidate, GiB.",
        ),
        click.option("--rerun", is_flag=True, help="Measure anew what earlier runs have measured."),
        click.option("-v", "--verbose", is_flag=True, help="Say also what is being measured right now."),
        click.option("-q", "--quiet", is_flag=True, help="Say nothing but the result, and errors."),
        click.option("--json", "as_json", is_flag=True, help="Print the report as JSON."),
        click.option("--show-config", is_flag=True, help="Print every setting and where it comes from; run nothing."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def request_of(**given: Any) -> Any:
    from dsabisect.model import Limits
    from dsabisect.session import Request

    for name in ("as_json", "show_config", "verbose", "quiet"):
        given.pop(name)
    given["settings"] = settings_of()
    limits = Limits(cell_seconds=given.pop("cell_seconds"), memory_bytes=int(given.pop("memory_gib") * (1 << 30)))
    submodules = {name: Path(path) for name, path in given.pop("submodules").items()}
    return Request(limits=limits, submodules=submodules, command=tuple(sys.argv[1:]), **given)


def watching(verbose: bool = False, quiet: bool = False) -> AbstractContextManager[Any]:
    """What a run says while it works: a live line on a terminal, plain lines elsewhere."""
    from dsabisect import terminal

    if verbose and quiet:
        raise click.UsageError("--verbose and --quiet together say nothing")
    say_unknown_variables()
    return terminal.progress(say, _harmless, verbose=verbose, quiet=quiet)


def show(answer: Any, as_json: bool, said: Callable[[str], None]) -> None:
    from dsabisect import terminal
    from dsabisect.outside import pages
    from dsabisect.report import build, text

    if as_json:
        tell(build.dumps(answer.report), as_json=True)
    else:
        tell(terminal.painted(text.render(answer.report)))
    said(f"report: {answer.run_dir / 'report.json'}")
    pages.write(answer.run_dir, answer.report, said)
    _show_github(answer.report)


def _show_github(document: Any) -> None:
    """Job summary and annotations, where GitHub Actions asks for them. Neither may change the exit code."""
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if not summary and os.environ.get(ACTIONS) != "true":
        return
    from dsabisect.report import github

    if summary:
        try:
            with open(summary, "a", encoding="utf-8") as file:
                file.write(github.summary(document))
        except OSError as error:
            say(f"dsabisect: no job summary: {error.strerror or error} ({summary})")
    if os.environ.get(ACTIONS) == "true":
        _write("".join(f"{line}\n" for line in github.commands(document)), sys.stderr)


@click.group(epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(dsabisect.__version__, prog_name="dsabisect")
def cli() -> None:
    """Name the first change after which the DSA indexer gives different answers, and say: revert it, or gate it."""


@cli.command(epilog=EPILOG)
@measuring
@click.option("--good", help="Commit whose answers are right.  [required]")
@click.option("--bad", help="Commit whose answers are wrong.  [required]")
@click.option(
    "--timeline/--first",
    "timeline",
    default=True,
    show_default=True,
    help="Every change of verdict in the range, or a plain bisection to the first.",
)
@click.option(
    "--window",
    type=click.IntRange(min=1),
    help="Timeline: changes that last so many relevant commits are found even when nobody announced them. "
    "Default: 8, or a sixteenth of the relevant commits.",
)
@click.option("--skip", multiple=True, metavar="REV", help="Commit that cannot be tested; may be repeated.")
@click.option(
    "--skip-list",
    type=click.File(encoding="utf-8", errors="replace"),
    metavar="FILE",
    help="File of such commits, one a line; # begins a comment.",
)
@click.option("--suspect", multiple=True, metavar="REV", help="Commit to look at first; may be repeated.")
@click.option("--max-evals", type=click.IntRange(min=2), help="Stop after so many commits were measured.")
@click.option("--max-minutes", type=Amount(min=0), help="Stop after so many minutes.")
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=max(1, (os.cpu_count() or 1) // 4),
    show_default="cores / 4",
    help="Checkouts and builds at a time.",
)
@click.option("--resume", is_flag=True, help="Go on with the run in --out; begin it when there is none yet.")
def run(as_json: bool, timeline: bool, skip_list: Any, **given: Any) -> None:
    """Tell when answers changed between two commits, and name the first change that broke them."""
    if given["show_config"]:
        return show_settings()
    needed("target", "good", "bad")
    from dsabisect import engine

    listed = (line.partition("#")[0].strip() for line in skip_list or ())
    given["skip"] = (*given["skip"], *(line for line in listed if line))
    given["first"] = not timeline
    if given["resume"] and given["out"] is None:
        raise click.UsageError("--resume needs --out RUN_DIR")
    with watching(given["verbose"], given["quiet"]) as told:
        answer = engine.run(request_of(as_json=as_json, **given), told)
    show(answer, as_json, told)
    sys.exit(answer.exit_code)


@cli.command(epilog=EPILOG)
@measuring
@click.argument("rev", default="HEAD")
def check(rev: str, as_json: bool, **given: Any) -> None:
    """Measure one commit: exit 0 good, 1 bad, 125 skip, so that `git bisect run` understands it."""
    if given["show_config"]:
        return show_settings()
    needed("target")
    from dsabisect import engine

    with watching(given["verbose"], given["quiet"]) as told:
        answer = engine.check(request_of(as_json=as_json, bad=rev, **given), told)
    show(answer, as_json, told)
    sys.exit(answer.exit_code)


@cli.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option(
    "--format", "form", type=click.Choice(["text", "md", "json", "html", "junit"]), default="text", show_default=True
)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write it to this file. Default: stdout."
)
def report(run_dir: Path, form: str, output: Path | None) -> None:
    """Print the report of a run, made anew from its journal."""
    from dsabisect.outside import store

    shown = _render(run_dir, form, output)
    if output is None:
        tell(shown, as_json=form == "json")
    else:
        store.write_text(output.absolute(), shown)
        say(f"{form} report: {output}")


def _render(run_dir: Path, form: str, output: Path | None) -> str:
    from dsabisect.outside import store
    from dsabisect.report import build, html, junit, markdown, text

    document = build.build(store.read_events(run_dir))
    logs = (run_dir / "logs").absolute()
    address = logs.as_uri() if output is None else quote(os.path.relpath(logs, output.absolute().parent))
    return {
        "text": text.render,
        "md": markdown.render,
        "json": build.dumps,
        "html": lambda found: html.render(found, logs=address),
        "junit": junit.render,
    }[form](document)


@cli.command("log")
@click.argument("run_dir", type=click.Path(path_type=Path))
def show_log(run_dir: Path) -> None:
    """Print what a run did, in order: one line for each commit that it measured, and every mark."""
    from dsabisect.outside import store
    from dsabisect.report import journal

    tell(journal.render(store.read_events(run_dir)))


@cli.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.argument("rev")
@click.argument("verdict", type=click.Choice(["good", "bad", "skip"]))
@click.option("--column", default="", metavar="PATH/CASE", help="This column only. Default: all.")
def mark(run_dir: Path, rev: str, verdict: str, column: str) -> None:
    """Say yourself what a commit is. It counts from the next `dsabisect run --resume` on."""
    from dsabisect import marking

    tell(marking.mark(run_dir, rev, verdict, column))


@cli.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
def undo(run_dir: Path) -> None:
    """Take the last mark of a run back."""
    from dsabisect import marking

    tell(marking.undo(run_dir))


@cli.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option(
    "--action",
    type=click.Choice(["auto", "revert", "revert_hunk", "gate"]),
    default="auto",
    show_default=True,
    help="auto: what the run advises.",
)
@click.option("--change", default="", metavar="SHA", help="Another change of the timeline than the advice is about.")
@click.option("--onto", default="", metavar="REV", help="Commit to propose it on. Default: the bad end of the run.")
@click.option("--repo", type=click.Path(path_type=Path), help="The repository, if it is not where the run had it.")
@click.option("--device", default="", help="Default: the run's.")
@click.option("--calls", type=click.IntRange(min=0), help="Timed calls of each cell. Default: 30 on a GPU, 0 on a CPU.")
@click.option("--branch", is_flag=True, help="Make the branch dsabisect/ACTION-SHA in the repository; nothing else.")
@click.option("--push", default="", metavar="REMOTE", help="Push that branch too; prints the command first.")
@click.option("--pr", "pull_request", is_flag=True, help="Open a pull request too, with `gh`.")
@click.option("--dry-run", is_flag=True, help="Print what --branch, --push and --pr would do, and do nothing.")
@click.option("--force", is_flag=True, help="Go on although the proof failed; needs --reason.")
@click.option("--reason", default="", help="Why; printed in the proposal.")
@click.option("--build-env", "build_env", multiple=True, callback=pairs, metavar="K=V", help="Default: the run's.")
@click.option(
    "--submodule", "submodules", multiple=True, callback=pairs, metavar="NAME=PATH", help="Default: the run's."
)
def propose(submodules: dict[str, str], **given: Any) -> None:
    """Make the advised change, measure it, and write patch, proof and pull-request text to RUN_DIR/proposal.

    Exit codes: 0 proven, or plainly nothing to propose (HOLD, already reverted, conflicts); 1 the proof failed.
    """
    from dsabisect import proposing

    wish = proposing.Wish(submodules={name: Path(path) for name, path in submodules.items()}, **given)
    proposal = proposing.propose(wish, say)
    tell(proposal.markdown)
    sys.exit(proposal.exit_code)


@cli.command()
@click.option("--keep", type=click.Path(path_type=Path), help="Write the history and the runs here and keep them.")
@click.option("--story", type=click.Choice(["native", "fused", "both"]), default="both", show_default=True)
@click.option("-v", "--verbose", is_flag=True, help="Say also what is being measured right now.")
@click.option("-q", "--quiet", is_flag=True, help="Say nothing but the result, and errors.")
def demo(keep: Path | None, story: str, verbose: bool, quiet: bool) -> None:
    """Both stories in miniature, on the CPU: write a bundled history, find both culprits, advise."""
    from dsabisect import stories, terminal

    with tempfile.TemporaryDirectory(prefix="dsabisect-demo-") as scratch, watching(verbose, quiet) as told:

        def out(shown: str) -> None:
            with terminal.paused(told):
                tell(terminal.painted(shown))

        code = stories.play(keep or Path(scratch), story, say=told, out=out, keep=keep is not None)
    sys.exit(code)


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

    new, found = regenerate.propose(folder, goldens.load(golden, replaced=True))
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
@click.option("--topk", type=click.IntRange(min=1, max=1 << 20), default=2048, show_default=True)
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
    if given["show_config"]:
        return show_settings()
    needed("target")
    from dsabisect import calibrate

    with watching(given["verbose"], given["quiet"]) as said:
        path, told = calibrate.calibrate(request_of(as_json=as_json, bad=commit, **given), said, folder)
    tell(path.read_text() if as_json else told)
    said(f"calibration: {path}")


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
    proof = prove.prove(loaded.cases(suite), loaded.golden, loaded.inputs)
    tell(f"{loaded.describe()}\n\n{prove.text(proof)}")
    if not proof.holds:
        wrong = ", ".join("/".join(key) for key in (*proof.accepted_faults, *proof.false_alarms))
        raise BadOracle(f"the set is not sound: {wrong or 'no fault was planted'}", where=str(loaded.root))


@cli.group("cache")
def cache_group() -> None:
    """Look at the results that runs share, and make room."""


@cache_group.command("info")
@click.option("--json", "as_json", is_flag=True)
def cache_info(as_json: bool) -> None:
    """Say where the result cache is and what it holds."""
    with _open_cache() as results:
        info = results.info()
    if as_json:
        tell(json.dumps(dataclasses.asdict(info), indent=2))
        return
    used = f", last used between {info.oldest} and {info.newest}" if info.entries else ""
    tell(f"{info.path}\n{info.entries} results, {info.bytes / 2**20:.1f} of {info.limit / 2**20:.0f} MiB{used}")


@cache_group.command("prune")
@click.option("--all", "everything", is_flag=True, help="Remove every result.")
@click.option("--older-than", "days", type=Amount(min=0), metavar="DAYS", help="Not used for so long.")
@click.option("--limit", "limit", callback=size, metavar="SIZE", help="Least recently used first, down to 100M, 1G …")
def cache_prune(everything: bool, days: float | None, limit: int | None) -> None:
    """Remove results; they are measured again when they are needed."""
    if not everything and days is None and limit is None:
        raise click.UsageError("say what to remove: --all, --older-than DAYS or --limit SIZE")
    with _open_cache() as results:
        gone = results.prune(limit_bytes=limit, older_than_days=days, everything=everything)
    tell(f"{gone} result{'' if gone == 1 else 's'} removed")


def _open_cache() -> Any:
    """The result cache. A run goes on without one; a command about it does not."""
    from dsabisect.outside import cache

    faults: list[str] = []
    results = cache.Results.open(cache.default_path(), note=faults.append)
    if not results.usable:
        raise StoreError(faults[-1], remedy="Free some space, or set DSABISECT_CACHE to a folder of your own")
    for fault in faults:
        say(fault)
    return results


for measured in (run, check):
    from_environment(measured)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point. Click's own exit codes (1, 2) would be verdicts to `git bisect run`: they become 129 and 130."""
    try:
        cli.main(args=argv, prog_name="dsabisect", standalone_mode=False)
    except click.UsageError as error:
        error.show()
        _say_source(error)
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


def _say_source(error: click.UsageError) -> None:
    """Where a bad value comes from, when it is not in the command that one looks at."""
    param, ctx = getattr(error, "param", None), error.ctx
    source = ctx.get_parameter_source(param.name) if ctx and param and param.name else None
    if source is not None and source.name == "ENVIRONMENT":
        say(f"  it comes from the environment variable {getattr(param, 'envvar', '')}")
    if source is not None and source.name == "DEFAULT_MAP" and ctx is not None:
        say(f"  it comes from {ctx.meta.get('dsabisect.file')}")


def _crash_log() -> str:
    handle, name = tempfile.mkstemp(prefix="dsabisect-crash-", suffix=".log")
    with os.fdopen(handle, "w") as stream:
        stream.write(f"dsabisect {dsabisect.__version__} {' '.join(sys.argv[1:])}\n\n{traceback.format_exc()}")
    return name


if __name__ == "__main__":
    main()
