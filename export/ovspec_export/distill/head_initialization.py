"""A head's initial weights: the best linear guess of the target's lm_head input, found in closed form."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ovspec_export.distill.features import Example
from ovspec_export.heads import EagleHead

MAX_FIT_TOKENS = 80_000  # tokens to fit it to
INITIAL_CONFIDENCE = 0.6  # a guess is less confident than its target


@torch.no_grad()
def initialize_head(head: EagleHead, examples: Sequence[Example], embedding: Tensor, lm_head_rows: Tensor) -> Tensor:
    """Set the weights of a new head, and return the divisor of its features.

    Some features are a thousand times as large as others, so fc learns in units of each feature's usual size. The
    features enter the guess through fc, and the next token's embedding through an attention head of each group,
    at first attending to its own position. The MLP's contribution starts at zero.

    Args:
        embedding: the target's, [vocabulary, hidden].
        lm_head_rows: the target's lm_head rows of the tokens the head can propose.
    """
    layout = head.layout
    hidden_size = layout.hidden_size
    kv_heads = layout.kv_head_count
    head_width = layout.head_dim
    feature_sizes = compute_rms_sizes(examples, "features")
    final_sizes = compute_rms_sizes(examples, "final_states")
    feature_weights, token_weights, directions = fit_linear_guess(
        examples, feature_sizes, final_sizes, embedding, kv_heads * head_width
    )
    for weight in head.parameters():
        if weight.ndim > 1:
            weight.normal_(std=0.5 / math.sqrt(weight.shape[-1]))
        else:
            weight.fill_(1.0)
    head.fc.weight.copy_(feature_weights)
    attention = head.layer.self_attn
    for weight in (attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight, attention.o_proj.weight):
        weight.normal_(std=0.01)
    random_keys = torch.randn(kv_heads, head_width, hidden_size) / math.sqrt(hidden_size)
    attention.k_proj.weight[:, :hidden_size] = random_keys.flatten(0, 1)
    head_group_shape = (kv_heads, layout.head_count // kv_heads, head_width)
    attention.q_proj.weight.view(*head_group_shape, -1)[:, 0, :, :hidden_size] = random_keys
    direction_count = directions.shape[1]  # less than the width of the values if the target is narrow
    attention.v_proj.weight[:direction_count, :hidden_size] = directions.T @ token_weights
    padded_directions = F.pad(directions, (0, kv_heads * head_width - direction_count))
    attention.o_proj.weight.view(hidden_size, *head_group_shape)[:, :, 0] = padded_directions.view(
        hidden_size, kv_heads, head_width
    )
    head.layer.mlp.down_proj.weight.zero_()
    head.norm.weight.copy_(INITIAL_CONFIDENCE * final_sizes)
    head.lm_head.weight.copy_(lm_head_rows)
    return feature_sizes


def limit_examples(examples: Sequence[Example]) -> Iterator[Example]:
    """Yield the first examples, with ``MAX_FIT_TOKENS`` tokens in all, one at a time."""
    tokens = 0
    for example in examples:
        if tokens >= MAX_FIT_TOKENS:
            return
        yield example
        tokens += len(example.ids)


def compute_rms_sizes(examples: Sequence[Example], field_name: str) -> Tensor:
    """Return the root mean square of each value of ``field_name``, except for a text's first token."""
    square_sums = torch.zeros(())
    token_count = 0
    for example in limit_examples(examples):
        values = getattr(example, field_name)[1:].float()
        square_sums = square_sums + values.square().sum(0)
        token_count = token_count + len(values)
    return (square_sums / token_count).sqrt().clamp(min=1e-6)


def fit_linear_guess(
    examples: Sequence[Example], feature_sizes: Tensor, final_sizes: Tensor, embedding: Tensor, rank: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Fit the lm_head's input, in units of ``final_sizes``, to the features and the next token's normalised embedding.

    Returns the weights of the features and of the embedding, and the ``rank`` directions where these matter most.
    """
    feature_width = len(feature_sizes)
    hidden_size = embedding.shape[1]
    input_gram = torch.zeros(feature_width + hidden_size, feature_width + hidden_size)
    cross_products = torch.zeros(feature_width + hidden_size, len(final_sizes))
    token_count = 0
    for example in limit_examples(examples):
        token_embeddings = F.rms_norm(embedding[example.ids[2:].long()].float(), [hidden_size])
        inputs = torch.cat((example.features[1:-1].float() / feature_sizes, token_embeddings), -1)
        input_gram += inputs.T @ inputs
        cross_products += inputs.T @ (example.final_states[2:].float() / final_sizes)
        token_count += len(inputs)
    regularized_gram = input_gram.double()
    # The fewer tokens per value, the stronger the ridge; the best share was measured for 5,000 to 80,000 tokens.
    ridge = len(regularized_gram) / token_count
    regularized_gram += torch.diag(ridge * regularized_gram.diagonal() + 1e-6)
    weights = torch.linalg.solve(regularized_gram, cross_products.double()).T
    token_weights = weights[:, feature_width:]
    effect_covariance = token_weights @ regularized_gram[feature_width:, feature_width:] @ token_weights.T
    directions = torch.linalg.eigh(effect_covariance).eigenvectors[:, -rank:]
    return weights[:, :feature_width].float(), token_weights.float(), directions.float()
