"""Makes and exports random models in one environment: imports torch and the rest once, then forks for each job.

    python warm_worker.py    reads a job in JSON per line, and writes a line for each: an empty one, or why it failed

The jobs are ``make`` and ``without``, below, and those of ``ovspec_export.worker``, which ``ovspec export`` starts in a
new process.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

from ovspec_export import families, patches, worker

VOCAB = 4096


def make(
    config: str,
    arguments: dict[str, Any],
    folder: str,
    prompts: list[list[int]],
    tokens: int,
    spread: float,
    embedding: float,
    norms: float,
    attention: str,
    use_cache: bool = True,
    inside: str | None = None,
) -> None:
    """Make a random model in ``folder``, with the tokens that its ``generate`` gives in ``expected.json``."""
    import torch
    import transformers

    made = getattr(transformers, config)(**arguments)
    torch.manual_seed(0)
    # Classes with other parts than a language model have no automatic class.
    create = getattr(
        getattr(transformers, inside or "AutoModelForCausalLM"), "_from_config" if inside else "from_config"
    )
    model = create(made, attn_implementation=attention).eval()
    for weights in model.parameters():
        if weights.ndim > 1:
            torch.nn.init.normal_(weights, std=embedding if len(weights) >= VOCAB else spread)
        elif norms:
            weights.data += norms * torch.randn_like(weights)
    model.save_pretrained(folder)
    expected = []
    for ids in prompts:
        options = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        out = model.generate(torch.tensor([ids]), use_cache=use_cache, **options)
        expected.append(out[0, len(ids) :].tolist())
    (Path(folder) / "expected.json").write_text(json.dumps(expected), encoding="utf-8")


def without(change: str, model_type: str, **arguments: Any) -> None:
    """Export as ``ovspec export`` does it, but without one of the changes that ``families.py`` asks for."""
    usual = families.FAMILIES[model_type]
    families.FAMILIES[model_type] = replace(usual, **{change: getattr(families.Family(), change)})
    worker.export_with_optimum(model_type=model_type, **arguments)


def run(job: str, arguments: dict[str, Any]) -> str:
    """Run a job in a process of its own; return why it failed."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        failure = ""
        try:
            ({"make": make, "without": without} | worker.JOBS)[job](**arguments)
        except BaseException:
            failure = traceback.format_exc()
        os.write(writing, failure.encode()[-4000:])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        told = pipe.read().decode()
    os.waitpid(child, 0)
    return told


def main() -> None:
    patches.hide_torchvision()
    import torch  # noqa: F401
    import transformers
    from optimum.commands.export import openvino  # noqa: F401
    from optimum.exporters.openvino import __main__, model_configs  # noqa: F401

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the libraries print
    transformers.utils.logging.set_verbosity_error()
    for line in sys.stdin:
        print(json.dumps(run(*json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
