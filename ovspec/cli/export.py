from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ovspec.base.interrupts import exit_on_sigterm
from ovspec.cli.options import add_options, raise_usage_error_if
from ovspec.cli.path_type import PATH_TYPE
from ovspec.params.loading import LOAD_OPTIONS
from ovspec.params.option import OptionValue

WEIGHT_FORMATS = ("fp32", "fp16", "bf16", "int8", "int4", "keep")
BACKUP_PRECISIONS = ("none", "int8_sym", "int8_asym")


@click.command()
@click.argument("target", nargs=-1, metavar="TARGET")
@click.option(
    "--draft",
    metavar="DRAFT",
    help="Draft model, EAGLE-3 head or MTP layer: a checkpoint or IR folder, a GGUF file, or a hub id; mtp (the MTP "
    "layer in TARGET); or none.  [default: mtp if TARGET has an MTP layer]",
)
@click.option(
    "--draft-layers", type=click.IntRange(1), metavar="N", help="Make a draft model from the first N layers of TARGET."
)
@click.option("-o", "--output", type=PATH_TYPE, help="Output folder.")
@click.option("--overwrite", is_flag=True, help="Replace the output folder if it contains an export.")
@click.option("--list", "list_pairs", is_flag=True, help="List the known pairs, and exit.")
@click.option("--list-families", is_flag=True, help="List the supported model families, and exit.")
@click.option(
    "--prepare",
    is_flag=True,
    help="Download the packages needed to export the model families named as TARGET ('all' for every family), and "
    "exit.",
)
@click.option(
    "--weight-format",
    type=click.Choice(WEIGHT_FORMATS),
    help="Weight format of the model; int8 and int4 quantise it, keep leaves quantised weights as they are.  "
    "[default: keep if TARGET is quantised, else int8]",
)
@click.option(
    "--draft-weight-format",
    type=click.Choice(WEIGHT_FORMATS),
    help="Weight format of the draft.  [default: the model's]",
)
@click.option(
    "--group-size",
    type=int,
    help="int4: number of weights per scale; -1 for a whole channel.  [default: 128, or less if the layers need it]",
)
@click.option(
    "--ratio",
    type=float,
    help="int4: fraction of the layers to quantise to int4, up to 1; see --backup-precision for the rest.  [default: "
    "chosen by optimum-intel; 1 with --calibration]",
)
@click.option("--sym", is_flag=True, help="int8 and int4: quantise symmetrically, without zero points.")
@click.option(
    "--backup-precision",
    type=click.Choice(BACKUP_PRECISIONS),
    help="int4: format of the layers not in int4; none leaves them unquantised.  [default: chosen by "
    "optimum-intel, usually int8_asym]",
)
@click.option("--awq", is_flag=True, help="int4: activation-aware quantisation; more accurate with --calibration.")
@click.option(
    "--scale-estimation", is_flag=True, help="int4: fit the scales to the calibration text; needs --calibration."
)
@click.option("--gptq", is_flag=True, help="int4: fit the rounding to the calibration text; slow, needs --calibration.")
@click.option(
    "--lora-correction", is_flag=True, help="int4: add low-rank corrections; costs some speed, needs --calibration."
)
@click.option(
    "--calibration", type=PATH_TYPE, metavar="FILE", help="int4: text file for calibrating the methods above."
)
@click.option("--samples", type=int, help="int4: number of samples from the calibration text.  [default: 128]")
@click.option(
    "--evaluate",
    type=PATH_TYPE,
    metavar="FILE",
    help="Compare the export with the checkpoint on this text file: perplexity, KL divergence, and how often both "
    "agree on the most likely token.",
)
@add_options({"chat_template": LOAD_OPTIONS["chat_template"]})
@click.option("--trust-remote-code", is_flag=True, help="Allow the export to run Python code from the checkpoint.")
def export(
    target: tuple[str, ...],
    draft: str | None,
    draft_layers: int | None,
    output: Path | None,
    overwrite: bool,
    list_pairs: bool,
    list_families: bool,
    prepare: bool,
    weight_format: str | None,
    draft_weight_format: str | None,
    evaluate: Path | None,
    chat_template: str | Path | None,
    trust_remote_code: bool,
    **options: OptionValue,
) -> None:
    """Export TARGET, a Hugging Face checkpoint or a GGUF file, to OpenVINO IR.

    TARGET is a checkpoint folder, a GGUF file, a hub id (org/model, org/model@REVISION, org/model:Q4_K_M), or the short
    name of a known pair of model and draft (--list). A known pair is exported with its draft model; --draft head
    exports its EAGLE-3 head instead, --draft none no draft. Model and draft must share a vocabulary; an EAGLE-3 head
    must be trained for TARGET.

    Checkpoints quantised with GPTQ, AWQ, AutoRound, compressed-tensors or bitsandbytes, and quantised GGUF files, keep
    their integers and scales; --weight-format int8 or int4 quantises only GGUF files again. --overwrite replaces the
    old folder at the very end, so an interrupted export leaves it unchanged.

    \b
    Examples:
      ovspec export models/demo-hf/target --draft models/demo-hf/draft -o my-pair --weight-format int8
      ovspec export qwen3-8b -o qwen3 --weight-format int4 --awq --scale-estimation --calibration notes.txt
      ovspec export llama-3.2-3b.Q8_0.gguf --draft llama-3.2-1b.Q4_K_M.gguf -o llama
      ovspec export org/model --draft-layers 4 -o my-pair --evaluate notes.txt
    """
    from ovspec.drafting.choice import HEAD_DRAFT, NO_DRAFT
    from ovspec.setup.known_pairs import read_known_pairs

    known_pairs = read_known_pairs()
    if list_pairs:
        click.echo("\n".join(map(str, known_pairs.values())))
        click.echo("Not verified here: these models were not exported or run by this project's tests.", err=True)
        return
    from ovspec.setup.exporting import import_export_package

    click_context = click.get_current_context()
    passed_names = {
        name for name in click_context.params if click_context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }
    if list_families:
        raise_usage_error_if(
            passed_names - {"list_families"},
            "--list-families can't be combined with other arguments; leave the others out.",
        )
        click.echo("\n".join(import_export_package().describe_families()))
        return
    if prepare:
        raise_usage_error_if(not target, "--prepare needs families: ovspec export --prepare FAMILY...")
        raise_usage_error_if(
            passed_names - {"prepare", "target"},
            "--prepare only downloads and takes no export options; leave the options out.",
        )
        export_package = import_export_package()
        export_package.prepare_environments(export_package.find_environments(target))
        return
    if len(target) != 1 or output is None:
        raise click.UsageError("An export needs a single model and an output folder: ovspec export TARGET -o DIR.")
    model = target[0]
    if model in known_pairs and not Path(model).exists():
        known_pair = known_pairs[model]
        if draft == HEAD_DRAFT:
            raise_usage_error_if(
                not known_pair.eagle3, f"No public head is known for {model}; give a head or draft model with --draft."
            )
            draft = known_pair.eagle3
        elif draft_layers is None:
            draft = draft or known_pair.draft
        model = known_pair.target
    message = (
        "--draft head works only with the models in 'ovspec export --list'; give the head's folder or hub "
        "id as --draft."
    )
    raise_usage_error_if(draft == HEAD_DRAFT, message)
    has_draft = draft not in (None, NO_DRAFT) or draft_layers is not None
    raise_usage_error_if(
        draft_weight_format and not has_draft, "--draft-weight-format needs --draft or --draft-layers."
    )
    message = "Error: the export was stopped by SIGTERM; nothing was changed."
    with exit_on_sigterm(message):
        export_package = import_export_package()
        if weight_format is None and draft_weight_format != "int4" and any(options.values()):
            weight_format = "int8"  # the options only apply to a new quantisation
        weight_formats = (weight_format, draft_weight_format)
        compressions = [
            export_package.Compression(name, **select_format_options(options, name, weight_formats)) if name else None
            for name in weight_formats
        ]
        export_package.export_pair(
            model,
            draft,
            output,
            *compressions,
            overwrite=overwrite,
            draft_layers=draft_layers,
            evaluate=evaluate,
            chat_template=chat_template,
            trust_remote_code=trust_remote_code,
        )


def select_format_options(
    options: dict[str, Any], weight_format: str, weight_formats: Sequence[str | None]
) -> dict[str, Any]:
    """Return the options for a format; without int4 all options, for the later refusal of wrong options."""
    if weight_format == "int4" or "int4" not in weight_formats:
        return options
    return {"sym": options["sym"] and weight_format == "int8"}
