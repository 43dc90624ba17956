"""A head's guesses on packed documents, several tokens deep, and what they are worth (EAGLE-3, arXiv 2503.01840).

At the first step each entry has the target's features. At a later one it has the head's own output of the step before
and the text's next token, so the head learns to go on from its own guesses (training-time test).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ovspec_export.distill.packing import Batch
from ovspec_export.heads import EagleHead, KeyValueCache

SAMPLED_TOKENS = 1024  # of the unlikely tokens, for which a step computes logits
MIN_PROBABILITY = 1e-3  # what is less likely is left out of the goal
FEATURE_WEIGHT = 0.5  # of the distance from what the target's lm_head reads
STEP_DECAY = 0.8  # weight of each later step


def unroll_head(head: EagleHead, batch: Batch, embedding: Tensor, steps: int) -> list[Tensor]:
    """Return the layer's output of each step: [n, hidden] for all entries, then [deep, hidden].

    embedding: that of the target's tokens, [vocabulary, hidden].
    """
    rows = embedding if head.embed_tokens is None else head.embed_tokens.weight
    deep = batch.deep
    seen = batch.visible_entries(torch.arange(len(batch)))
    mask = make_attention_mask(~seen)

    def step(
        entries: Tensor, depth: int, features: Tensor, mask: Tensor, past: KeyValueCache
    ) -> tuple[Tensor, KeyValueCache]:
        embedded = rows[batch.ids[entries + depth]].float()
        places = batch.positions[entries] + depth
        states, cache = head.run_layer(embedded[None], features[None], mask[None, None], places[None], past)
        return states[0], cache

    states, cache = step(torch.arange(len(batch)), 0, head.fuse_states(batch.features), mask, head.make_empty_cache())
    outputs = [states]
    own = make_attention_mask(~torch.eye(len(deep), dtype=torch.bool))
    states = states[deep]
    mask = mask[deep]
    if not len(deep):
        return [*outputs, *[states] * (steps - 1)]
    for depth in range(1, steps):
        # Of what was guessed, an entry sees only what came of itself.
        mask = torch.cat((mask, own), 1)
        states, cache = step(deep, depth, head.compute_next_features(states), mask, cache)
        outputs.append(states)
    return outputs


def make_attention_mask(hidden: Tensor) -> Tensor:
    """Return a mask that is added to the attention's scores."""
    return torch.zeros(hidden.shape).masked_fill_(hidden, torch.finfo(torch.float32).min)


def select_targets(values: Tensor, batch: Batch, step: int) -> Tensor:
    """Return the rows of one of the batch's ``values`` that a step guesses."""
    if step == 0:
        return values
    return values[batch.deep + step]


def compute_unrolled_loss(head: EagleHead, batch: Batch, embedding: Tensor, draft_ids: Tensor, steps: int) -> Tensor:
    """Return the cross-entropy with the target's choices that the head can propose, and a distance, over all steps.

    The distance is that from what the target's lm_head reads, where the widths are the same. Logits are computed for
    what is likely anywhere in the batch, and for a sample of the rest that stands for it.

    draft_ids: the head's id of each of the target's, [vocabulary], or -1.
    """
    outputs = unroll_head(head, batch, embedding, steps)
    normed = outputs
    if head.layout.norm_before_head:
        normed = [head.norm(output) for output in outputs]
    choices = torch.cat([draft_ids[select_targets(batch.choices, batch, step)] for step in range(steps)])
    probabilities = torch.cat([select_targets(batch.logprobs, batch, step) for step in range(steps)]).exp()
    probabilities *= (choices >= 0) & (probabilities > MIN_PROBABILITY)
    size = len(head.lm_head.weight)
    likely = choices[probabilities > 0].unique()
    rest = torch.ones(size, dtype=torch.bool).index_fill_(0, likely, False).nonzero()[:, 0]
    sample = rest[torch.randperm(len(rest))[:SAMPLED_TOKENS]]
    columns = torch.cat((likely, sample))
    column_of = torch.zeros(size, dtype=torch.long).index_put_((columns,), torch.arange(len(columns)))
    logits = F.linear(torch.cat(normed), head.lm_head.weight[columns])
    if head.lm_head.bias is not None:
        logits = logits + head.lm_head.bias[columns]
    expected = (probabilities * logits.gather(1, column_of[choices.clamp(min=0)])).sum(-1)
    stands_for = torch.zeros(len(columns))
    if len(sample):
        stands_for[len(likely) :] = torch.tensor(len(rest) / len(sample)).log()
    cross = probabilities.sum(-1) * (logits + stands_for).logsumexp(-1) - expected
    loss = torch.zeros(())
    for step, (own, part) in enumerate(zip(normed, cross.split([len(output) for output in normed]), strict=True)):
        if len(part):
            final = select_targets(batch.final, batch, step)
            distance = torch.zeros(())
            if final.shape == own.shape:
                distance = F.mse_loss(own, final) / final.square().mean()
            loss = loss + STEP_DECAY**step * (part.mean() + FEATURE_WEIGHT * distance)
    return loss


@torch.no_grad()
def compare_guesses(head: EagleHead, batch: Batch, embedding: Tensor, ids: Tensor, steps: int) -> Tensor:
    """Return whether the guesses of deep entries in answers are the target's first choices: (entries, steps) bool.

    ids: the target's id of each of the head's.
    """
    agree = list[Tensor]()
    for step, output in enumerate(unroll_head(head, batch, embedding, steps)):
        if step == 0:
            output = output[batch.deep]
        guesses = ids[head.compute_logits(output).argmax(-1)]
        agree.append(guesses == batch.choices[batch.deep + step, 0])
    return torch.stack(agree, 1)[batch.answers[batch.deep]]
