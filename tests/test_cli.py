"""Bad input through the real command line: one clear line, the documented exit code, nothing lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import pytest

from dsabisect import report
from dsabisect.targets import demo

DSABISECT = (sys.executable, "-m", "dsabisect")


def call(
    *args: str | Path, cwd: Path, env: dict[str, str] | None = None, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*DSABISECT, *map(str, args)],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> demo.DemoHistory:
    return demo.write_history(tmp_path_factory.mktemp("history") / "miniindexer")


@pytest.fixture
def sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DSABISECT_CACHE", str(tmp_path / "cache"))
    return tmp_path


def fails(result: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr, result.stderr


def run_args(history: demo.DemoHistory, **changed: str | Path) -> list[str]:
    options = {
        "repo": history.path, "target": "demo", "good": history.story2_good, "bad": history.story2_bad,
        "suite": "smoke", "path": "fused", **changed,
    }  # fmt: skip
    return [text for name, value in options.items() for text in (f"--{name}", str(value))]


def test_not_a_repository(sandbox: Path, history: demo.DemoHistory) -> None:
    fails(call("run", *run_args(history, repo=sandbox), cwd=sandbox), 128, "not a git repository")


@pytest.mark.parametrize("revision", ["nonsense", "--upload-pack=x", "-h", "a..b", "", "HEAD\nHEAD", "HEAD^{tree}"])
def test_bad_revision(sandbox: Path, history: demo.DemoHistory, revision: str) -> None:
    result = call("run", *[f"--repo={history.path}", "--target=demo", f"--good={revision}", "--bad=HEAD"], cwd=sandbox)
    fails(result, 128)
    assert len(result.stderr.strip().splitlines()) == 1


def test_skip_list_with_rubbish(sandbox: Path, history: demo.DemoHistory) -> None:
    (sandbox / "skips").write_bytes(b"# fine\n\x00\xff\xfe x\n")
    result = call("run", *run_args(history), "--skip-list", sandbox / "skips", cwd=sandbox)
    fails(result, 128, "revision")


def test_good_equals_bad(sandbox: Path, history: demo.DemoHistory) -> None:
    fails(call("run", *run_args(history, good=history.story2_bad), cwd=sandbox), 128, "same commit")


def test_good_newer_than_bad(sandbox: Path, history: demo.DemoHistory) -> None:
    swapped = run_args(history, good=history.story2_bad, bad=history.story2_good)
    fails(call("run", *swapped, cwd=sandbox), 128, "Swap")


@pytest.mark.parametrize(
    ("option", "value", "word"),
    [
        ("target", "vllm", "Known targets: demo, sglang, deepgemm"),
        ("path", "warp", "Known: "),
        ("suite", "huge", "smoke"),
        ("device", "tpu", "cpu"),
        ("case", "nosuch", "dsabisect cases"),
    ],
)
def test_unknown_words(sandbox: Path, history: demo.DemoHistory, option: str, value: str, word: str) -> None:
    fails(call("run", *run_args(history, **{option: value}), cwd=sandbox), 129, word)


def test_unknown_option_is_not_a_verdict(sandbox: Path) -> None:
    fails(call("run", "--nonsense", cwd=sandbox), 129, "No such option")


def test_no_gpu(sandbox: Path, history: demo.DemoHistory) -> None:
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    fails(call("run", *run_args(history, device="cuda:0"), cwd=sandbox, env=hidden), 128, "--device cpu")


def test_golden_folder_missing(sandbox: Path, history: demo.DemoHistory) -> None:
    fails(call("run", *run_args(history, golden=sandbox / "none"), cwd=sandbox), 128, "golden")


def test_golden_folder_tampered(sandbox: Path, history: demo.DemoHistory) -> None:
    from dsabisect.outside import golden

    copy = sandbox / "golden"
    shutil.copytree(golden.load(None).root, copy)
    blob = next(copy.glob("*.safetensors"))
    data = bytearray(blob.read_bytes())
    data[-5] ^= 1
    blob.write_bytes(data)
    fails(
        call("check", history.tip, "--repo", history.path, "--target", "demo", "--golden", copy, cwd=sandbox),
        128,
        blob.name,
    )


def test_unwritable_out(sandbox: Path, history: demo.DemoHistory) -> None:
    (sandbox / "file").write_text("")
    fails(call("run", *run_args(history, out=sandbox / "file" / "run"), cwd=sandbox), 128, "--out")


def test_a_checkout_is_no_run_folder(sandbox: Path, history: demo.DemoHistory) -> None:
    """Nothing is written before that is known."""
    (sandbox / "mine" / ".git").mkdir(parents=True)
    args = ["--repo", history.path, "--target", "demo", "--path", "split", "--out", sandbox / "mine"]
    fails(call("check", history.tip, *args, cwd=sandbox), 128, "not empty", "--out")
    assert [p.name for p in (sandbox / "mine").iterdir()] == [".git"]


def test_calibrate_shows_its_settings_and_runs_nothing(sandbox: Path, history: demo.DemoHistory) -> None:
    args = ["--repo", history.path, "--target", "demo", "--commit", history.tip]
    done = call("golden", "calibrate", *args, "--show-config", cwd=sandbox)
    assert done.returncode == 0 and "suite" in done.stdout and not (sandbox / "dsabisect-runs").exists()
    fails(call("golden", "calibrate", *args, "-q", "-v", cwd=sandbox), 129, "say nothing")
    fails(call("golden", "calibrate", "--commit", "HEAD", cwd=sandbox), 129, "--target")


def test_amounts_have_an_end(sandbox: Path, history: demo.DemoHistory) -> None:
    args = ["--repo", history.path, "--target", "demo", "--memory", "1e300"]
    fails(call("check", history.tip, *args, cwd=sandbox), 129, "--memory")


def test_relative_paths_are_below_the_current_folder(sandbox: Path, history: demo.DemoHistory) -> None:
    repo = os.path.relpath(history.path, sandbox)
    args = ["--repo", repo, "--target", "demo", "--suite", "smoke", "--path", "expanded", "--out", "my run"]
    done = call("check", history.tip, *args, cwd=sandbox)
    assert done.returncode == 0, done.stderr
    kept = json.loads((sandbox / "my run" / "report.json").read_text())["run"]["repo"]
    assert Path(kept).is_absolute() and Path(kept).samefile(history.path)  # it is read from elsewhere later on
    assert (sandbox / "my run" / "report.json").is_file()


def test_disk_full(sandbox: Path, history: demo.DemoHistory) -> None:
    limited = f"ulimit -f 1; exec {sys.executable} -m dsabisect run {' '.join(run_args(history))}"
    result = subprocess.run(["bash", "-c", limited], cwd=sandbox, capture_output=True, text=True)
    assert result.returncode == 128, result.stderr
    assert "Traceback" not in result.stderr


def test_a_reader_that_went_away_does_not_change_the_verdict(sandbox: Path, history: demo.DemoHistory) -> None:
    command = f"{sys.executable} -m dsabisect check {history.tip} --repo {history.path} --target demo --suite smoke"
    piped = f"{command} --path expanded --out run 2>/dev/null | true; exit ${{PIPESTATUS[0]}}"
    assert subprocess.run(["bash", "-c", piped], cwd=sandbox).returncode == 0


def test_no_torch_is_not_a_verdict(sandbox: Path, history: demo.DemoHistory) -> None:
    """`git bisect run` stops at codes of 128 and more: with a broken interpreter nobody is accused."""
    shim = sandbox / "python"
    shim.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    shim.chmod(0o755)
    result = call("check", history.tip, "--repo", history.path, "--target", "demo", "--python", shim, cwd=sandbox)
    fails(result, 128, "torch")


def test_git_bisect_run_agrees_and_leaves_the_repository_alone(sandbox: Path, history: demo.DemoHistory) -> None:
    clone = sandbox / "clone"
    git = ["git", "-C", str(clone), "-c", "advice.detachedHead=false"]
    subprocess.run(["git", "clone", "-q", str(history.path), str(clone)], check=True)
    subprocess.run([*git, "bisect", "start", history.story2_bad, history.story2_good], check=True, capture_output=True)
    command = [*DSABISECT, "check", "HEAD", "--target", "demo", "--path", "fused", "--suite", "smoke", "--out"]
    script = sandbox / "step"
    script.write_text("#!/bin/sh\nexec " + " ".join(command) + f' "{sandbox}/check-$(git rev-parse HEAD)"\n')
    script.chmod(0o755)
    done = subprocess.run([*git, "bisect", "run", str(script)], cwd=clone, capture_output=True, text=True, timeout=300)
    assert f"{history.culprit2} is the first bad commit" in done.stdout, done.stdout + done.stderr
    broken = [
        "git",
        "-C",
        str(clone),
        "bisect",
        "run",
        *DSABISECT,
        "check",
        "HEAD",
        "--target",
        "demo",
        "--golden",
        "/none",
    ]
    subprocess.run([*git, "bisect", "reset"], check=True, capture_output=True)
    subprocess.run([*git, "bisect", "start", history.story2_bad, history.story2_good], check=True, capture_output=True)
    aborted = subprocess.run(broken, cwd=clone, capture_output=True, text=True, timeout=300)
    assert aborted.returncode != 0
    assert "is the first bad commit" not in aborted.stdout


def test_an_interruption_while_it_is_being_loaded_is_one_line(sandbox: Path) -> None:
    code = (
        "import sys\nclass Key:\n    def find_spec(self, name, *_):\n        if name == 'dsabisect.cli':\n"
        "            raise KeyboardInterrupt\nsys.meta_path.insert(0, Key())\n"
        "from dsabisect.__main__ import main\nmain()\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=sandbox, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr, ended.stdout) == (130, "interrupted\n", "")


def test_run_folders_in_a_checkout_are_not_seen_by_git(sandbox: Path, history: demo.DemoHistory) -> None:
    clone = sandbox / "clone"
    subprocess.run(["git", "clone", "-q", history.path, clone], check=True)
    call("check", "--target", "demo", "--suite", "smoke", "--case", "e2e-neox-h32-decode", cwd=clone)
    assert list((clone / "dsabisect-runs").glob("*/report.json"))
    status = subprocess.run(["git", "status", "--porcelain"], cwd=clone, capture_output=True, text=True, check=True)
    assert status.stdout == ""


def test_interrupt_keeps_what_was_measured_and_resumes(sandbox: Path, history: demo.DemoHistory) -> None:
    out = sandbox / "run"
    args = [*DSABISECT, "run", *run_args(history, out=out)]
    process = subprocess.Popen(args, cwd=sandbox, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    journal = out / "journal.jsonl"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and (not journal.exists() or '"observation"' not in journal.read_text()):
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "--resume" in stderr
    assert "Traceback" not in stderr
    measured = journal.read_text().count('"observation"')
    assert measured
    done = call("run", *run_args(history, out=out), "--resume", "--json", cwd=sandbox)
    assert done.returncode == 1, done.stderr
    document = json.loads(done.stdout)
    assert document["first_diverging"]["sha"] == history.culprit2
    assert document["recommendation"]["action"] == "gate"
    assert document["recommendation"]["gate"]["predicate"] == {"rope": "neox"}
    replayed = call("report", out, "--format", "json", cwd=sandbox)
    assert replayed.stdout == (out / "report.json").read_text() == done.stdout  # byte for byte
    schema = json.loads((Path(report.__file__).parent / "report.schema.json").read_text())
    jsonschema.validate(document, schema)
    assert "GATE on rope" in call("propose", out, cwd=sandbox).stdout
