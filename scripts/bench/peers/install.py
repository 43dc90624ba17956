"""Install the peers, each into its own virtual environment.

    python scripts/bench/peers/install.py [NAME ...]      genai, llamacpp, optimum, xgrammar; all by default

They go into .cache/peers/NAME. llama.cpp is compiled from source, twice: as llama-cpp-python, and as llama-server for
speculation. Each takes minutes; without the server, only its rows are missing. For benchmarks with --isa AVX2 or
AVX2_VNNI, also install it with OV_CPU_MAX_ISA set to the same; it goes into .cache/peers/llamacpp-AVX2.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parent.parent.parent / ".cache" / "peers"
CAPPED_TO_AVX2 = os.environ.get("OV_CPU_MAX_ISA", "").startswith("AVX2")
PEERS = ("genai", "llamacpp", "optimum", "xgrammar")
# CPU features supported by ggml: Linux's name -> ggml's. ggml's own choice for the compiling machine (GGML_NATIVE) also
# includes AMX, and AMX has crashed on a virtual machine.
FEATURES = {
    "avx2": "AVX2",
    "fma": "FMA",
    "f16c": "F16C",
    "avx512f": "AVX512",
    "avx512_vnni": "AVX512_VNNI",
    "avx512_bf16": "AVX512_BF16",
}


def folder_of(name: str) -> Path:
    """Return the folder of a peer; benchmarks capped to AVX2 use a llama.cpp compiled for AVX2."""
    return FOLDER / (f"{name}-AVX2" if name == "llamacpp" and CAPPED_TO_AVX2 else name)


def python_of(name: str) -> Path:
    """Return the interpreter of a peer's environment."""
    return folder_of(name) / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def server_of_llamacpp() -> Path:
    return folder_of("llamacpp") / "server" / "bin" / ("llama-server.exe" if os.name == "nt" else "llama-server")


def gguf_of(checkpoint: Path) -> Path:
    """Return the checkpoint as a GGUF file in Q8_0, written if it is missing or out of date.

    Raises:
        ValueError: it can't be written.
    """
    key = hashlib.sha256(str(checkpoint.resolve()).encode()).hexdigest()[:8]
    out = FOLDER / "gguf" / f"{checkpoint.name}-{key}-q8_0.gguf"
    source = checkpoint / "model.safetensors"
    if not out.exists() or out.stat().st_mtime < source.stat().st_mtime:
        command = [python_of("llamacpp"), HERE / "gguf_writer.py", checkpoint, out]
        try:
            subprocess.run([str(part) for part in command], check=True, stdout=sys.stderr)
        except (OSError, subprocess.CalledProcessError) as error:
            raise ValueError(f"{checkpoint.name} can't be written as GGUF: {error}") from None
    return out


def cmake_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """Return ggml's flags for this processor; [] leaves the choice to ggml, if the features are unknown."""
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else []
    features = next((line.split(":")[1].split() for line in lines if line.startswith("flags")), None)
    if features is None:
        return []
    usable = {name: ggml for name, ggml in FEATURES.items() if not (name.startswith("avx512") and CAPPED_TO_AVX2)}
    return ["-DGGML_NATIVE=OFF", *(f"-DGGML_{ggml}=ON" for name, ggml in usable.items() if name in features)]


def run(*command: str | Path, **environment: str) -> None:
    print("$", *command, file=sys.stderr, flush=True)
    subprocess.run([str(part) for part in command], check=True, env={**os.environ, **environment})


def install(name: str) -> None:
    python = python_of(name)
    if not python.exists():
        venv.create(folder_of(name), with_pip=True)
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    requirements = HERE / f"requirements-{name}.txt"
    if name != "llamacpp":
        run(*pip, "install", "--quiet", "-r", requirements)
        return
    flags, jobs = cmake_flags(), str(os.cpu_count() or 1)
    built = {"CMAKE_ARGS": " ".join(flags), "CMAKE_BUILD_PARALLEL_LEVEL": jobs}
    compiled = ("--no-cache-dir", "--no-binary", "llama-cpp-python")  # pip's cache may have a build with other flags
    run(*pip, "install", "--quiet", *compiled, "-r", requirements, **built)
    try:
        build_server(pip, flags, jobs)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"llama-server could not be built, so its rows will be missing: {error}", file=sys.stderr)


def build_server(pip: list[str | Path], flags: list[str], jobs: str) -> None:
    """Build llama-server from the same source as the installed llama-cpp-python."""
    folder = folder_of("llamacpp") / "server"
    shown = subprocess.run([*map(str, pip), "show", "llama-cpp-python"], check=True, capture_output=True, text=True)
    version = next(line.split()[1] for line in shown.stdout.splitlines() if line.startswith("Version:"))
    source = folder / f"llama_cpp_python-{version}" / "vendor" / "llama.cpp"
    if not source.is_dir():
        download = ("download", "--quiet", "--no-deps", "--no-binary", "llama-cpp-python", "-d", folder)
        run(*pip, *download, f"llama-cpp-python=={version}")
        with tarfile.open(folder / f"llama_cpp_python-{version}.tar.gz") as packed:
            packed.extractall(folder, filter="data")
    run(*pip, "install", "--quiet", "cmake", "ninja")
    scripts = python_of("llamacpp").parent
    path = f"{scripts}{os.pathsep}{os.environ['PATH']}"
    # The server downloads nothing, so it needs neither curl nor TLS; nor a web page.
    without = ["-DLLAMA_CURL=OFF", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_BUILD_TESTS=OFF"]
    build = ["-S", source, "-B", folder, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF"]
    run(scripts / "cmake", *build, *without, *flags, PATH=path)
    run(scripts / "cmake", "--build", folder, "--target", "llama-server", "--parallel", jobs, PATH=path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=(*PEERS, []), metavar="NAME")
    for name in parser.parse_args().names or PEERS:
        install(name)
        print(f"{name}: {python_of(name)}")


if __name__ == "__main__":
    main()
