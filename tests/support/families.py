"""Tiny random models of many families."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hybrid
from conftest import ROOT

from ovspec.drafting.drafter import Drafter, RoundRow
from ovspec.drafting.lookahead import Lookahead
from ovspec.drafting.proposal import Proposal

VOCAB = 4096


SIZES = {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
GROUPED = SIZES | {"intermediate_size": 128, "num_key_value_heads": 2}


@dataclass(frozen=True)
class Family:
    """A transformers config class, its arguments, and how its states are expected to roll back."""

    config: str
    arguments: dict[str, Any]
    rollback: str = "mask"
    note: str = ""
    spread: float = 0.25  # of the random weights; with tied embeddings, a small spread would repeat the input


class Mistaken(Drafter):
    """A drafter that spoils one token in every other proposal, at changing positions, to end rounds at each of them."""

    def __init__(self, inner: Drafter) -> None:
        self.inner, self.proposals = inner, 0

    @property
    def seconds(self) -> float:  # type: ignore[override]
        return self.inner.seconds

    def propose(self, rows: list[RoundRow], lookahead: Lookahead) -> list[Proposal]:
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
    """Make a random model in ``folder`` and export it to ``folder / "ir"``; return the torch model."""
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
