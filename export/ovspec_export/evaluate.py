"""Measure what an export has lost: compare its IR with its checkpoint on a text."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from ovspec.cache.stateful import make_stateful_decoder
from ovspec.engine.scoring import (
    DEFAULT_PERPLEXITY_CONTEXT,
    check_perplexity_length,
    overlapping_windows,
    predict_tokens,
)
from ovspec.ir.compile import compile_ir
from ovspec.ir.device import DeviceOptions
from ovspec.sampling.logprobs import log_softmax
from ovspec.setup.rollback_probing import probe_rollback
from ovspec.text.tokenizer import Tokenizer
from ovspec_export.quantised import load_checkpoint_model


def compare_with_checkpoint(
    source: Path, folder: Path, text: str, context: int, trust_remote_code: bool
) -> dict[str, float]:
    """Return both perplexities, the mean KL divergence of the IR from the checkpoint (nats) and the top-1 agreement.

    Both compute in f32, so that only the weights differ. Raises OvspecError if the text has fewer than two tokens.
    """
    import torch

    options = DeviceOptions(precision="f32", properties={"CACHE_DIR": ""})
    ir = compile_ir(folder, options)
    tokenizer = Tokenizer(folder)
    decoder = make_stateful_decoder(ir, probe_rollback(ir).rollback, tokenizer.known)
    tokens = tokenizer.encode(text)
    context = min(context, DEFAULT_PERPLEXITY_CONTEXT, ir.context_length or DEFAULT_PERPLEXITY_CONTEXT)
    check_perplexity_length(tokens, context)
    model = load_checkpoint_model(str(source), trust_remote_code, dtype=torch.float32)
    spans = overlapping_windows(len(tokens), context)
    reference, start, end = np.empty((0, 0), np.float32), 0, 0
    ours = theirs = divergence = 0.0
    agreed = scored = 0
    for place, logits in predict_tokens(decoder, tokens, context):
        if place >= end:
            start, end, _ = next(spans)
            with torch.no_grad():
                reference = model(input_ids=torch.from_numpy(tokens[None, start:end])).logits[0].numpy()
            reference = tokenizer.known.restrict(reference)  # like the IR's: padding ids are never chosen
        n, width = logits.shape
        q = log_softmax(logits)
        p = log_softmax(reference[place - 1 - start : place - 1 - start + n, :width])
        wanted = tokens[place : place + n]
        ours -= q[np.arange(n), wanted].sum()
        theirs -= p[np.arange(n), wanted].sum()
        with np.errstate(invalid="ignore"):  # ids without a token are -inf in both
            divergence += np.nansum(np.exp(p) * (p - q))
        agreed += int((q.argmax(1) == p.argmax(1)).sum())
        scored += n
    return {
        "perplexity": math.exp(ours / scored),
        "perplexity_of_the_checkpoint": math.exp(theirs / scored),
        "kl": float(divergence) / scored,
        "top1": agreed / scored,
        "tokens": scored,
        "context": context,
    }
