"""Measure the loss of quality in an export: compare its IR with its checkpoint on a text."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from ovspec.cache.decoder_maker import make_decoder
from ovspec.engine.scoring import (
    DEFAULT_PERPLEXITY_CONTEXT,
    check_perplexity_length,
    compute_predicting_logits,
    overlapping_windows,
)
from ovspec.ir.compile import compile_ir
from ovspec.ir.device import DeviceOptions
from ovspec.sampling.logprobs import log_softmax
from ovspec.setup.rollback_probing import probe_rollback
from ovspec.text.tokenizer import Tokenizer
from ovspec_export.quantised import load_checkpoint_model


def compare_with_checkpoint(
    source: Path, folder: Path, text: str, context_tokens: int, trust_remote_code: bool
) -> dict[str, float]:
    """Return both perplexities, the mean KL divergence of the IR from the checkpoint (nats) and the top-1 agreement.

    Both compute in f32, so only the weights differ. Raises OvspecError if the text has fewer than two tokens.
    """
    import torch

    device_options = DeviceOptions(precision="f32", properties={"CACHE_DIR": ""})
    ir = compile_ir(folder, device_options)
    tokenizer = Tokenizer(folder)
    decoder = make_decoder(ir, probe_rollback(ir).rollback, tokenizer.known_ids)
    tokens = tokenizer.encode(text)
    context_tokens = min(context_tokens, DEFAULT_PERPLEXITY_CONTEXT, ir.context_length or DEFAULT_PERPLEXITY_CONTEXT)
    check_perplexity_length(tokens, context_tokens)
    model = load_checkpoint_model(str(source), trust_remote_code, dtype=torch.float32)
    windows = overlapping_windows(len(tokens), context_tokens)
    checkpoint_logits = np.empty((0, 0), np.float32)  # of the tokens from ``window_start`` to ``window_end``
    window_start = window_end = 0
    ir_loss = checkpoint_loss = divergence = 0.0
    agreement_count = scored_tokens = 0
    for position, logits in compute_predicting_logits(decoder, tokens, context_tokens):
        if position >= window_end:
            window_start, window_end, _ = next(windows)
            with torch.no_grad():
                checkpoint_logits = (
                    model(input_ids=torch.from_numpy(tokens[None, window_start:window_end])).logits[0].numpy()
                )
            # Padding ids are never chosen, as in the IR.
            checkpoint_logits = tokenizer.known_ids.restrict_logits(checkpoint_logits)
        count, width = logits.shape
        ir_logprobs = log_softmax(logits)
        checkpoint_logprobs = log_softmax(
            checkpoint_logits[position - 1 - window_start : position - 1 - window_start + count, :width]
        )
        next_tokens = tokens[position : position + count]
        ir_loss -= ir_logprobs[np.arange(count), next_tokens].sum()
        checkpoint_loss -= checkpoint_logprobs[np.arange(count), next_tokens].sum()
        with np.errstate(invalid="ignore"):  # ids without a token are -inf in both
            divergence += np.nansum(np.exp(checkpoint_logprobs) * (checkpoint_logprobs - ir_logprobs))
        agreement_count += int((ir_logprobs.argmax(1) == checkpoint_logprobs.argmax(1)).sum())
        scored_tokens += count
    return {
        "perplexity": math.exp(ir_loss / scored_tokens),
        "perplexity_of_the_checkpoint": math.exp(checkpoint_loss / scored_tokens),
        "kl": float(divergence) / scored_tokens,
        "top1": agreement_count / scored_tokens,
        "tokens": scored_tokens,
        "context": context_tokens,
    }
