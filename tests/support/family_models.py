"""Make and export the random models of ``families.py``, each in the environment that its family needs."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import hybrid
import pytest
from conftest import ROOT
from families import VOCAB, Family
from ovspec_export import convert
from ovspec_export.environments import Environment, prepare_environment_variables
from ovspec_export.families import FAMILIES as REGISTRY
from ovspec_export.sources import Source

from ovspec.base.errors import OvspecError
from ovspec.drafting.drafter import Drafter, RowToDraft
from ovspec.drafting.lookahead import Lookahead
from ovspec.drafting.proposal import Proposal


class Mistaken(Drafter):
    """A drafter that spoils one token in every other proposal, at changing positions, to end rounds at each of them."""

    def __init__(self, inner: Drafter) -> None:
        self.inner, self.proposals = inner, 0

    @property
    def seconds(self) -> float:  # type: ignore[override]
        return self.inner.seconds

    def propose(self, rows: list[RowToDraft], lookahead: Lookahead) -> list[Proposal]:
        return [self.spoil(proposal) for proposal in self.inner.propose(rows, lookahead)]

    def spoil(self, proposal: Proposal) -> Proposal:
        tokens = proposal.tokens.copy()
        self.proposals += 1
        if len(tokens) and self.proposals % 2:
            place = self.proposals // 2 % len(tokens)
            tokens[place] = (tokens[place] + 1) % VOCAB
        return dataclasses.replace(proposal, tokens=tokens)

    def reset(self, rows: int) -> None:
        self.inner.reset(rows)

    def reorder(self, rows: list[int]) -> None:
        self.inner.reorder(rows)


def export(family: Family, folder: Path, spread_of_padding: float | None = None) -> Any:
    """Make a random model in ``folder`` and export it to ``folder / "ir"``, all in this process; return the model."""
    import torch
    import transformers
    from optimum.exporters.openvino import main_export

    config = getattr(transformers, family.config)(**family.arguments)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for weights in model.parameters():
        if weights.ndim > 1:
            torch.nn.init.normal_(weights, std=1.0 if len(weights) >= VOCAB else family.spread)
            if spread_of_padding:
                torch.nn.init.normal_(weights[VOCAB:], std=spread_of_padding)
    model.save_pretrained(folder / "hf")
    main_export(str(folder / "hf"), folder / "ir", task="text-generation-with-past", convert_tokenizer=False)
    hybrid.copy_tokenizer(ROOT / "models" / "demo", folder / "ir")
    return model


@functools.cache
def worker(environment: Environment | None) -> subprocess.Popen[str]:
    """Return a process that has imported everything in this environment; it ends with this one."""
    command = [sys.executable, str(ROOT / "tests" / "support" / "warm_worker.py")]
    variables = {**os.environ, **prepare_environment_variables(environment, "tests"), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def run(environment: Environment | None, job: str, **arguments: Any) -> str:
    """Run a job of ``warm_worker.py``; return why it failed, or nothing."""
    process = worker(environment)
    assert process.stdin and process.stdout
    try:
        process.stdin.write(json.dumps([job, arguments]) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())
    except BaseException:  # the next job must not get this one's answer
        process.kill()
        worker.cache_clear()
        raise


def warm_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the jobs of exports in processes that have imported everything before; test_export.py runs new ones."""

    def run_job(job: str, model: Source, scratch: Path, _told: Any = None, **arguments: Any) -> None:
        scratch.mkdir(parents=True, exist_ok=True)
        told = run(None if job in convert.JOBS_WITHOUT_OVERLAY else model.family.environment, job, **arguments)
        if told:
            raise OvspecError(f"{model.name}: {convert.JOB_FAILURES[job]} ({convert.describe_failure(told, 1)}).")

    monkeypatch.setattr(convert, "run_worker_job", run_job)


def make(name: str, family: Family, shape: int, folder: Path, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """Make a checkpoint in ``folder`` and return the tokens that transformers generates for each prompt."""
    environment = REGISTRY[family.model_type or name].environment
    options: dict[str, Any] = {
        name: getattr(family, name) for name in ("spread", "embedding", "norms", "attention", "use_cache")
    }
    options |= {"prompts": prompts, "tokens": tokens, "folder": str(folder)}
    failure = run(environment, "make", config=family.config, arguments=family.shape(shape), **options)
    assert not failure, failure
    hybrid.copy_tokenizer(ROOT / "models" / "demo-hf" / "draft", folder)
    return json.loads((folder / "expected.json").read_text(encoding="utf-8"))


def export_as_the_worker_does(
    name: str, family: Family, folder: Path, output: Path, without: str | None = None, weight_format: str = "fp32"
) -> str:
    """Export the checkpoint in ``folder`` with the job that ``ovspec export`` runs for it, in the same environment.

    Returns why it failed. ``without``: a change of ``ovspec_export/families.py`` that is left out.
    """
    model_type = family.model_type or name
    arguments = ["--model", str(folder), "--task", "text-generation-with-past", "--weight-format", weight_format]
    arguments += ["--group-size", "-1"] * (weight_format == "int4") + ["--disable-convert-tokenizer", str(output)]
    options: dict[str, Any] = {"source": str(folder), "model_type": model_type, "trust_remote_code": False}
    job, more = ("without", {"change": without}) if without else ("export_with_optimum", {})
    failure = run(REGISTRY[model_type].environment, job, arguments=arguments, **options, **more)
    if not failure:
        hybrid.copy_tokenizer(ROOT / "models" / "demo", output)
    return failure
