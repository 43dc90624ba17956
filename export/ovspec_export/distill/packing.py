"""Documents packed one after another, without padding, as a head learns from them.

An entry is a position of a document with a token after it: it has that token and the target's features at the position,
and guesses what the target expects after the token. Entries see only earlier ones of their own document, whose
positions count from its beginning, as in Hugging Face's padding-free collation.
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

    ids [n]: the token of each entry. positions [n] and document [n]: where it is. features [n, width].
    choices, logprobs [n, top], final [n, hidden]: the target's guess after that token.
    deep [m]: indices of entries from which ``steps - 1`` further tokens are guessed, those of the next entries.
    answers [n]: whether the guess is a token of an answer.
    """

    ids: Tensor
    positions: Tensor
    document: Tensor
    features: Tensor
    choices: Tensor
    logprobs: Tensor
    final: Tensor
    deep: Tensor
    answers: Tensor

    def __len__(self) -> int:
        return len(self.ids)

    def to(self, device: torch.device) -> Batch:
        """Return the batch on a device."""
        return Batch(*(getattr(self, field.name).to(device) for field in fields(self)))

    def visible_entries(self, entries: Tensor) -> Tensor:
        """Return which entries each of ``entries`` sees, itself included: (entries, n) bool."""
        before = torch.arange(len(self), device=entries.device) <= entries[:, None]
        return before & (self.document == self.document[entries, None])


def pack_examples(examples: Sequence[Example], steps: int, share: float, ahead: int = 1) -> Batch:
    """Return a batch in which a random ``share`` of the entries with enough tokens after them is deep.

    ahead: how many tokens an entry's token is ahead of its features: 1 for a head, 0 for a draft model.
    """
    lengths = [len(example.ids) - ahead for example in examples]
    able = torch.cat([torch.arange(a, max(a, b - steps + 1)) for a, b in pairwise((0, *accumulate(lengths)))])
    chosen = torch.randperm(len(able))[: max(1, round(share * len(able)))].sort().values
    parts = list(zip(examples, lengths, strict=True))
    return Batch(
        ids=torch.cat([example.ids[ahead:] for example in examples]).long(),
        positions=torch.cat([torch.arange(length) for length in lengths]),
        document=torch.repeat_interleave(torch.tensor(lengths)),
        features=torch.cat([example.features[:length] for example, length in parts]).float(),
        choices=torch.cat([example.choices[ahead:] for example in examples]).long(),
        logprobs=torch.cat([example.logprobs[ahead:] for example in examples]).float(),
        final=torch.cat([example.final[ahead:] for example in examples]).float(),
        deep=able[chosen],
        answers=torch.cat([torch.arange(n) + ahead + 1 >= example.document.answer for example, n in parts]),
    )


def iterate_batches(
    examples: Sequence[Example], tokens: int, steps: int, share: float, ahead: int = 1
) -> Iterator[Batch]:
    """Yield batches of about ``tokens`` entries, of the examples in random order, without end."""
    while True:
        taken = list[Example]()
        count = 0
        for index in torch.randperm(len(examples)).tolist():
            taken.append(examples[index])
            count += len(taken[-1].ids) - ahead
            if count >= tokens:
                yield pack_examples(taken, steps, share, ahead)
                taken = []
                count = 0
        if taken:
            yield pack_examples(taken, steps, share, ahead)
