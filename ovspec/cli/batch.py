from __future__ import annotations

import contextlib
import re
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ovspec.cli.loading import load_model
from ovspec.cli.options import (
    add_generate_options,
    chat_option,
    check_chat_options,
    fill_missing_flag_value,
    raise_usage_error_if,
    read_text_or_stdin,
    refuse_zero_max_tokens,
    split_load_and_generate_options,
    system_option,
)
from ovspec.params.option import OptionValue

if TYPE_CHECKING:
    from ovspec.batch.requests import BatchRequest
    from ovspec.batch.resumable_run import BatchProgress

PROGRESS_INTERVAL = 10.0  # seconds between lines of progress if stderr isn't a terminal
LOCAL_CLUSTER = "local"  # the address of a cluster on this machine only


def is_cluster_address(text: str) -> bool:
    """Return whether ``text`` is the address of a Ray cluster rather than a file."""
    return text == "auto" or bool(re.fullmatch(r"(ray://)?[\w.-]+:\d+", text))


class RayCommand(click.Command):
    """A command with an optional address after ``--ray``: any other argument there is left alone."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, fill_missing_flag_value(args, "--ray", LOCAL_CLUSTER, is_cluster_address))


@click.command(cls=RayCommand)
@click.argument("arguments", nargs=-1, required=True, metavar="[MODEL] FILE")
@click.option(
    "-o", "--output", required=True, metavar="FILE", help="File for the results; a folder if the input is a folder."
)
@click.option("--overwrite", is_flag=True, help="Replace the output file if it exists.")
@click.option(
    "--ray",
    is_flag=False,
    flag_value=LOCAL_CLUSTER,
    metavar="[ADDRESS]",
    help="Run on a Ray cluster: a local cluster by default, or the cluster at ADDRESS (HOST:PORT, or auto on a "
    "machine of the cluster).",
)
@click.option(
    "--cpus-per-worker",
    type=click.IntRange(min=1),
    metavar="N",
    help="With --ray: CPUs per worker.  [default: all CPUs of a NUMA node]",
)
@click.option(
    "--mixed",
    is_flag=True,
    help="With --ray: also use workers with logits different from the first worker's, for example on another type of "
    "CPU. Each result then names its worker's numerics.",
)
@chat_option
@system_option
@add_generate_options
def batch(
    arguments: tuple[str, ...],
    output: str,
    overwrite: bool,
    ray: str | None,
    cpus_per_worker: int | None,
    mixed: bool,
    chat: bool | None,
    system: str | None,
    **options: OptionValue,
) -> None:
    """Generate a text for each line of FILE with MODEL (by default the embedded demo pair).

    A line of FILE (- for stdin) is a request in OpenAI's batch format; a JSON object with prompt or messages, and
    options such as max_tokens, temperature, stop or response_format; or a JSON string with a prompt. In a .txt file,
    each line is a prompt. Options in a line override the command's options. --chat and --system apply to prompts, not
    to OpenAI's requests. Lines without a seed share the command's seed.

    Each line yields a line of output, in the same order, with its id (by default the line number). If a line fails,
    its output has an error instead of a text, and the exit code is 1. After Ctrl-C or a kill, the same command
    resumes from OUTPUT.partial.

    With --ray, FILE may also be a folder of .jsonl, .parquet and .txt files, and FILE and OUTPUT may be in object
    storage (s3://BUCKET/PATH, gs://BUCKET/PATH). Each file in a folder yields a results file in the folder OUTPUT.

    \b
    Examples:
      ovspec batch my-pair requests.jsonl -o results.jsonl
      ovspec batch my-pair prompts.txt -o results.jsonl --draft --max-tokens 64 --batch-size 8
      ovspec batch my-pair s3://bucket/requests -o s3://bucket/results --ray 10.0.0.1:6379
    """
    raise_usage_error_if(len(arguments) > 2, "Too many arguments; give FILE, or MODEL and FILE.")
    file = arguments[-1]
    model = arguments[0] if len(arguments) == 2 else None
    check_chat_options(chat, system, options["heal"])
    raise_usage_error_if(
        output == "-", "--output can't be stdout, because a batch resumes from its output; give a file."
    )
    raise_usage_error_if(cpus_per_worker and not ray, "--cpus-per-worker needs --ray.")
    raise_usage_error_if(mixed and not ray, "--mixed needs --ray.")
    is_ray_client = ray and ray.startswith("ray://")
    raise_usage_error_if(is_ray_client, f"--ray {ray}: Ray Client isn't supported; give the cluster's HOST:PORT.")
    for path in (file, output):
        raise_usage_error_if(
            not ray and needs_ray(path), f"{path}: a folder, Parquet file or object storage needs --ray."
        )
    if Path(output).is_file():
        raise_usage_error_if(
            Path(output).resolve() == Path(file).resolve(), f"{output} is the input file; choose another --output."
        )
        raise_usage_error_if(not overwrite, f"{output} already exists; choose another --output, or add --overwrite.")
    load_options, params = split_load_and_generate_options(options)
    refuse_zero_max_tokens(params, "A batch")

    from ovspec.batch.requests import parse_lines, read_requests, to_chat_request
    from ovspec.batch.resumable_run import run_file
    from ovspec.setup.exporting import find_or_export_model

    prepare_request = partial(to_chat_request, system=system) if chat else lambda request: request
    requests: list[BatchRequest] = []
    if not needs_ray(file):
        parsed_requests = parse_lines(read_text_or_stdin(file)) if file == "-" else read_requests(Path(file))
        requests = list(map(prepare_request, parsed_requests))
    weight_format = load_options.pop("weight_format", None)
    folder, load_options["draft"] = find_or_export_model(model, load_options.get("draft"), weight_format)
    report = BatchProgressPrinter()
    try:
        if ray:
            from ovspec.batch.ray.cluster import cluster_connection

            with contextlib.redirect_stdout(None), cluster_connection(ray):  # Ray's messages about dead workers
                from ovspec.batch.ray.driver import run_on_cluster

                draft = load_options.pop("draft", None)
                if isinstance(
                    template := load_options.get("chat_template"), Path
                ):  # the file is missing on other machines
                    load_options["chat_template"] = read_text_or_stdin(template)
                progress = run_on_cluster(
                    file if needs_ray(file) else requests,
                    output,
                    folder,
                    draft,
                    load_options,
                    params,
                    cpus=cpus_per_worker,
                    mixed=mixed,
                    overwrite=overwrite,
                    convert=prepare_request,
                    report=report.update,
                )
        else:
            progress = run_file(load_model(folder, **load_options), requests, Path(output), params, report.update)
    except KeyboardInterrupt:
        report.erase_line()
        kept_location = "" if "://" in output else f" kept in {output}.partial"
        click.echo(f"stopped; the same command continues from the results{kept_location}", err=True)
        raise
    report.erase_line()
    click.echo(report.describe_progress(progress), err=True)
    if progress.failed:
        click.echo(f"{output}: {progress.failed} of {progress.total} lines have an error instead of a text", err=True)
        sys.exit(1)


def needs_ray(path: str) -> bool:
    """Return whether ``path`` is a folder, Parquet, or in object storage."""
    return "://" in path or path.lower().endswith(".parquet") or Path(path).is_dir()


class BatchProgressPrinter:
    """Progress on stderr: an updated line on a terminal, a new line every few seconds elsewhere."""

    def __init__(self) -> None:
        self._on_terminal = sys.stderr.isatty()
        self._start_time = time.monotonic()
        self._last_update = self._start_time
        self._work_done = 0  # tokens and finished requests
        self._first_progress: tuple[float, int] | None = None  # time and amount of the first progress, after loading
        self._end_time: float | None = None  # as estimated at the last progress

    def update(self, progress: BatchProgress) -> None:
        """Show the progress, unless it was shown a moment ago."""
        self._estimate_end(progress)
        if time.monotonic() - self._last_update >= (0.5 if self._on_terminal else PROGRESS_INTERVAL):
            self._last_update = time.monotonic()
            with contextlib.suppress(OSError):  # a full disk behind stderr must not stop the run
                self.erase_line()
                click.echo(self.describe_progress(progress), nl=not self._on_terminal, err=True)

    def _estimate_end(self, progress: BatchProgress) -> None:
        """Estimate the end, as if remaining requests had the mean length of finished requests."""
        now = time.monotonic()
        work_done = progress.generated_tokens + progress.done
        if work_done == self._work_done:
            return
        self._work_done = work_done
        if not self._first_progress:
            self._first_progress = (now, work_done)
        elif progress.done:
            first_time, first_work = self._first_progress
            work_per_request = (progress.done_tokens + progress.done) / progress.done
            work_left = progress.requests_left * work_per_request - (progress.generated_tokens - progress.done_tokens)
            self._end_time = now + work_left * (now - first_time) / (work_done - first_work)

    def describe_progress(self, progress: BatchProgress) -> str:
        """Return the counts, the speed and the estimated time in a line."""
        if progress.loading_workers and not progress.total:
            return f"{progress.loading_workers} worker{'s' * (progress.loading_workers > 1)}: loading …"
        elapsed_seconds = time.monotonic() - self._start_time
        phrases = [f"{progress.done_before + progress.done} of {progress.total} done"]
        if progress.done_before:
            phrases.append(f"{progress.done_before} of them by an earlier run")
        if progress.failed:
            phrases.append(f"{progress.failed} with an error")
        tokens_per_second = progress.generated_tokens / max(elapsed_seconds, 1e-9)
        phrases.append(
            f"{progress.generated_tokens} tokens in {elapsed_seconds:.0f} s ({tokens_per_second:.0f} tokens/s)"
        )
        if progress.worker_count:
            loading_note = f" ({progress.loading_workers} loading)" * (
                progress.loading_workers > 0 and progress.requests_left > 0
            )
            phrases.append(f"{progress.worker_count} worker{'s' * (progress.worker_count > 1)}{loading_note}")
        if self._end_time and progress.requests_left and (seconds_left := self._end_time - time.monotonic()) > 0:
            phrases.append(f"about {seconds_left:.0f} s left")
        return ", ".join(phrases)

    def erase_line(self) -> None:
        """Erase the line of progress on a terminal."""
        if self._on_terminal and self._last_update > self._start_time:
            click.echo("\r\x1b[K", nl=False, err=True)
