from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ovspec.base.errors import OvspecError
from ovspec.cli.options import add_options
from ovspec.cli.path_type import FOLDER, PATH
from ovspec.params.loading import LOAD_OPTIONS

if TYPE_CHECKING:
    from ovspec.setup.profile import Goal, Profile

WORTHWHILE = 0.9  # share of the time of products from which on another weight format is worth an export
GOALS = ("decode", "prefill", "balanced", "accuracy")  # profile.GOALS, without importing openvino


@click.command()
@click.argument("folder", required=False, type=PATH, metavar="[DIR]")
@click.option(
    "--for",
    "goal",
    type=click.Choice(GOALS),
    default="balanced",
    show_default=True,
    help="What to minimise: the time per generated token (decode), the time to read the prompt (prefill), or both "
    "(balanced); accuracy is balanced among the settings whose KL divergence from f32 is at most 1e-6 nats.",
)
@add_options({"device": LOAD_OPTIONS["device"]})
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--cache-dir",
    type=FOLDER,
    help="Folder of compiled models and profiles; give other commands the same one.  [default: the user's cache]",
)
def tune(folder: Path | None, goal: Goal, device: str | None, as_json: bool, cache_dir: Path | None) -> None:
    """Measure which settings are fastest for the model in DIR (by default the embedded demo pair) on this machine's
    CPU or GPU, and use them from now on.

    Tries precisions, dynamic quantisation and both engines, for the target and the draft in DIR. A setting is chosen
    only if its output is about as accurate as that of OpenVINO's default, and if exact arithmetic is as exact as
    without a profile, which is probed on the CPU. On a GPU, a u8 KV cache is measured and not chosen.

    The result is kept as a profile, which models of the same shape and weight format share. Use an idle machine.

    \b
    Examples:
      ovspec tune my-pair
      ovspec tune my-pair --for decode
      ovspec tune my-pair --device GPU
    """
    from ovspec.base.files import write_atomically, write_cached
    from ovspec.ir.compile import MODEL_FILE
    from ovspec.ir.device import DeviceOptions, check_device
    from ovspec.ir.heads import is_head_folder
    from ovspec.setup.manifest import DRAFT_FOLDER
    from ovspec.setup.model_folders import resolve_model_folder
    from ovspec.setup.profile import find_profile_file
    from ovspec.setup.tuning import tune_model as measure

    folder = resolve_model_folder(folder)
    options = DeviceOptions(check_device(device or "CPU"), cache_dir=cache_dir)
    file = find_profile_file(folder, options)
    assert file  # no property switches the cache off here
    try:  # before minutes of measuring are lost
        file.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=file.parent).close()
    except OSError as error:
        why = f"cannot be created or written to ({error.strerror})"
        raise OvspecError(f"{file.parent}: {why}; name another folder with --cache-dir.") from None
    found: dict[str, Any] = {}
    measured: dict[Any, Profile] = {}
    for name, part in (("target", folder), ("draft", folder / DRAFT_FOLDER)):
        if not (part / MODEL_FILE).is_file() or is_head_folder(part):  # a head runs with its target's settings
            continue
        shown: Any = click.progressbar(length=1000, label=name, file=sys.stderr, item_show_func=lambda s: str(s or ""))
        with shown as bar:

            def tell(setting: str, done: float, bar: Any = bar) -> None:
                bar.update(int(1000 * done) - bar.pos, setting)

            profile = measure(part, options, goal, tell=tell)
            tell("", 1.0)
        measured[find_profile_file(part, options)] = write_cached(find_profile_file(part, options), profile)
        best = profile.choose_measurement(options, "auto")
        found[name] = asdict(profile) | {"chosen": best and asdict(best), "file": str(find_profile_file(part, options))}
        if not as_json:
            click.echo("\n".join(format_report(name, part, profile)))
    if as_json:
        click.echo(json.dumps(found))
    for place, profile in measured.items():  # where that failed, the figures have been shown
        write_atomically(place, json.dumps(asdict(profile), indent=1))


def format_report(name: str, folder: Path, profile: Profile) -> list[str]:
    """Return a table of the measurements, with the chosen setting marked."""
    from ovspec.ir.device import DeviceOptions

    best, reference = profile.choose_measurement(DeviceOptions(), "auto"), profile.reference
    heads = "".join(f"{f'm={width}':>8}" for width in reference.verify_ms)
    lines = [
        f"{name}: {folder}, {profile.seconds:.0f} s",
        f"  {'ms per inference of m tokens':55}{heads}  prefill, ms/token       KL   top-1  invariance  rule",
    ]
    for m in profile.measurements:
        label = f"{m.setting} (OpenVINO's own default)" if m == reference and profile.full else str(m.setting)
        times = "".join(f"{m.computation_ms(width):8.2f}" for width in reference.verify_ms)
        same = "" if m.invariance is None else f"{m.invariance:.0%}"
        accuracy = f"{m.kl:9.1e}{m.top1:8.1%}{same:>12}  {m.rule or ''}".rstrip()
        lines.append(f"{'*' if m is best else ' '} {label:55}{times}{m.prefill_ms:19.3f}{accuracy}")
    if best:
        token = best.token_ms / reference.verify_ms[1]
        prompt = best.prefill_ms / reference.prefill_ms
        shares = f"a token takes {token:.2f}x and a prompt {prompt:.2f}x the default's time"
        lines.append(f"chosen for {profile.goal}: {best.setting}; {shares}; KL divergence {best.kl:.1e} nats")
    for threads, found in profile.exactness.items():
        with_threads = f"{threads} thread{'s' * (threads != 1)}"
        differ = f"{found.differing} of {found.positions} probed positions differ from one pass over their text"
        lines.append(f"exact arithmetic, {with_threads}: {found.rule or 'no rule found'}; {differ}")
    if profile.price:
        lines.append(f"price of exact arithmetic: a token takes {profile.price:.2f}x the time of fast arithmetic")
    return lines + advise_weight_formats(profile.formats_ms)


def advise_weight_formats(formats_ms: dict[str, float]) -> list[str]:
    """Return what the weight formats cost here, and which one is worth an export; ``formats_ms``: the model's first."""
    from ovspec.setup.weight_formats import find_export_options

    if not formats_ms:
        return []
    own, *others = formats_ms
    shares = {name: formats_ms[name] / formats_ms[own] for name in others}
    lines = [f"its weights are {own}; matrix products take with weights in other formats:"]
    lines += [f"  {name}: {share:.2f}x the time" for name, share in shares.items()]
    fastest = {name.split(",")[0]: name for name in sorted(others, key=lambda name: -shares[name])}
    worthwhile = [name for name in fastest.values() if shares[name] <= WORTHWHILE]
    lines += [f"an export with {find_export_options(name)} should generate faster here" for name in worthwhile]
    return lines + ["  (--evaluate tells what each loses)"] * bool(worthwhile)
