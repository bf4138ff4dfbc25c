"""Candidates that do everything to their process, each with the outcome that it must have, and nothing left running."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dsabisect.errors import EnvironmentFault, HarnessFault, UsageError
from dsabisect.model import Case, Cell, Device, Limits, Measurement, Outcome, PathSpec, Stage
from dsabisect.outside.processes import MARK, CappedLog, descendants
from dsabisect.outside.runner import Runner
from dsabisect.targets import BuildStep

HOSTILE = Path(__file__).parents[1] / "candidate" / "hostile"
CPU = Device(name="cpu", arch="cpu")
LIMITS = Limits(cell_seconds=20, start_seconds=30, memory_bytes=420 << 20, log_bytes=200_000)
SHORT = replace(LIMITS, cell_seconds=1.0, start_seconds=1.5)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    """One runner for all tests: its zygote takes seconds to load torch."""
    root = tmp_path_factory.mktemp("runner")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(HOSTILE))
        with Runner(work=root / "work", limits=LIMITS, log_root=root / "logs") as made:
            yield made


class Bench:
    """A checkout with the hostile code and everything that `measure` needs."""

    def __init__(self, runner: Runner, folder: Path) -> None:
        self.runner, self.folder, self.notes = runner, folder, folder / "notes"
        self.checkout = folder / "checkout"
        (self.checkout / "own_package").mkdir(parents=True)
        self.notes.mkdir()
        (self.checkout / "own_package" / "__init__.py").touch()
        shutil.copy(HOSTILE / "checkout" / "candidate_code.py", self.checkout)
        for name, start in (("a", 0.0), ("b", 100.0)):
            save_file({"x": torch.arange(4.0) + start}, folder / f"{name}.safetensors")

    def cell(self, action: str = "nothing", *, case: str = "", path: PathSpec | None = None, **shape: Any) -> Cell:
        case = case or action
        return Cell(
            path=path or PathSpec(name="fused", title="fused"),
            case=Case(
                id=case,
                stage=Stage.LOGITS,
                facets={},
                shape={"action": action, "notes": str(self.notes), **shape},
            ),
            inputs=tuple(str(self.folder / f"{n}.safetensors") for n in "aba"),
            out=str(self.folder / "out" / case),
        )

    def measure(self, *cells: Cell, probe: str = "hostile_probe", **more: Any) -> list[Measurement]:
        env = more.pop("env", {})
        return list(
            self.runner.measure(
                build_key="key", checkout=self.checkout, probe=probe, device=CPU, env=env, cells=cells, **more
            )
        )

    def log(self, measurement: Measurement) -> str:
        return (self.runner.log_root / measurement.log).read_text(errors="replace")


@pytest.fixture
def bench(runner: Runner, tmp_path: Path) -> Bench:
    return Bench(runner, tmp_path)


def running(pid: int) -> bool:
    """Is there a process of that number that is no zombie?"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def marked(runner: Runner) -> list[int]:
    """Processes that carry the runner's mark: its zygotes, and whatever was left running."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if f"{MARK}={runner._mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(int(pid))
        except OSError:
            continue
    return found


def until(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


# ---- what a well-behaved candidate gets --------------------------------------------------------------------


def test_a_cell_is_run_over_its_inputs_in_order_with_fresh_copies(bench: Bench) -> None:
    (got,) = bench.measure(bench.cell())
    assert got.outcome is Outcome.COMPLETED and got.failure is None
    runs = [load_file(name)["logits"].tolist() for name in got.outputs]
    assert runs == [[0.0, 2.0, 4.0, 6.0], [200.0, 202.0, 204.0, 206.0], [0.0, 2.0, 4.0, 6.0]]
    assert [Path(o).name for o in got.outputs] == ["run0.safetensors", "run1.safetensors", "run2.safetensors"]
    assert got.proof["taken"] == "scores" and got.notes == ("a note",) and got.stood_in == ("sgl_kernel",)
    assert {"fork", "import", "load", "run", "first_run", "write", "host"} <= set(got.timing)
    assert not [f for f in Path(bench.cell().out).iterdir() if f.suffix == ".tmp"]


def test_cells_share_a_process_until_one_fails(bench: Bench) -> None:
    cells = [bench.cell("nothing", case=f"c{i}") for i in range(3)]
    got = bench.measure(*cells, bench.cell("raise"), bench.cell("nothing", case="after"))
    assert [m.case for m in got] == ["c0", "c1", "c2", "raise", "after"]
    pids = [m.proof.get("pid") for m in got]
    assert pids[0] == pids[1] == pids[2] != pids[4]
    assert got[4].proof["calls"] == "3"  # the last run of a fresh process
    assert "import" not in got[1].timing and "import" in got[4].timing


def test_paths_with_other_environment_or_settings_get_processes_of_their_own_in_order(bench: Bench) -> None:
    on = PathSpec(name="on", title="on", env={"DSA_FLAG": "1"}, settings={"flag": "on"})
    off = PathSpec(name="off", title="off", env={"DSA_FLAG": "0"}, settings={"flag": "off"})
    got = bench.measure(*(bench.cell(case=f"c{i}", path=p) for i, p in enumerate((on, off, on, off))))
    assert [(m.path, m.case) for m in got] == [("on", "c0"), ("off", "c1"), ("on", "c2"), ("off", "c3")]
    assert [m.proof["flag"] for m in got] == ["on", "off", "on", "off"]
    assert "DSA_FLAG=1" in got[0].proof["env"] and "DSA_FLAG=0" in got[1].proof["env"]
    assert got[0].proof["pid"] == got[2].proof["pid"] != got[1].proof["pid"] == got[3].proof["pid"]


def test_the_environment_is_an_allow_list_with_private_folders(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "x")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    (got,) = bench.measure(bench.cell(), env={"TORCHDYNAMO_DISABLE": "1"})
    env = dict(item.split("=", 1) for item in got.proof["env"].split(",") if "=" in item)
    work = str(bench.runner.work)
    assert "SECRET_TOKEN" not in env and "CUDA_LAUNCH_BLOCKING" not in env and env["TORCHDYNAMO_DISABLE"] == "1"
    for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "DG_JIT_CACHE_DIR", "TVM_FFI_CACHE_DIR"):
        assert env[name].startswith(work), name
    assert "/jit/key/" in env["TRITON_CACHE_DIR"] and env["PYTHONHASHSEED"] == "0"
    assert got.proof["cwd"].startswith(work + "/scratch/") and not Path(got.proof["cwd"]).exists()


def test_jit_key_names_the_caches(bench: Bench) -> None:
    """Builds with one key share what was compiled; a key that nobody had before has empty caches."""
    seen = []
    for name in ("kernels-a", "kernels-a", "kernels-b"):
        (got,) = bench.measure(bench.cell(), jit_key=name)
        cache = next(i for i in got.proof["env"].split(",") if i.startswith("TRITON_CACHE_DIR=")).partition("=")[2]
        assert f"/jit/{name}/" in cache
        seen.append(sorted(p.name for p in Path(cache).iterdir()))
        (Path(cache) / "compiled").touch()
    assert [("compiled" in names) for names in seen] == [False, True, False]


def test_a_variable_that_torch_reads_when_it_is_loaded_takes_effect(bench: Bench) -> None:
    """OMP_NUM_THREADS comes too late for a process that has torch already: such a path gets a zygote of its own."""
    two = PathSpec(name="two", title="two", env={"OMP_NUM_THREADS": "2"})
    (bench.checkout / "candidate_code.py").write_text(
        "import torch\nCALLS = []\ndef misbehave(*_): pass\ndef scores(x): return x * 0 + torch.get_num_threads()\n"
    )
    got = bench.measure(bench.cell(case="one"), bench.cell(case="two", path=two))
    assert [load_file(m.outputs[0])["logits"][0].item() for m in got] == [1.0, 2.0]


def test_views_become_contiguous_tensors(bench: Bench) -> None:
    (got,) = bench.measure(bench.cell(probe="views"))
    assert load_file(got.outputs[0])["logits"].tolist() == torch.arange(12.0).reshape(3, 4).t().tolist()


# ---- hostile candidates ------------------------------------------------------------------------------------

ENDS: dict[str, tuple[Outcome, str]] = {
    "print_forged": (Outcome.COMPLETED, ""),
    "forge_everywhere": (Outcome.COMPLETED, ""),
    "print_much": (Outcome.COMPLETED, ""),
    "change_folder": (Outcome.COMPLETED, ""),
    "write_outside": (Outcome.COMPLETED, ""),
    "share_memory": (Outcome.COMPLETED, ""),
    "fill_memory": (Outcome.OUT_OF_MEMORY, "OutOfMemory: more than N MiB while running"),
    "fill_memory_in_daemon": (Outcome.OUT_OF_MEMORY, "OutOfMemory: more than N MiB while running"),
    "allocate_absurdly": (Outcome.OUT_OF_MEMORY, "RuntimeError: "),
    "exit_zero": (Outcome.CRASHED, "Exited: exited 0 without a result"),
    "segfault": (Outcome.CRASHED, "SIGSEGV"),
    "abort": (Outcome.CRASHED, "SIGABRT"),
    "close_everything": (Outcome.CRASHED, "Exited: exited 70 without a result"),
    "raise": (Outcome.RAISED, "ValueError: The size of tensor a (N) must match, at X in x.cu"),
    "raise_in_library": (Outcome.RAISED, "RuntimeError: The size of tensor a (N) must match the size of tensor b (N)"),
    "raise_in_call_back": (Outcome.RAISED, "ZeroDivisionError: division by zero"),
    "system_exit": (Outcome.RAISED, "SystemExit: that is all"),
    "keyboard_interrupt": (Outcome.RAISED, "KeyboardInterrupt"),
    "interrupt_itself": (Outcome.RAISED, "KeyboardInterrupt"),
    "endless_recursion": (Outcome.RAISED, "RecursionError: maximum recursion depth exceeded"),
    "unprintable": (Outcome.RAISED, "candidate_code.do_unprintable.<locals>.Odd: "),
    "import_own_missing": (Outcome.RAISED, "ModuleNotFoundError: No module named 'own_package.not_there'"),
    "survive_missing": (Outcome.RAISED, "RuntimeError: no other way"),
    "import_blocked": (Outcome.RAISED, "dsabisect.candidate.probes.BlockedImport: No module named 'deep_gemm'"),
    "blocked_as_object": (Outcome.RAISED, "AttributeError: 'BlockedImport' object has no attribute 'get_num_sms'"),
    "cuda_error": (Outcome.CRASHED, "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"),
    "context_lost_later": (Outcome.CRASHED, "RuntimeError: CUDA error: an illegal memory access was encountered"),
    "compile": (
        Outcome.RAISED,
        "RuntimeError: Assertion error (compiler.hpp:N): NVCC compilation failed"
        ' | a.cuh(N): error: static assertion failed with "Invalid block size"',
    ),
    "kill_parent": (Outcome.CRASHED, "ParentKilled: "),
    "kill_parent_once": (Outcome.COMPLETED, ""),
}


@pytest.mark.parametrize("action", ENDS)
def test_hostile(bench: Bench, action: str) -> None:
    """Each has its outcome and signature, and the cell after it is measured as if nothing had been."""
    outcome, signature = ENDS[action]
    got, after = bench.measure(bench.cell(action), bench.cell("nothing", case="after"))
    assert got.outcome is outcome, (got, bench.log(got))
    assert (got.failure.signature if got.failure else "").startswith(signature)
    assert (got.failure is None) == (outcome is Outcome.COMPLETED)
    assert after.outcome is Outcome.COMPLETED and load_file(after.outputs[0])["logits"].tolist() == [0.0, 2.0, 4.0, 6.0]
    if outcome is not Outcome.COMPLETED:
        assert after.proof["calls"] == "3"  # of a fresh process
    assert len(marked(bench.runner)) <= len([z for i in bench.runner._idle.values() for z in i])


@pytest.mark.parametrize("action", ["sleep", "stop_parent", "print_for_ever"])
def test_no_end(bench: Bench, action: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsabisect.outside.processes.SWEEP_SECONDS", 1.0)
    monkeypatch.setattr(bench.runner, "limits", SHORT)
    began = time.monotonic()
    got = next(iter(bench.runner.measure(
        build_key="key", checkout=bench.checkout, probe="hostile_probe", device=CPU, env={}, cells=[bench.cell(action)]
    )))  # fmt: skip
    assert got.outcome is Outcome.TIMED_OUT and got.failure is not None
    assert got.failure.signature == "TimedOut: no end after N s of running"
    assert f"in do_{action}" in got.failure.traceback  # where it stood
    assert time.monotonic() - began < 15
    assert (bench.runner.log_root / got.log).stat().st_size < LIMITS.log_bytes * 1.1
    monkeypatch.undo()
    (after,) = bench.measure(bench.cell())
    assert after.outcome is Outcome.COMPLETED


@pytest.mark.parametrize("action", ["fork_and_sleep", "daemon"])
def test_what_a_candidate_leaves_behind_is_ended(bench: Bench, action: str) -> None:
    (got,) = bench.measure(bench.cell(action, inputs=1))
    assert got.outcome is Outcome.COMPLETED
    assert not running(int((bench.notes / "pid").read_text()))


def test_a_candidate_that_deletes_its_checkout(bench: Bench) -> None:
    """The process that has it loaded goes on; a fresh one has nothing to load, and that is the candidate's doing."""
    got = bench.measure(bench.cell("delete_checkout"), bench.cell("raise"), bench.cell("nothing", case="after"))
    assert [m.outcome for m in got] == [Outcome.RAISED, Outcome.RAISED, Outcome.RAISED]
    assert got[0].failure and got[0].failure.type == "FileNotFoundError"  # its second run finds nothing to delete
    assert (
        got[1].failure == got[2].failure
        and got[1].failure
        and got[1].failure.signature == "CheckoutRemoved: it removed N of its own source files"
    )
    with pytest.raises(HarnessFault, match="checkout is not there"):
        bench.measure(bench.cell())


def test_the_log_keeps_beginning_and_end(bench: Bench) -> None:
    (got,) = bench.measure(bench.cell("print_much"))
    text = bench.log(got)
    assert len(text) < LIMITS.log_bytes * 1.1 and "bytes cut here" in text and "the end of it" in text[-200:]


def test_what_is_printed_before_the_host_reads_belongs_to_the_next_cell(tmp_path: Path) -> None:
    """The child does not wait for the host: what follows a message in the pipe must not be laid to what came before."""
    log = CappedLog(tmp_path / "log", 1 << 20)
    log.write(b"loading\n[dsabisect: 2 opened]\na.cuh(97): error\n")
    assert log.since(log.after("[dsabisect: 2 opened]\n")) == "a.cuh(97): error\n"
    assert log.since(log.after("[dsabisect: 3 cell]\n")) == ""  # a candidate that closed its output: nothing is guessed
    assert log.since(log.after("")) == ""


def test_the_traceback_is_short_and_relative_to_the_checkout(bench: Bench) -> None:
    (got,) = bench.measure(bench.cell("raise_in_library"))
    assert got.failure is not None
    assert got.failure.traceback.splitlines()[-1].startswith("candidate_code.py:")
    assert got.failure.traceback.endswith("in do_raise_in_library") and str(bench.folder) not in got.failure.traceback
    (crash,) = bench.measure(bench.cell("segfault"))
    assert crash.failure is not None and "in do_segfault" in crash.failure.traceback


@pytest.mark.parametrize(
    ("source", "outcome", "signature"),
    [
        ("def broken(:\n", Outcome.RAISED, "SyntaxError: "),
        ("raise RuntimeError('at import')\n", Outcome.RAISED, "RuntimeError: at import"),
        ("import own_package.gone\n", Outcome.RAISED, "ModuleNotFoundError: "),
        ("import os\nos._exit(3)\n", Outcome.CRASHED, "Exited: exited 3"),
    ],
)
def test_a_failure_of_the_import_is_every_cells_and_met_once(
    bench: Bench, source: str, outcome: Outcome, signature: str
) -> None:
    counter = bench.notes / "imports"
    head = f"open({str(counter)!r}, 'a').write('x')\n" if "broken" not in source else ""
    (bench.checkout / "candidate_code.py").write_text(head + source)
    got = bench.measure(*(bench.cell(case=f"c{i}") for i in range(3)))
    assert [m.outcome for m in got] == [outcome] * 3 and len({m.failure for m in got}) == 1
    assert got[0].failure is not None and got[0].failure.signature.startswith(signature)
    assert not head or counter.read_text() == "x"


# ---- what the probe decides, and what is our own or the machine's fault -------------------------------------


def test_what_the_probe_decides(bench: Bench) -> None:
    cells = [bench.cell(case=name, probe=name) for name in ("absent", "not_exercised", "no_proof", "")]
    got = bench.measure(*cells)
    assert [m.outcome for m in got] == [
        Outcome.ABSENT, Outcome.NOT_EXERCISED, Outcome.NOT_EXERCISED, Outcome.COMPLETED,
    ]  # fmt: skip
    assert got[0].detail == "no such path yet" and got[1].proof == {"taken": "split"}
    assert all(m.failure is None for m in got)


@pytest.mark.parametrize(
    ("action", "probe", "kind", "text"),
    [
        ("nothing", "harness", HarnessFault, "short of a name"),
        ("nothing", "own_bug", HarnessFault, "missing key of ours"),
        ("nothing", "odd_output", HarnessFault, "'logits' is a list"),
        ("import_missing", "", HarnessFault, "Install the module 'a_module_that_nobody_has'"),
        ("device_gone", "", EnvironmentFault, "nvidia-smi"),
        ("no_space", "", EnvironmentFault, "No space left on device"),
    ],
)
def test_no_verdict_from_a_fault_that_is_not_the_candidates(
    bench: Bench, action: str, probe: str, kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match="fused/the-case") as caught:
        bench.measure(bench.cell(action, case="the-case", probe=probe))
    message = str(caught.value)
    assert text in message and "checkout" in message
    log = Path(message.partition("; log ")[2].partition(")")[0])
    assert log.is_file() and log.is_relative_to(bench.runner.log_root)
    assert bench.measure(bench.cell())[0].outcome is Outcome.COMPLETED


def test_a_missing_probe_or_input_is_our_fault(bench: Bench) -> None:
    with pytest.raises(HarnessFault, match="no_such_probe"):
        bench.measure(bench.cell(), probe="no_such_probe")
    with pytest.raises(HarnessFault, match=r"gone\.safetensors"):
        bench.measure(replace(bench.cell(), inputs=(str(bench.folder / "gone.safetensors"),)))


# ---- the machine -------------------------------------------------------------------------------------------


def test_environment(runner: Runner) -> None:
    facts = runner.environment("cpu")
    assert facts["arch"] == "cpu" and facts["torch"] == str(torch.__version__) and facts["deep_gemm"]
    assert {"python", "cuda", "driver", "device_name", "triton", "numpy"} <= set(facts) and all(facts.values())
    assert runner.uuids == {"cpu": ""} and "uuid" not in facts  # equal cards share results
    with pytest.raises(UsageError, match="unknown device 'gpu'"):
        runner.environment("gpu")
    if not torch.cuda.is_available():
        with pytest.raises(EnvironmentFault, match="--device cpu"):
            runner.environment("cuda:0")


def test_an_interpreter_without_torch_or_none_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    with Runner(interpreter=str(bare / "bin" / "python"), work=tmp_path / "w", log_root=tmp_path / "l") as made:
        with pytest.raises(EnvironmentFault, match=r"cannot load torch: ModuleNotFoundError.*Install torch"):
            made.environment("cpu")
        assert marked(made) == []
    made = Runner(interpreter="/no/such/python", work=tmp_path / "w", log_root=tmp_path / "l")
    with made, pytest.raises(EnvironmentFault, match="cannot start the interpreter"):
        made.environment("cpu")


# ---- builds ------------------------------------------------------------------------------------------------


def step(code: str, **more: Any) -> BuildStep:
    return BuildStep(argv=(sys.executable, "-c", code), title="build", **more)


def test_a_build_runs_its_steps_in_the_checkout(bench: Bench) -> None:
    steps = [
        step("import os; open('made', 'w').write(os.environ['HOW'])", env={"HOW": "well"}),
        step("open('made2', 'w')"),
    ]
    assert bench.runner.build(build_key="k", steps=steps, checkout=bench.checkout) is None
    assert (bench.checkout / "made").read_text() == "well" and (bench.checkout / "made2").exists()


@pytest.mark.parametrize(
    ("code", "signature"),
    [
        ("print('/a/b/x.cu(12): error: no \\'T\\' here'); raise SystemExit(1)", "x.cu(N): error: no 'T' here"),
        ("print('src/x.cpp:3:7: fatal error: y.h: No such file'); 1/0", "x.cpp:N:N: fatal error: y.h: No such file"),
        ("import nowhere_at_all", "ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("raise SystemExit(7)", "build exited N"),
        ("import os; os.kill(os.getpid(), 11)", "SIGSEGV"),
        ("import time; time.sleep(100)", "TimedOut: build took longer than N s"),
        ("x = [bytearray(b'1') * (16 << 20) for _ in range(1000)]", "OutOfMemory: build used more than N MiB"),
    ],
)
def test_a_build_that_fails(bench: Bench, code: str, signature: str) -> None:
    seconds = 1.0 if "sleep" in code else 20.0
    failure = bench.runner.build(build_key="k", steps=[step(code, seconds=seconds)], checkout=bench.checkout)
    assert failure is not None and failure.signature == signature


def test_a_build_without_its_tools_is_the_machines_fault(bench: Bench) -> None:
    missing = BuildStep(argv=("no-such-compiler", "x"), title="compile")
    with pytest.raises(EnvironmentFault, match=r"no-such-compiler.*--build-env"):
        bench.runner.build(build_key="k", steps=[missing], checkout=bench.checkout)
    with pytest.raises(EnvironmentFault, match="CUDA_HOME"):
        text = "print('OSError: CUDA_HOME environment variable is not set.'); raise SystemExit(1)"
        bench.runner.build(build_key="k", steps=[step(text)], checkout=bench.checkout)


def test_a_build_leaves_nothing_running(bench: Bench) -> None:
    code = (
        "import subprocess; p = subprocess.Popen(['sleep', '1000'], start_new_session=True, env={});"
        "open('pid', 'w').write(str(p.pid))"
    )
    assert bench.runner.build(build_key="k", steps=[step(code)], checkout=bench.checkout) is None
    assert not running(int((bench.checkout / "pid").read_text()))


# ---- the end of the host -----------------------------------------------------------------------------------

HOST = """
import sys
sys.path[:0] = [{tests!r}, {package!r}]
from pathlib import Path
from outside.test_runner import Bench, Runner
with Runner(work=Path({folder!r}) / "w", log_root=Path({folder!r}) / "l") as runner:
    bench = Bench(runner, Path({folder!r}) / "bench")
    bench.measure(bench.cell("daemon_and_sleep"))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_outlives_the_host(tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The candidate sleeps for ever beside a daemon with a session of its own and no environment."""
    monkeypatch.setenv("PYTHONPATH", str(HOSTILE))
    tests = Path(__file__).parents[1]
    code = HOST.format(tests=str(tests), package=str(tests.parent), folder=str(tmp_path))
    pid_file = tmp_path / "bench" / "notes" / "pid"
    host = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        assert until(pid_file.exists, 40)
        daemon = int(pid_file.read_text())
        # zygote, child, daemon: once the process in between, which forked the daemon, is gone
        assert until(lambda: len([pid for pid in descendants(host.pid) if running(pid)]) == 3, 10)
        below = [pid for pid in descendants(host.pid) if running(pid)]
        assert daemon in below
        host.send_signal(number)
        host.wait(20)
    finally:
        host.kill()
        host.wait()
    assert until(lambda: not any(map(running, below))), below


def test_a_consumer_that_stops_early_leaves_nothing(bench: Bench) -> None:
    cells = [bench.cell(), bench.cell("daemon_and_sleep")]
    measuring = bench.runner.measure(
        build_key="key", checkout=bench.checkout, probe="hostile_probe", device=CPU, env={}, cells=cells
    )
    assert next(measuring).outcome is Outcome.COMPLETED
    assert until((bench.notes / "pid").exists)
    measuring.close()  # type: ignore[attr-defined]
    assert not running(int((bench.notes / "pid").read_text()))
    assert bench.measure(bench.cell())[0].outcome is Outcome.COMPLETED


def test_cost_of_a_process(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    """Printed, not judged: the machine may be busy."""
    bench.measure(bench.cell())
    began = time.monotonic()
    for _ in range(5):
        (got,) = bench.measure(bench.cell())
    with capsys.disabled():
        parts = ", ".join(f"{k} {v * 1000:.1f}" for k, v in got.timing.items())
        print(f"\n  a fresh process with one cell: {(time.monotonic() - began) * 200:.0f} ms (last: {parts} ms)")
    assert got.outcome is Outcome.COMPLETED
