"""A step of plain decoding, ours and openvino-genai's, on the same IR, in turns in one process.

    pip install -r scripts/requirements-genai.txt
    python scripts/bench_genai.py [DIR] [--cache-dir DIR]

DIR is the embedded demo pair by default. Every mode generates the same number of tokens for every held-out prompt;
medians over the prompts. openvino-genai runs at its defaults with both of its backends, and with the properties of
our profile.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ovspec
from ovspec.device import DeviceOptions, available_devices
from ovspec.profile import known_profile

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = [entry["text"] for entry in json.loads((ROOT / "models" / "prompts.json").read_text("utf-8"))["prompts"]]
TOKENS = 128


def genai_mode(folder: Path, properties: dict[str, Any]) -> Callable[[str], tuple[float, str]]:
    import openvino_genai  # type: ignore[import-not-found]

    pipeline = openvino_genai.LLMPipeline(str(folder), "CPU", **properties)
    config = openvino_genai.GenerationConfig(max_new_tokens=TOKENS, ignore_eos=True, apply_chat_template=False)

    def run(prompt: str) -> tuple[float, str]:
        result = pipeline.generate([prompt], config)
        return result.perf_metrics.get_tpot().mean, result.texts[0]

    return run


def our_mode(folder: Path, **options: Any) -> Callable[[str], tuple[float, str]]:
    lm = ovspec.load(folder, **options)

    def run(prompt: str) -> tuple[float, str]:
        result = lm.generate(prompt, max_tokens=TOKENS, ignore_eos=True)
        return result.stats.tpot_ms, result.text

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "models" / "demo")
    parser.add_argument("--cache-dir", type=Path)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    args = parser.parse_args()
    profile = known_profile(args.folder, DeviceOptions(cache_dir=args.cache_dir))
    best = profile.choose(DeviceOptions(), "auto") if profile else None
    ours = {"cache_dir": args.cache_dir}
    modes = {
        "ovspec, profile": our_mode(args.folder, **ours),
        "ovspec, no profile": our_mode(args.folder, tune=False, **ours),
        "ovspec, stateful, no profile": our_mode(args.folder, tune=False, engine="stateful", **ours),
        "openvino-genai, paged": genai_mode(args.folder, {"ATTENTION_BACKEND": "PA"}),
        "openvino-genai, SDPA": genai_mode(args.folder, {"ATTENTION_BACKEND": "SDPA"}),
    }
    if best:
        modes["openvino-genai, paged, our properties"] = genai_mode(
            args.folder, {"ATTENTION_BACKEND": "PA", **best.setting.properties}
        )
    steps: dict[str, list[float]] = {name: [] for name in modes}
    first: dict[str, str] = {}
    for prompt in (PROMPTS[0], *PROMPTS[: args.prompts]):
        for name, run in modes.items():
            milliseconds, text = run(prompt)
            steps[name].append(milliseconds)
            first.setdefault(name, text)
    print(f"{args.folder.name}, {dict(available_devices())['CPU']}; profile: {best.setting if best else 'none'}\n")
    print("| | ms a token | |\n|---|---|---|")
    usual = statistics.median(steps["openvino-genai, paged"][1:])
    for name, found in steps.items():
        median = statistics.median(found[1:])
        print(f"| {name} | {median:.3f} | {usual / median:.2f}x |")
    same = sum(text == first["ovspec, no profile"] for text in first.values())
    print(f"\n{same} of {len(first)} modes give the same first text")


if __name__ == "__main__":
    main()
