"""Compilers, tried for real: what they make is run, because a program that links may still crash when it is called."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from dsabisect.outside import findings
from dsabisect.outside.findings import FAULT, OK, WARNING, Line, child

COMPILERS = "--build-env CC=/usr/bin/gcc --build-env CXX=/usr/bin/g++"


KERNEL = r"""
#include <cstdio>
__global__ void twice(int* x) { x[threadIdx.x] *= 2; }
int main() {
    int host[32], *x = nullptr, wrong = 0;
    for (int i = 0; i < 32; ++i) host[i] = i;
    cudaMalloc(&x, sizeof host);
    cudaMemcpy(x, host, sizeof host, cudaMemcpyHostToDevice);
    twice<<<1, 32>>>(x);
    cudaMemcpy(host, x, sizeof host, cudaMemcpyDeviceToHost);
    for (int i = 0; i < 32; ++i) wrong += host[i] != 2 * i;
    if (wrong) std::puts(cudaGetErrorString(cudaGetLastError()));
    return wrong ? 1 : 0;
}
"""


def nvcc_line(env: Mapping[str, str], gpu: bool, arch: str = "") -> Line:
    """Find nvcc as torch does; with a GPU, compile a kernel for ``arch`` ("sm90") and run it."""
    home = env.get("CUDA_HOME") or env.get("CUDA_PATH")
    program = shutil.which("nvcc", path=os.path.join(home, "bin")) if home else None
    program = program or shutil.which("nvcc", path=env.get("PATH"))
    remedy = "Install the CUDA toolkit and set CUDA_HOME: kernels are compiled when they are first called"
    if program is None:
        remedy = remedy if gpu else "Needed on a GPU only"
        return Line(name="nvcc", status=WARNING, found="not found in CUDA_HOME or on PATH", remedy=remedy)
    ran = child([program, "--version"], env, 30.0)
    release = re.search(r"release (\d+\.\d+)", ran.output)
    if ran.code != 0 or release is None:
        return Line(name="nvcc", status=FAULT if gpu else WARNING, found=f"{program} {ran.ending}", remedy=remedy)
    if not gpu:
        return Line(name="nvcc", status=OK, found=f"{release[1]} ({program}); not tried: no GPU")
    wrong = _try_nvcc(program, env, arch)
    if wrong:
        remedy = f"Its host compiler must work, and the driver must be new enough for CUDA {release[1]}: {COMPILERS}"
        return Line(name="nvcc", status=FAULT, found=f"{release[1]} ({program}): {wrong}", remedy=remedy)
    return Line(name="nvcc", status=OK, found=f"{release[1]} ({program}); what it compiles runs")


def _try_nvcc(program: str, env: Mapping[str, str], arch: str) -> str:
    with tempfile.TemporaryDirectory(prefix="dsabisect-doctor-") as scratch:
        source, made = Path(scratch) / "a.cu", Path(scratch) / "a.out"
        source.write_text(KERNEL)
        host = ["-ccbin", env["CXX"].split()[0]] if env.get("CXX") else []
        real = [f"-arch={arch.replace('sm', 'sm_')}"] if arch else []
        for what, argv in (
            ("compiling a kernel", [program, *host, *real, str(source), "-o", str(made)]),
            ("running the kernel that was compiled", [str(made)]),
        ):
            ran = child(argv, env, findings.COMPILE_SECONDS)
            if ran.code != 0:
                return f"{what}: {ran.ending}"
    return ""


SOURCE = r"""
#include <filesystem>
#include <regex>
#include <sstream>
#include <stdexcept>
#include <string>
// Exceptions, streams, regular expressions and locale: what breaks when a wrapped compiler links another libstdc++.
extern "C" int dsabisect_doctor() {
    std::string folder = std::filesystem::temp_directory_path().string();
    std::smatch found;
    std::string text = "release 13.0";
    if (folder.empty() || !std::regex_search(text, found, std::regex(R"((\d+)\.(\d+))"))) return 1;
    try {
        std::stringstream stream;
        stream << found[1].str() << found[2].str();
        throw std::runtime_error(stream.str());
    } catch (const std::exception& error) {
        return std::string(error.what()) == "130" ? 42 : 2;
    }
}
#ifndef DSABISECT_LIBRARY
int main() { return dsabisect_doctor() == 42 ? 0 : 1; }
#endif
"""
LOAD = "import ctypes, sys, torch; sys.exit(ctypes.CDLL(sys.argv[1]).dsabisect_doctor() != 42)"


def compiler_line(interpreter: str, env: Mapping[str, str], *, gpu: bool) -> Line:
    """Compile and run a program, then load a library beside torch: what links may still crash.

    The library is made as setuptools makes an extension: CC compiles, CXX links.
    """
    name = "host compiler"
    given = env.get("CXX") or "c++"
    program = shutil.which(given.split()[0], path=env.get("PATH"))
    if program is None:
        fault = gpu or bool(env.get("CXX"))
        remedy = f"Install g++, or name one: {COMPILERS}" if fault else "Needed only for commits that are built"
        return Line(name=name, status=FAULT if fault else WARNING, found=f"{given} not found", remedy=remedy)
    with tempfile.TemporaryDirectory(prefix="dsabisect-doctor-") as scratch:
        cxx = [program, *given.split()[1:]]
        cc = env["CC"].split() if env.get("CC") else cxx
        wrong = _try_compilers(cc, cxx, interpreter, env, Path(scratch))
    if wrong:
        remedy = f"Use a compiler that makes working programs: {COMPILERS}"
        return Line(name=name, status=FAULT, found=f"{program}: {wrong}", remedy=remedy)
    ran = child([program, "--version"], env, 30.0)
    version = next(iter(ran.output.splitlines()), "")
    return Line(name=name, status=OK, found=f"{version or program}; what it compiles runs")


def _try_compilers(
    cc: Sequence[str], cxx: Sequence[str], interpreter: str, env: Mapping[str, str], scratch: Path
) -> str:
    """ "" when program and library both work, else what went wrong in one line."""
    source, object_file, program, library = (str(scratch / name) for name in ("a.cpp", "a.o", "a.out", "a.so"))
    Path(source).write_text(SOURCE)
    flags = ("-std=c++17", "-O1", "-fPIC")
    for what, seconds, argv in (
        ("compiling a program", findings.COMPILE_SECONDS, [*cxx, *flags, source, "-o", program]),
        ("running the program that was compiled", findings.COMPILE_SECONDS, [program]),
        (
            "compiling a library",
            findings.COMPILE_SECONDS,
            [*cc, *flags, "-DDSABISECT_LIBRARY", "-c", source, "-o", object_file],
        ),
        ("linking a library", findings.COMPILE_SECONDS, [*cxx, "-shared", object_file, "-o", library]),
        ("calling the library beside torch", findings.IMPORT_SECONDS, [interpreter, "-c", LOAD, library]),
    ):
        ran = child(argv, env, seconds)
        if ran.code != 0:
            return f"{what}: {ran.ending}"
    return ""
