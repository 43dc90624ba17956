import sys

import click

from ovspec.base.interrupts import exit_on_sigterm
from ovspec.cli.options import raise_usage_error_if
from ovspec.cli.path_type import PATH_TYPE
from ovspec.params.option import OptionValue


@click.command()
@click.argument("model", metavar="MODEL")
@click.option("-o", "--output", type=PATH_TYPE, required=True, help="Output folder.")
@click.option(
    "--text",
    multiple=True,
    type=PATH_TYPE,
    metavar="PATH",
    help="Additional training data: a text file, chats in JSONL, or a folder of such files. May be repeated.",
)
@click.option("--topics", type=PATH_TYPE, metavar="FILE", help="Topics for the texts written by MODEL, one per line.")
@click.option(
    "--kind",
    type=click.Choice(("head", "mtp")),
    help="Train an EAGLE-3 head, or an MTP (multi-token prediction) layer.  [default: head]",
)
@click.option(
    "--draft",
    metavar="DRAFT",
    help="Train this draft model or head further, instead of a new head: a checkpoint folder, a hub id, or a folder "
    "exported from either.",
)
@click.option(
    "--trim-vocabulary",
    type=click.IntRange(1),
    metavar="N",
    help="Don't train; only trim the vocabulary of the draft model to the N most frequent token ids in the texts.",
)
@click.option(
    "--draft-vocabulary",
    type=click.IntRange(1),
    metavar="N",
    help="Number of token ids a new head can propose.  [default: 16384]",
)
@click.option(
    "--minutes",
    type=click.FloatRange(1),
    metavar="N",
    help="Time limit, including earlier runs, without downloads.  [default: 180; 10 with --trim-vocabulary]",
)
@click.option(
    "--tokens", type=click.IntRange(1), metavar="N", help="Stop after training on N tokens, counting repetitions."
)
@click.option("--torch-device", default="cpu", show_default=True, metavar="DEVICE", help="Torch device, such as cuda.")
@click.option(
    "--size-limit",
    type=click.FloatRange(0, min_open=True),
    default=10.0,
    show_default=True,
    metavar="GB",
    help="Disk space for the training data (the model's hidden states). At the limit, only training continues.",
)
@click.option(
    "--work",
    type=PATH_TYPE,
    metavar="DIR",
    help="Work folder, kept after the run.  [default: next to the output folder, deleted at the end]",
)
@click.option("--overwrite", is_flag=True, help="Replace the output folder if it holds an earlier result.")
def distill(model: str, trim_vocabulary: int | None, draft: str | None, **options: OptionValue) -> None:
    """Train a draft for MODEL, to generate faster with speculative decoding.

    The draft is a new head by default: a layer on MODEL's hidden states, trained to predict MODEL's next tokens. No
    training data is needed: MODEL writes texts for it. Your own texts (--text) raise the acceptance rate on similar
    texts. The output folder gets a checkpoint, its export and a model card. If MODEL is a folder exported without a
    draft, the result becomes its draft.

    Generation and training alternate, so a first version is ready after some minutes. The progress line shows the
    accepted tokens per forward pass. Ctrl-C ends training with the result so far; the same command resumes it, also
    after a crash. At the end, plain decoding, the old draft and the new draft are timed on held-out texts. Without a
    speed-up, the exit code is 3.

    \b
    Examples:
      ovspec distill my-model -o my-head
      ovspec distill my-model -o my-head --text notes/ --text src/ --minutes 60
      ovspec distill my-model -o my-mtp --kind mtp --minutes 30
      ovspec distill my-model -o my-draft --draft org/small-model
      ovspec distill my-model -o my-draft --draft org/small-model --trim-vocabulary 8000
      ovspec generate my-model "Once upon a time" --draft my-head --stats
    """
    raise_usage_error_if(
        trim_vocabulary and not draft, "--trim-vocabulary works only with a draft model; add --draft MODEL."
    )
    from ovspec.setup.exporting import import_export_package

    message = "Error: stopped by SIGTERM; run the same command to continue."
    with exit_on_sigterm(message):
        package = import_export_package("Distilling")
        distill_options = package.DistillOptions(model, trim_vocabulary=trim_vocabulary, draft=draft, **options)
        if exit_code := package.distill_model(distill_options):
            sys.exit(exit_code)
