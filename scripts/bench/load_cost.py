"""Measure the time and memory to load a model and generate a first token, with a cold and a warm compile cache.

    .venv/bin/python scripts/bench/load_cost.py models/demo [DIR ...]

Each line comes from a separate process: seconds to import ovspec, then to load the model, then to generate a token;
peak resident memory, and resident memory after more tokens.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from harness import options

MEASURED = """
import json, sys, time
import psutil
began = time.perf_counter()
import ovspec
imported = time.perf_counter()
lm = ovspec.load(sys.argv[1], cache_dir=sys.argv[2])
loaded = time.perf_counter()
lm.generate([5, 6, 7, 8], max_tokens=1, ignore_eos=True)
first = time.perf_counter()
lm.generate([5, 6, 7, 8], max_tokens=33, ignore_eos=True)
memory = psutil.Process().memory_info()
try:
    import resource
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
except ImportError:
    peak = memory.peak_wset
print(json.dumps({"import_s": imported - began, "load_s": loaded - imported, "first_token_s": first - loaded,
                  "peak_mb": peak / 1e6, "rss_mb": memory.rss / 1e6}))
"""


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    for folder in parser.parse_args().folders:
        with tempfile.TemporaryDirectory() as cache:
            for name in ("cold", "warm", "warm"):
                command = [sys.executable, "-c", MEASURED, str(folder), cache]
                found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
                figures = ", ".join(f"{key} {value:.2f}" for key, value in found.items())
                print(f"{folder} ({name} cache): {figures}", flush=True)


if __name__ == "__main__":
    main()
