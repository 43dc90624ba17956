"""Documents packed one after another, without padding, for a head to learn from.

An entry is a position of a document with a token after it: it has the token and the target's features at the position,
and guesses the target's choice after the token. Entries see only earlier entries of their own document, with positions
counted from its beginning, as in Hugging Face's padding-free collation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ovspec_export.distill.features import Example


@dataclass(frozen=True)
class Batch:
    """Entries of some documents, one after another.

    ids [n]: the token of each entry. positions [n] and document_indices [n]: its place. features [n, width].
    choices, logprobs [n, top], final_states [n, hidden]: the target's guess after the token.
    deep_entries [m]: indices of entries with guesses of ``steps - 1`` further tokens, from the next entries.
    in_answers [n]: whether the guess is a token of an answer.
    """

    ids: Tensor
    positions: Tensor
    document_indices: Tensor
    features: Tensor
    choices: Tensor
    logprobs: Tensor
    final_states: Tensor
    deep_entries: Tensor
    in_answers: Tensor

    def __len__(self) -> int:
        return len(self.ids)

    def to(self, device: torch.device) -> Batch:
        """Return the batch on a device."""
        return Batch(*(getattr(self, field.name).to(device) for field in fields(self)))

    def find_visible_entries(self, entries: Tensor) -> Tensor:
        """Return the entries visible to each of ``entries``, itself included: (entries, n) bool."""
        is_earlier = torch.arange(len(self), device=entries.device) <= entries[:, None]
        return is_earlier & (self.document_indices == self.document_indices[entries, None])


def pack_examples(examples: Sequence[Example], steps: int, deep_share: float, token_offset: int = 1) -> Batch:
    """Return a batch; of the entries with enough tokens after them, a random ``deep_share`` is deep.

    token_offset: distance from an entry's features to its token: 1 for a head, 0 for a draft model.
    """
    lengths = [len(example.ids) - token_offset for example in examples]
    possible_deep_entries = torch.cat(
        [torch.arange(a, max(a, b - steps + 1)) for a, b in pairwise((0, *accumulate(lengths)))]
    )
    chosen_indices = (
        torch.randperm(len(possible_deep_entries))[: max(1, round(deep_share * len(possible_deep_entries)))]
        .sort()
        .values
    )
    examples_with_lengths = list(zip(examples, lengths, strict=True))
    return Batch(
        ids=torch.cat([example.ids[token_offset:] for example in examples]).long(),
        positions=torch.cat([torch.arange(length) for length in lengths]),
        document_indices=torch.repeat_interleave(torch.tensor(lengths)),
        features=torch.cat([example.features[:length] for example, length in examples_with_lengths]).float(),
        choices=torch.cat([example.choices[token_offset:] for example in examples]).long(),
        logprobs=torch.cat([example.logprobs[token_offset:] for example in examples]).float(),
        final_states=torch.cat([example.final_states[token_offset:] for example in examples]).float(),
        deep_entries=possible_deep_entries[chosen_indices],
        in_answers=torch.cat(
            [torch.arange(n) + token_offset + 1 >= example.document.answer for example, n in examples_with_lengths]
        ),
    )


def iterate_batches(
    examples: Sequence[Example], batch_tokens: int, steps: int, deep_share: float, token_offset: int = 1
) -> Iterator[Batch]:
    """Yield batches of about ``batch_tokens`` entries, with the examples in random order, endlessly."""
    while True:
        batch_examples = list[Example]()
        entry_count = 0
        for index in torch.randperm(len(examples)).tolist():
            batch_examples.append(examples[index])
            entry_count += len(batch_examples[-1].ids) - token_offset
            if entry_count >= batch_tokens:
                yield pack_examples(batch_examples, steps, deep_share, token_offset)
                batch_examples = []
                entry_count = 0
        if batch_examples:
            yield pack_examples(batch_examples, steps, deep_share, token_offset)
