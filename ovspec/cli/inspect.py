import json
from pathlib import Path

import click

from ovspec.base.errors import OvspecError
from ovspec.base.files import write_atomically
from ovspec.base.progress import show_step
from ovspec.cli.options import add_options, target_options
from ovspec.cli.path_type import FILE_TYPE, PATH_TYPE
from ovspec.params.loading import LOAD_OPTIONS, make_load_params
from ovspec.params.option import OptionValue


@click.command()
@click.argument("folder", required=False, type=PATH_TYPE, metavar="[DIR]")
@add_options({"verify": LOAD_OPTIONS["verify"]})
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--report",
    type=FILE_TYPE,
    metavar="FILE",
    help="Also write a report for ovspec's developers: devices, probes, timings, and a text generated with and "
    "without a draft. The report contains no names of files or users.",
)
@target_options
def inspect(
    folder: Path | None, verify: bool | None, as_json: bool, report: Path | None, **runtime: OptionValue
) -> None:
    """Describe the model in DIR (by default the embedded demo pair): weights, context, engine, rollback, memory.

    The draft in DIR, if any, is described too. Rollback is the way to remove rejected tokens from the KV cache.

    \b
    Examples:
      ovspec inspect my-pair
      ovspec inspect my-pair --verify --json
      ovspec inspect my-pair --device GPU --report report.json
    """
    from ovspec.api.loading import make_device_options
    from ovspec.setup import inspection
    from ovspec.setup.model_folders import resolve_model_folder

    folder = resolve_model_folder(folder)
    load_params = make_load_params(runtime)  # type: ignore[arg-type]
    if verify and not (folder / "ovspec.json").is_file():
        raise OvspecError(
            f"{folder} has no manifest, so --verify can't check it; export the model with 'ovspec export'."
        )
    if report and not report.absolute().parent.is_dir():  # checked before minutes of work
        raise OvspecError(f"--report {report}: there is no folder {report.parent}; create the folder first.")
    device_options = make_device_options(load_params)
    uses_profile = load_params.tune is not False
    with show_step(f"{folder}: compiling and probing"):
        descriptions = inspection.inspect_models(
            folder, device_options, load_params.engine, load_params.arithmetic, uses_profile, bool(verify)
        )
    if report:
        from ovspec.api.device_report import make_device_report

        with show_step(f"{report}: measuring"):
            report_json = make_device_report(folder, descriptions, runtime)  # type: ignore[arg-type]
        write_atomically(report, json.dumps(report_json, ensure_ascii=False, indent=1))
    if as_json:
        click.echo(json.dumps(descriptions, ensure_ascii=False))
        return
    click.echo(
        "\n".join(line for name, model in descriptions.items() for line in inspection.format_inspection(name, model))
    )
    if verify:
        click.echo("All files match the checksums from their export.")
