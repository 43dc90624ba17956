import signal
import sys

import click

from ovspec.cli.options import raise_usage_error_if
from ovspec.cli.path_type import PATH_TYPE
from ovspec.params.option import OptionValue


@click.command()
@click.argument("model", metavar="MODEL")
@click.option("-o", "--output", type=PATH_TYPE, required=True, help="Folder to write.")
@click.option(
    "--text",
    multiple=True,
    type=PATH_TYPE,
    metavar="PATH",
    help="Learn from this text file, chats in JSONL, or folder of such files, too. May be repeated.",
)
@click.option("--topics", type=PATH_TYPE, metavar="FILE", help="What the model asks itself about: a topic a line.")
@click.option(
    "--kind",
    type=click.Choice(("head", "mtp")),
    help="What to make: an EAGLE-3 head, or a layer for multi-token prediction.  [default: head]",
)
@click.option(
    "--draft",
    metavar="DRAFT",
    help="Teach this draft model, or train this head further, instead of making a new head: a checkpoint folder, a hub "
    "id, or a folder exported from one of them.",
)
@click.option(
    "--trim-vocabulary",
    type=click.IntRange(1),
    metavar="N",
    help="Only leave the draft the N ids that the texts use most; it isn't taught.",
)
@click.option(
    "--draft-vocabulary",
    type=click.IntRange(1),
    metavar="N",
    help="Number of ids that a head can propose.  [default: 16384]",
)
@click.option(
    "--minutes",
    type=click.FloatRange(1),
    metavar="N",
    help="Time for everything, over all runs; downloads apart.  [default: 180; 10 with --trim-vocabulary]",
)
@click.option(
    "--tokens", type=click.IntRange(1), metavar="N", help="End after training on N tokens; one read twice counts twice."
)
@click.option(
    "--torch-device", default="cpu", show_default=True, metavar="DEVICE", help="Where torch computes, such as cuda."
)
@click.option(
    "--size-limit",
    type=click.FloatRange(0, min_open=True),
    default=10.0,
    show_default=True,
    metavar="GB",
    help="Disk space for what the model computes on the texts; once it is full, only training goes on.",
)
@click.option(
    "--work",
    type=PATH_TYPE,
    metavar="DIR",
    help="Folder for everything but the result; it is kept.  [default: a folder beside the output, deleted at the end]",
)
@click.option("--overwrite", is_flag=True, help="Replace the output folder if it holds an earlier result.")
def distill(model: str, trim_vocabulary: int | None, draft: str | None, **options: OptionValue) -> None:
    """Make a head for MODEL, or teach it a draft, on this machine: it then generates faster.

    MODEL is a folder made by 'ovspec export', a checkpoint folder, a GGUF file or a hub id. It writes texts itself, so
    that no data are needed, and the head learns to guess what it says; texts of yours make it better at those. The
    result is a checkpoint in OUTPUT with its export and a card. A MODEL that was exported without a draft gets it as
    its draft.

    Texts and training take turns in rounds, so that there is a head after some minutes, and the line of progress says
    how many tokens are accepted so far. Ctrl-C ends it with the result so far, and the same command goes on later, as
    it does after a crash. At the end plain decoding, the old draft and the new one are timed in turns on texts that
    were held out. If nothing was gained, the exit code is 3.

    \b
    Examples:
      ovspec distill my-model -o my-head
      ovspec distill my-model -o my-head --text notes/ --text src/ --minutes 60
      ovspec distill my-model -o my-mtp --kind mtp --minutes 30
      ovspec distill my-model -o my-draft --draft org/small-model
      ovspec distill my-model -o my-draft --draft org/small-model --trim-vocabulary 8000
      ovspec generate my-model "Once upon a time" --draft my-head --stats
    """
    raise_usage_error_if(trim_vocabulary and not draft, "--trim-vocabulary needs --draft: it is for draft models.")
    from ovspec.setup.exporting import import_export_package

    message = "Error: ended by SIGTERM; the same command goes on."
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(message))  # which cleans up, and no library catches it
    package = import_export_package("Distilling")
    distill_options = package.DistillOptions(model, trim_vocabulary=trim_vocabulary, draft=draft, **options)
    if exit_code := package.distill_model(distill_options):
        sys.exit(exit_code)
