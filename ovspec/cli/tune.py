from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ovspec.errors import OvspecError

if TYPE_CHECKING:
    from ovspec.ir.device import DeviceOptions
    from ovspec.setup.profile import Goal, Measurement, Profile

GOALS = ("decode", "prefill", "balanced", "accuracy")  # profile.GOALS, without importing openvino


@click.command()
@click.argument("folder", required=False, type=click.Path(path_type=Path), metavar="[DIR]")
@click.option(
    "--for",
    "goal",
    type=click.Choice(GOALS),
    default="balanced",
    show_default=True,
    help="What to minimise: the time per generated token (decode), the time to read the prompt (prefill), or both "
    "(balanced); accuracy is balanced among the settings whose KL divergence from f32 is at most 1e-6 nats.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--cache-dir",
    type=click.Path(file_okay=False),
    help="Folder of compiled models and profiles; give other commands the same one.  [default: the user's cache]",
)
def tune(folder: Path | None, goal: Goal, as_json: bool, cache_dir: str | None) -> None:
    """Measure which settings are fastest for the model in DIR (by default the embedded demo pair) on this machine's
    CPU, and use them from now on.

    Tries precisions, dynamic quantisation, KV caches, threads and both engines, for the target and the draft in
    DIR. A setting is chosen only if its output is about as accurate as that of OpenVINO's default, and if exact
    arithmetic is as exact as without a profile, which is probed.

    The result is kept as a profile, which models of the same shape and weight format share. Use an idle machine.

    \b
    Examples:
      ovspec tune my-pair
      ovspec tune my-pair --for decode
    """
    from ovspec.ir.compile import MODEL_FILE, check_ir_folder
    from ovspec.ir.device import DeviceOptions
    from ovspec.loading import model_folder
    from ovspec.setup.manifest import DRAFT_FOLDER
    from ovspec.setup.profile import keep_profile
    from ovspec.setup.tuning import tune as measure

    folder = model_folder(folder)
    options = DeviceOptions(cache_dir=Path(cache_dir) if cache_dir else None)
    check_kept(options)
    found: dict[str, Any] = {}
    for name, part in (("target", folder), ("draft", folder / DRAFT_FOLDER)):
        if not (part / MODEL_FILE).is_file():
            continue
        check_ir_folder(part)
        shown: Any = click.progressbar(length=1000, label=name, file=sys.stderr, item_show_func=lambda s: str(s or ""))
        with shown as bar:

            def tell(setting: str, done: float, bar: Any = bar) -> None:
                bar.update(int(1000 * done) - bar.pos, setting)

            profile = measure(part, options, goal, tell=tell)
            tell("", 1.0)
        kept = keep_profile(part, options, profile)
        best = profile.choose(options, "auto")
        found[name] = asdict(profile) | {"chosen": best and asdict(best), "file": str(kept) if kept else None}
        if not as_json:
            click.echo("\n".join(report(name, part, profile)))
    if as_json:
        click.echo(json.dumps(found))


def check_kept(options: DeviceOptions) -> None:
    """Raise OvspecError if profiles can't be kept, before minutes of measuring are lost."""
    folder = options.cache_folder
    assert folder  # no property switches the cache off here
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        told = f"{folder}: cannot be created or written to ({error.strerror})"
        raise OvspecError(f"{told}; name another folder with --cache-dir.") from None


def report(name: str, folder: Path, profile: Profile) -> list[str]:
    """Return a table of the measurements, with the chosen setting marked."""
    from ovspec.ir.device import DeviceOptions

    best = profile.choose(DeviceOptions(), "auto")
    widths = list(profile.reference.verify_ms)

    def line(mark: str, text: str, m: Measurement) -> str:
        times = "".join(f"{m.verify_ms[width]:8.2f}" for width in widths)
        same = "" if m.invariance is None else f"{m.invariance:.0%}"
        return f"{mark} {text:62}{times}{m.prefill_ms:19.3f}{m.kl:9.1e}{m.top1:8.1%}{same:>12}{m.memory / 1e6:12.0f}"

    heads = "".join(f"{f'm={width}':>8}" for width in widths)
    lines = [
        f"{name}: {folder}, {profile.seconds:.0f} s",
        f"  {'ms per inference of m tokens':62}{heads}  prefill, ms/token       KL   top-1  invariance  memory, MB",
        line(" ", "OpenVINO's own default", profile.reference),
        *(line("*" if m is best else " ", str(m.setting), m) for m in profile.measurements),
    ]
    if best:
        token = best.token_ms / profile.reference.verify_ms[1]
        prompt = best.prefill_ms / profile.reference.prefill_ms
        shares = f"a token takes {token:.2f}x and a prompt {prompt:.2f}x the default's time"
        lines.append(f"chosen for {profile.goal}: {best.setting}; {shares}")
    for threads, found in profile.exactness.items():
        with_threads = f"{threads} thread{'s' * (threads != 1)}"
        differ = f"{found.differing} of {found.positions} probed positions differ from one pass over their text"
        lines.append(f"exact arithmetic, {with_threads}: {found.rule or 'no rule found'}; {differ}")
    if profile.price:
        lines.append(f"price of exact arithmetic: a token takes {profile.price:.2f}x the time of fast arithmetic")
    return lines
