from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ovspec.base.errors import OvspecError
from ovspec.base.json_types import JsonObject
from ovspec.cli.options import add_options
from ovspec.cli.path_type import FOLDER_TYPE, PATH_TYPE
from ovspec.params.loading import LOAD_OPTIONS

if TYPE_CHECKING:
    from ovspec.setup.profile import Goal, Profile

WORTHWHILE_SHARE = 0.9  # another weight format is worth an export up to this share of the products' time
GOALS = ("decode", "prefill", "balanced", "accuracy")  # profile.GOALS, without importing openvino


@click.command()
@click.argument("folder", required=False, type=PATH_TYPE, metavar="[DIR]")
@click.option(
    "--for",
    "goal",
    type=click.Choice(GOALS),
    default="balanced",
    show_default=True,
    help="Minimise the time per generated token (decode), the prefill time (prefill), or both (balanced); accuracy: "
    "like balanced, but only with settings within a KL divergence of 1e-6 nats from f32.",
)
@add_options({"device": LOAD_OPTIONS["device"]})
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--cache-dir",
    type=FOLDER_TYPE,
    help="Folder for compiled models and profiles; give it to other commands too.  [default: the user's cache]",
)
def tune(folder: Path | None, goal: Goal, device: str | None, as_json: bool, cache_dir: Path | None) -> None:
    """Find the fastest settings for the model in DIR (by default the embedded demo pair), and use them from now on, on
    this machine's CPU or GPU.

    Times precisions, dynamic quantisation and both engines, for the model in DIR and its draft. A setting is eligible
    only if it is about as accurate as OpenVINO's default, and if arithmetic stays as exact as without the setting
    (probed on the CPU). On a GPU, a u8 KV cache is timed but never chosen.

    The result is saved as a profile, and used for all models of the same shape and weight format on this machine. Use
    an idle machine.

    \b
    Examples:
      ovspec tune my-pair
      ovspec tune my-pair --for decode
      ovspec tune my-pair --device GPU
    """
    from ovspec.base.files import write_atomically, write_cached
    from ovspec.ir.compile import MODEL_FILE
    from ovspec.ir.device import DeviceOptions, parse_device_option
    from ovspec.ir.heads import is_head_folder
    from ovspec.setup.manifest import DRAFT_FOLDER
    from ovspec.setup.model_folders import resolve_model_folder
    from ovspec.setup.profile import find_profile_file
    from ovspec.setup.tuning import tune_model

    folder = resolve_model_folder(folder)
    device_options = DeviceOptions(parse_device_option(device or "CPU"), cache_dir=cache_dir)
    profile_file = find_profile_file(folder, device_options)
    assert profile_file
    try:  # checked before minutes of measuring
        profile_file.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=profile_file.parent).close()
    except OSError as error:
        reason = f"cannot be created or written to ({error.strerror})"
        raise OvspecError(f"{profile_file.parent}: {reason}; choose another folder with --cache-dir.") from None
    profiles_json: JsonObject = {}
    profiles: dict[Path, Profile] = {}
    for model_role, model_folder in (("target", folder), ("draft", folder / DRAFT_FOLDER)):
        # A head runs with its target's settings.
        if not (model_folder / MODEL_FILE).is_file() or is_head_folder(model_folder):
            continue
        with show_tuning_progress(model_role) as show_progress:
            profile = tune_model(model_folder, device_options, goal, report_progress=show_progress)
            show_progress("", 1.0)
        model_profile_file = find_profile_file(model_folder, device_options)
        assert model_profile_file  # no property switches the cache off here
        profiles[model_profile_file] = write_cached(model_profile_file, profile)
        best_measurement = profile.choose_measurement(device_options, "auto")
        profiles_json[model_role] = asdict(profile) | {
            "chosen": best_measurement and asdict(best_measurement),
            "file": str(model_profile_file),
        }
        if not as_json:
            click.echo("\n".join(format_tuning_report(model_role, model_folder, profile)))
    if as_json:
        click.echo(json.dumps(profiles_json))
    for model_profile_file, profile in profiles.items():  # if this fails, the figures have already been shown
        write_atomically(model_profile_file, json.dumps(asdict(profile), indent=1))


@contextlib.contextmanager
def show_tuning_progress(label: str) -> Iterator[Callable[[str, float], None]]:
    """Show a progress bar on stderr; yield its update function, of the current setting and the finished share."""

    def show_setting(setting: str | None) -> str:
        return setting or ""

    with click.progressbar(None, 1000, label, item_show_func=show_setting, file=sys.stderr) as progress_bar:
        yield lambda setting, share: progress_bar.update(int(1000 * share) - progress_bar.pos, setting)


def format_tuning_report(model_role: str, folder: Path, profile: Profile) -> list[str]:
    """Return a table of the measurements, with the chosen setting marked."""
    from ovspec.ir.device import DeviceOptions

    best_measurement = profile.choose_measurement(DeviceOptions(), "auto")
    reference_measurement = profile.reference
    width_columns = "".join(f"{f'm={width}':>8}" for width in reference_measurement.verify_ms)
    report_lines = [
        f"{model_role}: {folder}, {profile.seconds:.0f} s",
        f"  {'ms per inference of m tokens':55}{width_columns}  prefill, ms/token       KL   top-1  invariance  rule",
    ]
    for measurement in profile.measurements:
        setting_label = str(measurement.setting)
        if measurement == reference_measurement and profile.full:
            setting_label += " (OpenVINO's own default)"
        time_cells = "".join(f"{measurement.computation_ms(width):8.2f}" for width in reference_measurement.verify_ms)
        invariance_cell = "" if measurement.invariance is None else f"{measurement.invariance:.0%}"
        accuracy_cells = (
            f"{measurement.kl:9.1e}{measurement.top1:8.1%}{invariance_cell:>12}  {measurement.rule or ''}".rstrip()
        )
        chosen_mark = "*" if measurement is best_measurement else " "
        report_lines.append(
            f"{chosen_mark} {setting_label:55}{time_cells}{measurement.prefill_ms:19.3f}{accuracy_cells}"
        )
    if best_measurement:
        token_share = best_measurement.token_ms / reference_measurement.verify_ms[1]
        prompt_share = best_measurement.prefill_ms / reference_measurement.prefill_ms
        share_text = f"a token takes {token_share:.2f}x and a prompt {prompt_share:.2f}x the default's time"
        report_lines.append(
            f"chosen for {profile.goal}: {best_measurement.setting}; {share_text}; "
            f"KL divergence {best_measurement.kl:.1e} nats"
        )
    for threads, exactness in profile.exactness.items():
        threads_text = f"{threads} thread{'s' * (threads != 1)}"
        differing_text = f"{exactness.differing} of {exactness.positions} probed positions differ"
        rule_text = exactness.rule or "no rule found"
        report_lines.append(
            f"exact arithmetic, {threads_text}: {rule_text}; {differing_text} from one pass over their text"
        )
    if profile.price:
        report_lines.append(
            f"price of exact arithmetic: a token takes {profile.price:.2f}x the time of fast arithmetic"
        )
    return report_lines + advise_weight_formats(profile.formats_ms)


def advise_weight_formats(formats_ms: dict[str, float]) -> list[str]:
    """Return the times of weight formats and advice on exports; ``formats_ms``: the model's own format first."""
    from ovspec.setup.weight_formats import find_export_options

    if not formats_ms:
        return []
    own_format, *other_formats = formats_ms
    time_shares = {weight_format: formats_ms[weight_format] / formats_ms[own_format] for weight_format in other_formats}
    advice_lines = [f"weight format: {own_format}; relative time of matrix products in other formats:"]
    advice_lines += [
        f"  {weight_format}: {time_share:.2f}x the time" for weight_format, time_share in time_shares.items()
    ]
    fastest_formats = {
        weight_format.split(",")[0]: weight_format
        for weight_format in sorted(other_formats, key=lambda weight_format: -time_shares[weight_format])
    }
    worthwhile_formats = [
        weight_format for weight_format in fastest_formats.values() if time_shares[weight_format] <= WORTHWHILE_SHARE
    ]
    advice_lines += [
        f"an export with {find_export_options(weight_format)} should generate faster here"
        for weight_format in worthwhile_formats
    ]
    return advice_lines + ["  (measure the loss of accuracy with --evaluate)"] * bool(worthwhile_formats)
