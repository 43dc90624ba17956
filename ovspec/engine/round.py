"""The round: drafters propose tokens, and the target alone decides in a forward pass how many to commit.

In plain decoding, rounds have no proposals.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ovspec.base.errors import InferenceError
from ovspec.cache.decoder import Decoder, count_computed_tokens
from ovspec.cache.prefill import PREFILL_THRESHOLD, choose_prefill_chunks
from ovspec.cache.sequence import catch_up
from ovspec.drafting.drafter import Drafter, RowToDraft
from ovspec.drafting.lookahead import Lookahead, RoundOutcome
from ovspec.drafting.proposal import NO_PROPOSAL, NO_TOKENS, Proposal
from ovspec.engine.prefill_budget import PrefillBudget, RoundLoad

NO_LOGITS = np.empty((0, 0), dtype=np.float32)


class RowFeed(NamedTuple):
    """A row's input of the target in a round."""

    tokens: np.ndarray  # (n,): tokens the target hasn't read, then the proposal
    unseen_count: int  # number of tokens before the proposal
    proposal: Proposal = NO_PROPOSAL
    logits_count: int = 0  # number of tokens with logits, at the end


class RowOutcome(NamedTuple):
    """The result of a round for a row; before the forward pass, it has only the forced tokens."""

    tokens: np.ndarray = NO_TOKENS  # (n,), all committed tokens: forced, then accepted, then the target's own
    forced_count: int = 0
    ended: bool = False  # whether forced tokens or an error have ended the text before the forward pass
    proposal: Proposal = NO_PROPOSAL
    accepted_count: int = 0
    read_count: int = 0  # number of tokens read by the target, without the proposal
    # (n, vocab), for the committed tokens except forced tokens, or all computed logits if the sampler chose no token;
    # valid until the next round.
    logits: np.ndarray = NO_LOGITS
    error: Exception | None = None  # the cause of a failed text


NOTHING_FORCED = RowOutcome()


def run_round(
    target: Decoder,
    drafter: Drafter | None,
    lookahead: Lookahead,
    rows: list[RowToDraft],
    prefill_budget: PrefillBudget | None = None,
) -> tuple[list[RowOutcome], RoundOutcome | None]:
    """Commit at least one token to every row, and roll back the rejected tokens.

    In the middle of its prompt, a row only gets forced tokens. Returns each row's outcome, and the round's outcome for
    the lookahead to learn from (None without a drafter). If a row's constraints fail, only this row has an ``error``,
    and forced tokens may remain in its sequence. Any other exception may leave tokens in all sequences.

    Args:
        target: row i has the KV cache of ``rows[i]``, or of a part of it.
        drafter: None for plain decoding.
        lookahead: the number of tokens to propose. If it is fixed at 0, there are no forced tokens, either.
        prefill_budget: limits the prompt tokens in the round, to keep generating rows from waiting.
    """
    rows = rows[:]
    outcomes = [NOTHING_FORCED] * len(rows)
    for index, row in enumerate(rows):
        if row.sampler.constraints.commits_forced and 0 not in (lookahead.fixed_length, row.draft_limits.lookahead):
            outcomes[index] = run_row_step(commit_forced_tokens, row)
            rows[index] = row_after_forced_tokens(row, outcomes[index])
    if drafter:
        begin_lookahead(lookahead, rows, target, prefill_budget)
    drafting_start = time.perf_counter()
    proposals = collect_proposals(rows, outcomes, drafter, lookahead)
    drafting_end = time.perf_counter()
    unseen_by_row = find_unseen_tokens(rows, outcomes, target)
    round_load = None
    unseen_chunks = unseen_by_row
    if prefill_budget:
        round_load = measure_round_load(unseen_by_row, proposals)
        prompt_tokens = prefill_budget.choose_prompt_token_count(round_load, 1e3 * (drafting_end - drafting_start))
        unseen_chunks = choose_prefill_chunks(target, unseen_by_row, prompt_tokens)
    elif len(rows) > 1:
        unseen_chunks = choose_prefill_chunks(target, unseen_by_row)
    feeds = make_row_feeds(rows, unseen_by_row, unseen_chunks, proposals)
    fed_tokens = [feed.tokens for feed in feeds]
    seconds_before = target.seconds
    computed_width = (
        lookahead.target_costs.choose_fill_width(count_computed_tokens(target, fed_tokens)) if drafter else 0
    )
    if any(map(len, fed_tokens)):
        logits = target.feed(fed_tokens, [feed.logits_count for feed in feeds], computed_width)
        if prefill_budget and round_load:
            prompt_feeds = [
                feed
                for feed, unseen_tokens in zip(feeds, unseen_by_row, strict=True)
                if len(unseen_tokens) > PREFILL_THRESHOLD
            ]
            prompt_tokens = sum([feed.unseen_count for feed in prompt_feeds])
            prefill_budget.learn_costs(round_load, prompt_tokens, 1e3 * (target.seconds - seconds_before))
        for index, (row, feed) in enumerate(zip(rows, feeds, strict=True)):
            if feed.logits_count:
                outcomes[index] = run_row_step(
                    commit_chosen_tokens, row, outcomes[index], feed, logits[index], target, index
                )
            elif feed.unseen_count:
                outcomes[index] = outcomes[index]._replace(read_count=feed.unseen_count)
    if not drafter:
        return outcomes, None
    drafting_s = drafting_end - drafting_start
    verifying_s = time.perf_counter() - drafting_end
    return outcomes, summarize_round(outcomes, unseen_by_row, proposals, computed_width, drafting_s, verifying_s)


def run_row_step(step_function: Callable[..., RowOutcome], row: RowToDraft, *step_arguments: Any) -> RowOutcome:
    """Run a step for a row. If its constraints or a user's function fail, only this row ends, with an ``error``."""
    with row.sampler.stopwatch:
        try:
            return step_function(row, *step_arguments)
        except InferenceError:
            raise
        except Exception as error:
            return RowOutcome(ended=True, error=error)


def commit_forced_tokens(row: RowToDraft) -> RowOutcome:
    """Commit the row's forced tokens: they need no verification, because the target has no other choice."""
    constraints = row.sampler.constraints
    forced_ids = constraints.forced_tokens(row.sequence.tokens)[: row.budget]
    if not forced_ids:
        return NOTHING_FORCED
    tokens = np.array(forced_ids, dtype=np.int64)
    row.sequence.commit(tokens)
    ended = len(tokens) == row.budget or constraints.is_complete(row.sequence.tokens)
    return RowOutcome(tokens, len(tokens), ended)


def row_after_forced_tokens(row: RowToDraft, outcome: RowOutcome) -> RowToDraft:
    """Return ``row`` with its budget after the forced tokens."""
    return row._replace(
        budget=row.budget - outcome.forced_count, drafters_may_propose=row.drafters_may_propose and not outcome.ended
    )


def begin_lookahead(
    lookahead: Lookahead, rows: list[RowToDraft], target: Decoder, prefill_budget: PrefillBudget | None
) -> None:
    """Begin a round of the lookahead, with the time left by unread prompts."""
    if not prefill_budget:
        lookahead.begin_round()
        return
    unread_counts = [
        len(row.sequence) - len(cached_sequence) for row, cached_sequence in zip(rows, target.rows, strict=True)
    ]
    prompt_counts = [unread_count for unread_count in unread_counts if unread_count > PREFILL_THRESHOLD]
    round_load = RoundLoad(len(rows) - len(prompt_counts), len(prompt_counts))
    lookahead.begin_round(prefill_budget.max_proposal_ms(round_load, sum(prompt_counts)), limits_waiting=True)


def collect_proposals(
    rows: list[RowToDraft], outcomes: list[RowOutcome], drafter: Drafter | None, lookahead: Lookahead
) -> list[Proposal]:
    """Collect proposals from the drafter; a row without a proposal gets its prompt's tokens removed by healing."""
    proposals = [NO_PROPOSAL] * len(rows)
    if drafter and any(row.draft_budget() for row in rows):
        proposals = list(drafter.propose(rows, lookahead))
    for index, row in enumerate(rows):
        constraints = row.sampler.constraints
        if constraints.suggests and not outcomes[index].ended and not len(proposals[index].tokens):
            likely_tokens = constraints.likely_tokens(row.sequence.tokens)
            if likely_tokens is not None:
                proposals[index] = row.cut_to_allowed(Proposal(likely_tokens, from_healing=True))
    return proposals


def find_unseen_tokens(rows: list[RowToDraft], outcomes: list[RowOutcome], target: Decoder) -> list[np.ndarray]:
    """Roll the target back to each row's text; return the row's unread tokens (n,), no tokens for ended rows."""
    target.reuse_prefixes([row.sequence for row in rows])
    return [
        NO_TOKENS if outcome.ended else catch_up(target, index, row.sequence)
        for index, (row, outcome) in enumerate(zip(rows, outcomes, strict=True))
    ]


def measure_round_load(unseen_by_row: list[np.ndarray], proposals: list[Proposal]) -> RoundLoad:
    """Return the round's numbers of rows, and of tokens other than prompt tokens."""
    generating_counts = [
        (len(unseen_tokens) - 1, len(proposal.tokens))
        for unseen_tokens, proposal in zip(unseen_by_row, proposals, strict=True)
        if 0 < len(unseen_tokens) <= PREFILL_THRESHOLD
    ]
    return RoundLoad(
        generating_rows=len(generating_counts),
        prefilling_rows=sum([len(unseen_tokens) > PREFILL_THRESHOLD for unseen_tokens in unseen_by_row]),
        catch_up_tokens=sum([catch_up_tokens for catch_up_tokens, _ in generating_counts]),
        proposed_tokens=sum([proposed_tokens for _, proposed_tokens in generating_counts]),
    )


def make_row_feeds(
    rows: list[RowToDraft], unseen_by_row: list[np.ndarray], chunks: list[np.ndarray], proposals: list[Proposal]
) -> list[RowFeed]:
    """Return each row's feed: its chunk of unseen tokens, and the proposal if the chunk has all of them."""
    feeds = []
    for row, unseen_tokens, chunk, proposal in zip(rows, unseen_by_row, chunks, proposals, strict=True):
        unseen_count = len(chunk)
        proposed_count = len(proposal.tokens)
        if not unseen_count or unseen_count < len(unseen_tokens):
            feeds.append(RowFeed(chunk, unseen_count))
        else:
            tokens = np.concatenate((chunk, proposal.tokens)) if proposed_count else chunk
            logits_count = min(row.logits_rows, unseen_count) + proposed_count
            feeds.append(RowFeed(tokens, unseen_count, proposal, logits_count))
    return feeds


def commit_chosen_tokens(
    row: RowToDraft, forced_outcome: RowOutcome, feed: RowFeed, logits: np.ndarray, target: Decoder, decoder_row: int
) -> RowOutcome:
    """Commit the accepted part of the proposal and a token of the target's own, after the row's forced tokens.

    The target's own token replaces the first rejected token, or follows a fully accepted proposal (bonus token). There
    is no such token if an accepted token ends the text.
    """
    proposal = feed.proposal
    proposed_count = len(proposal.tokens)
    accepted_count = 0
    verified_logits = logits[len(logits) - proposed_count - 1 :]
    chosen_tokens = row.sampler.verify_proposal(verified_logits, row.sequence, proposal.tokens, proposal.distributions)
    row.sequence.commit(chosen_tokens)
    if proposed_count and len(chosen_tokens):
        accepted_count = int((chosen_tokens[:proposed_count] == proposal.tokens[: len(chosen_tokens)]).sum())
        if accepted_count < proposed_count:
            target.truncate(decoder_row, len(row.sequence) - 1)
    if proposal.from_healing:
        proposal = NO_PROPOSAL
        accepted_count = 0
    tokens = np.concatenate((forced_outcome.tokens, chosen_tokens)) if forced_outcome.forced_count else chosen_tokens
    if len(chosen_tokens):
        logits = verified_logits[: len(chosen_tokens)]
    return RowOutcome(tokens, forced_outcome.forced_count, False, proposal, accepted_count, feed.unseen_count, logits)


def summarize_round(
    outcomes: list[RowOutcome],
    unseen_by_row: list[np.ndarray],
    proposals: list[Proposal],
    computed_width: int,
    drafting_s: float,
    verifying_s: float,
) -> RoundOutcome:
    # Forced tokens at the end of a text are never computed.
    forced_count = sum([outcome.forced_count for outcome in outcomes if not outcome.ended])
    has_prefilled = (
        any(proposal.from_healing for proposal in proposals)
        or sum(map(len, unseen_by_row)) > len(outcomes) + forced_count
    )
    judged_proposals = [(outcome.proposal, outcome.accepted_count) for outcome in outcomes]
    return RoundOutcome(judged_proposals, computed_width, forced_count, has_prefilled, drafting_s, verifying_s)
