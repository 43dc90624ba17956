"""A head's guesses on packed documents, several tokens deep, and their loss (EAGLE-3, arXiv 2503.01840).

At the first step each entry has the target's features. At a later step it has the head's own output of the last step
and the text's next token, so the head learns to continue from its own guesses (training-time test).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ovspec_export.distill.packing import Batch
from ovspec_export.heads import EagleHead, KeyValueCache

SAMPLED_TOKENS = 1024  # sampled unlikely tokens per step with computed logits
MIN_PROBABILITY = 1e-3  # less likely tokens are left out of the goal
FEATURE_WEIGHT = 0.5  # of the distance from the input of the target's lm_head
STEP_DECAY = 0.8  # weight of each later step


def unroll_head(head: EagleHead, batch: Batch, embedding: Tensor, steps: int) -> list[Tensor]:
    """Return the layer's output of each step: [n, hidden] for all entries, then [deep, hidden].

    embedding: the target's token embeddings, [vocabulary, hidden].
    """
    embedding_rows = embedding if head.embed_tokens is None else head.embed_tokens.weight
    deep_entries = batch.deep_entries
    is_visible = batch.find_visible_entries(torch.arange(len(batch)))
    mask = make_attention_mask(~is_visible)

    def run_step(
        entries: Tensor, depth: int, features: Tensor, mask: Tensor, past_cache: KeyValueCache
    ) -> tuple[Tensor, KeyValueCache]:
        embedded = embedding_rows[batch.ids[entries + depth]].float()
        positions = batch.positions[entries] + depth
        states, cache = head.run_layer(embedded[None], features[None], mask[None, None], positions[None], past_cache)
        return states[0], cache

    states, cache = run_step(
        torch.arange(len(batch)), 0, head.fuse_target_states(batch.features), mask, head.make_empty_cache()
    )
    outputs = [states]
    own_mask = make_attention_mask(~torch.eye(len(deep_entries), dtype=torch.bool))
    states = states[deep_entries]
    mask = mask[deep_entries]
    if not len(deep_entries):
        return [*outputs, *[states] * (steps - 1)]
    for depth in range(1, steps):
        # Among guesses, an entry sees only its own.
        mask = torch.cat((mask, own_mask), 1)
        states, cache = run_step(deep_entries, depth, head.compute_next_features(states), mask, cache)
        outputs.append(states)
    return outputs


def make_attention_mask(is_hidden: Tensor) -> Tensor:
    """Return a mask to add to the attention's scores."""
    return torch.zeros(is_hidden.shape).masked_fill_(is_hidden, torch.finfo(torch.float32).min)


def select_step_targets(values: Tensor, batch: Batch, step: int) -> Tensor:
    """Return a step's goals: the rows of ``values``, a field of the batch."""
    if step == 0:
        return values
    return values[batch.deep_entries + step]


def compute_unrolled_loss(head: EagleHead, batch: Batch, embedding: Tensor, draft_ids: Tensor, steps: int) -> Tensor:
    """Return the cross-entropy with the target's choices within the head's vocabulary, and a distance, over all steps.

    The distance is from the input of the target's lm_head, if the widths are the same. Logits are computed for tokens
    likely anywhere in the batch, and for a sample to represent the rest.

    draft_ids: the head's id of each id of the target, [vocabulary], or -1.
    """
    outputs = unroll_head(head, batch, embedding, steps)
    normalized_outputs = outputs
    if head.layout.norm_before_head:
        normalized_outputs = [head.norm(output) for output in outputs]
    choices = torch.cat([draft_ids[select_step_targets(batch.choices, batch, step)] for step in range(steps)])
    probabilities = torch.cat([select_step_targets(batch.logprobs, batch, step) for step in range(steps)]).exp()
    probabilities *= (choices >= 0) & (probabilities > MIN_PROBABILITY)
    draft_vocab_size = len(head.lm_head.weight)
    likely_ids = choices[probabilities > 0].unique()
    unlikely_ids = torch.ones(draft_vocab_size, dtype=torch.bool).index_fill_(0, likely_ids, False).nonzero()[:, 0]
    sampled_ids = unlikely_ids[torch.randperm(len(unlikely_ids))[:SAMPLED_TOKENS]]
    column_ids = torch.cat((likely_ids, sampled_ids))
    column_by_id = torch.zeros(draft_vocab_size, dtype=torch.long).index_put_(
        (column_ids,), torch.arange(len(column_ids))
    )
    logits = F.linear(torch.cat(normalized_outputs), head.lm_head.weight[column_ids])
    if head.lm_head.bias is not None:
        logits = logits + head.lm_head.bias[column_ids]
    expected_logits = (probabilities * logits.gather(1, column_by_id[choices.clamp(min=0)])).sum(-1)
    log_sample_weights = torch.zeros(len(column_ids))
    if len(sampled_ids):
        log_sample_weights[len(likely_ids) :] = torch.tensor(len(unlikely_ids) / len(sampled_ids)).log()
    cross_entropy = probabilities.sum(-1) * (logits + log_sample_weights).logsumexp(-1) - expected_logits
    loss = torch.zeros(())
    for step, (step_output, step_losses) in enumerate(
        zip(normalized_outputs, cross_entropy.split([len(output) for output in normalized_outputs]), strict=True)
    ):
        if len(step_losses):
            final_states = select_step_targets(batch.final_states, batch, step)
            distance = torch.zeros(())
            if final_states.shape == step_output.shape:
                distance = F.mse_loss(step_output, final_states) / final_states.square().mean()
            loss = loss + STEP_DECAY**step * (step_losses.mean() + FEATURE_WEIGHT * distance)
    return loss


@torch.no_grad()
def compare_guesses(head: EagleHead, batch: Batch, embedding: Tensor, target_ids: Tensor, steps: int) -> Tensor:
    """Return whether the guesses of deep entries in answers are the target's first choices: (entries, steps) bool.

    target_ids: the target's id of each id of the head.
    """
    guess_is_right = list[Tensor]()
    for step, output in enumerate(unroll_head(head, batch, embedding, steps)):
        if step == 0:
            output = output[batch.deep_entries]
        guesses = target_ids[head.compute_logits(output).argmax(-1)]
        guess_is_right.append(guesses == batch.choices[batch.deep_entries + step, 0])
    return torch.stack(guess_is_right, 1)[batch.in_answers[batch.deep_entries]]
