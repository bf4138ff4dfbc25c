"""The doctor: real programs and modules that work, fail, crash or hang, and the line that each gets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dsabisect.errors import GoldenError
from dsabisect.outside import compilers, doctor, findings, kernels
from dsabisect.outside.findings import FAULT, OK, WARNING, Line


@pytest.fixture
def env() -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "OMP_NUM_THREADS": "1"}


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def by_name(lines: list[Line]) -> dict[str, Line]:
    assert len({line.name for line in lines}) == len(lines)
    return {line.name: line for line in lines}


# ---- the whole ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def looked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a whole look gives in a process of its own, and what that process had imported at the end."""
    cache = tmp_path_factory.mktemp("doctor") / "cache"
    code = (
        "import json, sys\n"
        "from pathlib import Path\n"
        "from dsabisect.outside import doctor\n"
        f"lines = doctor.diagnose(golden_check=lambda: '110 cases', cache=Path({str(cache)!r}))\n"
        "print(json.dumps({'lines': [doctor.as_json(line) for line in lines], 'modules': sorted(sys.modules)}))\n"
    )
    ran = findings.child([sys.executable, "-c", code], {**os.environ, "PYTHONPATH": str(kernels.PACKAGE_ROOT)}, 200.0)
    assert ran.code == 0, ran.output
    told: dict[str, Any] = json.loads(ran.output.splitlines()[-1])
    return told


def test_a_machine_without_a_gpu_is_fit_for_the_cpu_paths(looked: dict[str, Any]) -> None:
    lines = [Line(**line) for line in looked["lines"]]
    told = by_name(lines)
    for name in ("Python", "torch", "numpy", "safetensors", "git", "cache folder", "golden set"):
        assert told[name].status == OK, told[name]
    assert told["golden set"].found == "110 cases"
    if told["CUDA device"].status != OK:
        assert told["CUDA device"].status == WARNING
        assert "GPU paths will not run" in told["CUDA device"].remedy
        assert doctor.exit_code(lines) == 0


def test_looking_makes_no_cuda_context_and_imports_nothing_foreign_here(looked: dict[str, Any]) -> None:
    assert {"torch", "triton", "deep_gemm"}.isdisjoint(looked["modules"])
    assert "dsabisect.outside.doctor" in looked["modules"]


def test_one_fault_makes_the_exit_code_one_and_warnings_do_not() -> None:
    fine, odd, broken = (Line(name=s, status=s, found="") for s in (OK, WARNING, FAULT))
    assert doctor.exit_code([fine, odd]) == 0
    assert doctor.exit_code([fine, broken]) == 1


def test_render_shows_the_remedy_below() -> None:
    assert doctor.render(Line(name="git", status=OK, found="2.39")) == "ok        git: 2.39"
    shown = doctor.render(Line(name="git", status=FAULT, found="not found", remedy="Install git")).splitlines()
    assert shown == ["fault     git: not found", "          → Install git"]
    assert doctor.as_json(Line(name="a", status=OK, found="b")) == {
        "name": "a", "status": "ok", "found": "b", "remedy": "",
    }  # fmt: skip


# ---- libraries ---------------------------------------------------------------------------------------------


def libraries(tmp_path: Path, env: dict[str, str], **modules: str) -> dict[str, Line]:
    for name, text in modules.items():
        (tmp_path / f"{name}.py").write_text(text)
    return by_name(doctor._libraries(sys.executable, {**env, "PYTHONPATH": str(tmp_path)})[1])


def test_a_torch_that_crashes_at_import_is_a_fault_and_not_our_end(tmp_path: Path, env: dict[str, str]) -> None:
    told = libraries(tmp_path, env, torch="import ctypes; ctypes.string_at(0)\n")
    assert told["torch"].status == FAULT
    assert "SIGSEGV" in told["torch"].found


def test_a_missing_library_is_a_fault_that_names_it_and_triton_only_a_warning(
    tmp_path: Path, env: dict[str, str]
) -> None:
    told = libraries(tmp_path, env, safetensors="raise ImportError('not here')\n", triton="raise ImportError('no')\n")
    assert (told["safetensors"].status, told["triton"].status) == (FAULT, WARNING)
    assert "not here" in told["safetensors"].found
    assert told["safetensors"].remedy == "pip install safetensors"
    assert told["torch"].status == OK


def test_what_a_library_prints_is_not_taken_for_the_report(tmp_path: Path, env: dict[str, str]) -> None:
    told = libraries(tmp_path, env, triton="print('{}'); __version__ = '9'\n")
    assert told["triton"].found == "9"


# ---- programs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "status", "word"),
    [
        ("echo git version 2.45.1.windows.1", OK, "2.45.1"),
        ("echo git version 2.20.0", FAULT, "too old"),
        ("exit 3", FAULT, "exit code 3"),
        (None, FAULT, "not found"),
    ],
)
def test_git(tmp_path: Path, env: dict[str, str], text: str | None, status: str, word: str) -> None:
    if text:
        program(tmp_path / "bin/git", text)
    line = doctor._git({**env, "PATH": str(tmp_path / "bin")})
    assert line.status == status
    assert word in line.found


NVCC = """case "$1" in --version) echo 'Cuda compilation tools, release 13.0, V13.0.88'; exit;; esac
echo "$*" >> "$0.words"
for last; do :; done
printf '#!/bin/sh\\n%s\\n' '{ran}' > "$last"; chmod +x "$last" """


@pytest.mark.parametrize(
    ("ran", "status", "word"),
    [
        ("exit 0", OK, "what it compiles runs"),
        ("kill -SEGV $$", FAULT, "running the kernel that was compiled: died of SIGSEGV"),
        ("echo driver too old; exit 1", FAULT, "driver too old"),
    ],
)
def test_what_nvcc_compiles_is_run_where_there_is_a_gpu(
    tmp_path: Path, env: dict[str, str], ran: str, status: str, word: str
) -> None:
    nvcc = program(tmp_path / "cuda/bin/nvcc", NVCC.replace("{ran}", ran))
    line = compilers.nvcc_line({**env, "CUDA_HOME": str(tmp_path / "cuda"), "CXX": "/usr/bin/g++"}, True, "sm90")
    assert (line.status, word in line.found) == (status, True), line
    assert Path(f"{nvcc}.words").read_text().startswith("-ccbin /usr/bin/g++ -arch=sm_90 ")


def test_nvcc_of_cuda_home_comes_first_and_its_absence_is_a_warning(tmp_path: Path, env: dict[str, str]) -> None:
    program(tmp_path / "cuda/bin/nvcc", "echo 'Cuda compilation tools, release 13.0, V13.0.88'")
    line = compilers.nvcc_line({**env, "CUDA_HOME": str(tmp_path / "cuda")}, False)
    assert (line.status, line.found) == (OK, f"13.0 ({tmp_path / 'cuda/bin/nvcc'}); not tried: no GPU")
    assert compilers.nvcc_line({"PATH": str(tmp_path)}, True).status == WARNING
    program(tmp_path / "cuda/bin/nvcc", "echo broken; exit 1")
    assert compilers.nvcc_line({**env, "CUDA_HOME": str(tmp_path / "cuda")}, True).status == FAULT


def test_a_compiler_whose_programs_and_libraries_run_is_fine(env: dict[str, str]) -> None:
    line = compilers.compiler_line(sys.executable, {**env, "CC": "gcc", "CXX": "g++"}, gpu=True)
    assert line.status == OK, line
    assert "runs" in line.found


# Whole words only: the scratch folder's random name may hold "-c".
CRASHES = """for last; do :; done
case " $* " in *" -shared "*|*" -c "*) exec g++ "$@";; esac
printf '#!/bin/sh\\nkill -SEGV $$\\n' > "$last"; chmod +x "$last" """
BREAKS_LIBRARIES = """case "$*" in
*DSABISECT_LIBRARY*) echo 'extern "C" int dsabisect_doctor() { *(volatile int*)0 = 1; return 42; }' > "$0.cpp"
    for last; do :; done; exec g++ -fPIC -c "$0.cpp" -o "$last";;
*) exec g++ "$@";;
esac"""


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("echo 'a.cpp:3:1: fatal error: regex: No such file'; exit 1", "compiling a program: exit code 1: a.cpp:3:1"),
        (CRASHES, "running the program that was compiled: died of SIGSEGV"),
        (BREAKS_LIBRARIES, "calling the library beside torch: died of SIGSEGV"),
    ],
    ids=["refuses", "programs crash", "libraries crash"],
)
def test_a_compiler_that_links_what_crashes_is_a_fault(
    tmp_path: Path, env: dict[str, str], text: str, word: str
) -> None:
    wrapped = program(tmp_path / "wrapped", text)
    line = compilers.compiler_line(sys.executable, {**env, "CC": str(wrapped), "CXX": str(wrapped)}, gpu=False)
    assert line.status == FAULT
    assert word in line.found
    assert "--build-env CC=/usr/bin/gcc --build-env CXX=/usr/bin/g++" in line.remedy


def test_no_compiler_is_a_fault_only_where_something_is_to_be_built(tmp_path: Path) -> None:
    assert compilers.compiler_line(sys.executable, {"PATH": str(tmp_path)}, gpu=False).status == WARNING
    assert compilers.compiler_line(sys.executable, {"PATH": str(tmp_path)}, gpu=True).status == FAULT
    assert compilers.compiler_line(sys.executable, {"PATH": str(tmp_path), "CXX": "/no/g++"}, gpu=False).status == FAULT


# ---- triton ------------------------------------------------------------------------------------------------

FAKE_TRITON = """
class jit:
    def __init__(self, kernel): pass
    def __getitem__(self, grid): return lambda *a, **k: {ran}
"""


@pytest.mark.parametrize(
    ("ran", "status", "word"),
    [
        ("a[2].copy_(a[0] + a[1])", OK, "right, compiled for cpu"),
        ("None", FAULT, "gives wrong numbers"),
        ("__import__('os').abort()", FAULT, "died of SIGABRT"),
    ],
)
def test_a_triton_kernel_is_run(tmp_path: Path, env: dict[str, str], ran: str, status: str, word: str) -> None:
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton/__init__.py").write_text(FAKE_TRITON.replace("{ran}", ran))
    (tmp_path / "triton/language.py").write_text("constexpr = None\n")
    line = kernels.triton_line(sys.executable, {**env, "PYTHONPATH": str(tmp_path)}, "cpu")
    assert (line.status, word in line.found) == (status, True), line


# ---- deep_gemm ---------------------------------------------------------------------------------------------

RIGHT = "from dsabisect.candidate.emulated_deep_gemm import *\n"
TWICE = (
    RIGHT + "from dsabisect.candidate import emulated_deep_gemm as _e\n"
    "def fp8_mqa_logits(*a, **k):\n    return 2 * _e.fp8_mqa_logits(*a, **k)\n"
)
ABSURD = (
    RIGHT + "def get_paged_mqa_logits_metadata(*a):\n"
    "    raise RuntimeError('Assertion error (csrc/utils/layout.hpp:9): t.is_cuda()')\n"
)
UNDEFINED = "raise ImportError('/site/deep_gemm/_C.abi3.so: undefined symbol: _ZN3c104impl3cow11materialize')\n"
CHAINED = (
    "try:\n    raise OSError('_C.so: undefined symbol: _ZN3c10')\n"
    "except OSError as error:\n    raise OSError('Could not load this library') from error\n"
)
NEEDS_MORE = "import tvm_ffi_that_is_not_there\n"


def deep_gemm_line(tmp_path: Path, env: dict[str, str], text: str, device: str) -> Line:
    (tmp_path / "deep_gemm").mkdir()
    (tmp_path / "deep_gemm/__init__.py").write_text(text)
    return kernels.deep_gemm_line(sys.executable, {**env, "PYTHONPATH": str(tmp_path)}, device)


def test_a_deep_gemm_that_is_right_on_known_numbers_is_fine(tmp_path: Path, env: dict[str, str]) -> None:
    line = deep_gemm_line(tmp_path, env, RIGHT, "cpu")
    assert line.status == OK, line
    assert "on known numbers" in line.found
    assert str(tmp_path / "deep_gemm") in line.found


@pytest.mark.parametrize(
    "text", [TWICE, ABSURD, UNDEFINED, CHAINED], ids=["wrong numbers", "absurd assertion", "symbol", "chained"]
)
def test_a_wheel_for_another_torch_is_a_fault_with_what_to_install(
    tmp_path: Path, env: dict[str, str], text: str
) -> None:
    line = deep_gemm_line(tmp_path, env, text, "cpu")
    assert line.status == FAULT
    assert line.found.startswith("built for another torch: ")
    assert "built for another torch" in line.remedy
    assert "pip install sgl-deep-gemm==" in line.remedy


def test_a_module_that_it_needs_is_named(tmp_path: Path, env: dict[str, str]) -> None:
    line = deep_gemm_line(tmp_path, env, NEEDS_MORE, "cpu")
    assert line.remedy == "pip install tvm_ffi_that_is_not_there"


def test_without_a_device_nothing_about_deep_gemm_is_a_fault(tmp_path: Path, env: dict[str, str]) -> None:
    line = deep_gemm_line(tmp_path, env, UNDEFINED, "")
    assert line.status == WARNING
    assert line.remedy.endswith("Not needed without a GPU")
    assert kernels.deep_gemm_line(sys.executable, env, "").found == "not installed"


def test_a_deep_gemm_that_dies_at_import_is_a_line_not_our_end(tmp_path: Path, env: dict[str, str]) -> None:
    line = deep_gemm_line(tmp_path, env, "import os; os.abort()\n", "cpu")
    assert line.status == FAULT
    assert "died of SIGABRT" in line.found


def test_one_that_hangs_is_ended_with_all_its_children(
    tmp_path: Path, env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(findings, "IMPORT_SECONDS", 3.0)
    beat = tmp_path / "beat"
    hangs = f"import os, time\nos.fork()\nwhile True:\n    open({str(beat)!r}, 'w').close(); time.sleep(0.05)\n"
    line = deep_gemm_line(tmp_path, env, hangs, "")
    assert "did not end within 3 s" in line.found
    assert beat.exists()
    time.sleep(0.2)
    beat.unlink()
    time.sleep(0.5)
    assert not beat.exists()  # neither process is left to make it again


# ---- folders and goldens -----------------------------------------------------------------------------------


def test_a_cache_that_cannot_be_written_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    line = doctor._cache(tmp_path / "file" / "cache")
    assert line.status == FAULT
    assert "DSABISECT_CACHE" in line.remedy


def test_the_usual_cache_that_cannot_be_made_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("DSABISECT_CACHE", str(tmp_path / "file" / "cache"))
    (line,) = doctor._folders(None)
    assert (line.name, line.status) == ("cache folder", FAULT)
    assert "DSABISECT_CACHE" in line.remedy


@pytest.mark.parametrize(("most", "status"), [(0, OK), (1 << 62, FAULT)])
def test_disk_space_is_judged_where_the_cache_will_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, status: str
) -> None:
    monkeypatch.setattr(doctor, "DISK_FAULT", most)
    monkeypatch.setattr(doctor, "DISK_WARNING", most)
    line = doctor._disk(tmp_path / "not" / "yet")
    assert line.status == status
    assert f"free at {tmp_path}" in line.found


def test_a_golden_error_is_a_fault_with_its_own_remedy() -> None:
    def missing() -> str:
        raise GoldenError("no golden set", where="/x", remedy="Give --golden DIR")

    assert doctor._golden(missing) == Line(
        name="golden set", status=FAULT, found="no golden set (/x)", remedy="Give --golden DIR"
    )


def test_a_folder_that_programs_cannot_be_run_from_is_a_fault(tmp_path: Path) -> None:
    place = tmp_path / "noexec"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "noexec", "none", str(place)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"a noexec folder cannot be made here: {mounted.stderr.decode().strip()}")
    try:
        line = doctor._cache(place / "cache")
    finally:
        subprocess.run(["umount", str(place)], check=True)
    assert line.status == FAULT
    assert "a program there cannot be started (Permission denied)" in line.found
    assert "noexec" in line.remedy
    assert doctor._cache(place / "cache").status == OK


def test_jit_caches_of_the_person_are_named_and_left_alone() -> None:
    assert "DG_JIT_CACHE_DIR" not in doctor._jit_caches({}).found
    assert "yours (DG_JIT_CACHE_DIR) are not used" in doctor._jit_caches({"DG_JIT_CACHE_DIR": "/x"}).found
