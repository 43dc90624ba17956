"""What a head begins with: the best linear guess of what the target's lm_head will read, found in closed form."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ovspec_export.distill.features import Example
from ovspec_export.heads import EagleHead

MAX_FIT_TOKENS = 80_000  # tokens that it is fitted to
INITIAL_CONFIDENCE = 0.6  # a guess is less sure than what it guesses


@torch.no_grad()
def initialize_head(head: EagleHead, examples: Sequence[Example], embedding: Tensor, rows: Tensor) -> Tensor:
    """Set the weights of a new head, and return what its features are to be divided by.

    Some features are a thousand times as large as others, so fc learns in units of each one's usual size. The features
    go into the guess through fc, and the next token's embedding through one attention head of each group, which begins
    by looking at its own position. What the MLP adds begins at nothing.

    Args:
        embedding: of the target's tokens, [vocabulary, hidden].
        rows: the target's lm_head of the tokens that the head can propose.
    """
    layout = head.layout
    hidden = layout.hidden_size
    kv_heads = layout.kv_head_count
    width = layout.head_dim
    usual = compute_rms_sizes(examples, "features")
    final = compute_rms_sizes(examples, "final")
    of_features, of_token, directions = fit_linear_guess(examples, usual, final, embedding, kv_heads * width)
    for weight in head.parameters():
        if weight.ndim > 1:
            weight.normal_(std=0.5 / math.sqrt(weight.shape[-1]))
        else:
            weight.fill_(1.0)
    head.fc.weight.copy_(of_features)
    attention = head.layer.self_attn
    for weight in (attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight, attention.o_proj.weight):
        weight.normal_(std=0.01)
    own = torch.randn(kv_heads, width, hidden) / math.sqrt(hidden)
    attention.k_proj.weight[:, :hidden] = own.flatten(0, 1)
    groups = (kv_heads, layout.head_count // kv_heads, width)
    attention.q_proj.weight.view(*groups, -1)[:, 0, :, :hidden] = own
    known = directions.shape[1]  # fewer than the values are wide if the target is narrow
    attention.v_proj.weight[:known, :hidden] = directions.T @ of_token
    padded = F.pad(directions, (0, kv_heads * width - known))
    attention.o_proj.weight.view(hidden, *groups)[:, :, 0] = padded.view(hidden, kv_heads, width)
    head.layer.mlp.down_proj.weight.zero_()
    head.norm.weight.copy_(INITIAL_CONFIDENCE * final)
    head.lm_head.weight.copy_(rows)
    return usual


def limit_examples(examples: Sequence[Example]) -> Iterator[Example]:
    """Yield the first examples, with ``MAX_FIT_TOKENS`` tokens in all, one at a time."""
    tokens = 0
    for example in examples:
        if tokens >= MAX_FIT_TOKENS:
            return
        yield example
        tokens += len(example.ids)


def compute_rms_sizes(examples: Sequence[Example], name: str) -> Tensor:
    """Return the root mean square of each value of ``features`` or ``final``, but for a text's first token."""
    squares = torch.zeros(())
    count = 0
    for example in limit_examples(examples):
        values = getattr(example, name)[1:].float()
        squares = squares + values.square().sum(0)
        count = count + len(values)
    return (squares / count).sqrt().clamp(min=1e-6)


def fit_linear_guess(
    examples: Sequence[Example], usual: Tensor, final: Tensor, embedding: Tensor, rank: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Fit what the lm_head reads, in units of ``final``, to the features and the next token's normalised embedding.

    Returns the weights of the features, those of the embedding, and the ``rank`` directions in which these matter most.
    """
    wide = len(usual)
    hidden = embedding.shape[1]
    squares = torch.zeros(wide + hidden, wide + hidden)
    products = torch.zeros(wide + hidden, len(final))
    count = 0
    for example in limit_examples(examples):
        token = F.rms_norm(embedding[example.ids[2:].long()].float(), [hidden])
        x = torch.cat((example.features[1:-1].float() / usual, token), -1)
        squares += x.T @ x
        products += x.T @ (example.final[2:].float() / final)
        count += len(x)
    exact = squares.double()
    # The fewer tokens for each value, the less is believed; the best share was measured for 5,000 to 80,000 tokens.
    ridge = len(exact) / count
    exact += torch.diag(ridge * exact.diagonal() + 1e-6)
    weights = torch.linalg.solve(exact, products.double()).T
    of_token = weights[:, wide:]
    effect = of_token @ exact[wide:, wide:] @ of_token.T
    directions = torch.linalg.eigh(effect).eigenvectors[:, -rank:]
    return weights[:, :wide].float(), of_token.float(), directions.float()
