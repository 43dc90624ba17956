"""Sessions: a text with its decoders, kept between calls to avoid repeated prefill."""

from __future__ import annotations

import itertools
from collections import abc
from dataclasses import replace
from pathlib import Path

import numpy as np

from ovspec.api.session_file import EMPTY_MARK, Mark, load_session, save_session
from ovspec.base.errors import OvspecError
from ovspec.cache.sequence import Sequence, measure_common_prefix
from ovspec.engine.decoders import DecoderSet
from ovspec.engine.prompts import Prompt, TemplateVariables, is_chat, refuse_template_variables
from ovspec.engine.results import Origin, Piece, Result
from ovspec.engine.row import Row, TextStream
from ovspec.engine.runtime import Runtime
from ovspec.engine.scheduler import Scheduler, run_rows
from ovspec.engine.scoring import Score, Selection, check_select_options, score_texts
from ovspec.params.generation import CHAT_OPTIONS, DEFAULT_PARAMS, GENERATE_OPTIONS, GenerateOptions, Params
from ovspec.params.option import OptionValue, method_accepts_options
from ovspec.params.values import check_value
from ovspec.text.chat_format import find_begun_answer
from ovspec.text.chat_template import Message

SESSION_FILE_OWNERS = itertools.count(-1, -1)  # owners of texts from files; API keys count from 0


class Session:
    """A growing text with its KV caches; you append to it, and the model continues it.

    After any change to the text, only the tokens after the common prefix are prefilled again. Sessions are made by
    ``LanguageModel.session()``; use them in a ``with`` statement or call ``close``. Any other use of a session cancels
    its unfinished stream.

    ``chat_template_kwargs``, variables for the chat template, may be set at any time; appending a message renders the
    whole chat with them.
    """

    def __init__(
        self,
        runtime: Runtime,
        decoders: DecoderSet,
        context_length: int | None = None,
        template_variables: TemplateVariables | None = None,
    ) -> None:
        self.sequence = Sequence()
        self.chat_template_kwargs = template_variables
        self.runtime = runtime
        self._context_length = context_length
        self._decoders: DecoderSet | None = decoders
        self._shares_cache = False  # whether a fork shares the cache
        self._stream: TextStream | None = None
        self._restore_mark(EMPTY_MARK)

    # ------------------------------------------------------------ the text

    @property
    def text(self) -> str:
        """The whole text, without special tokens."""
        return self.runtime.prompt_encoder.tokenizer.decode(self.sequence.tokens)

    @property
    def tokens(self) -> list[int]:
        """The token ids of the whole text."""
        return self.sequence.tokens.tolist()

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.sequence)

    @property
    def messages(self) -> list[Message]:
        """The messages of a chat, including the answer so far; empty if the text isn't a chat."""
        if not self._messages or len(self.sequence) == self._answer_start:
            return list(self._messages)
        answer_tokens = self.sequence.tokens[self._answer_start :]
        prompts = self.runtime.prompt_encoder
        text = prompts.tokenizer.decode(strip_eos(answer_tokens, prompts.generation_config.eos_ids))
        if (begun_answer := find_begun_answer(self._messages)) is not None:
            *earlier_messages, last_message = self._messages
            return [*earlier_messages, {**last_message, "content": begun_answer + text}]
        return [*self._messages, {"role": "assistant", "content": text}]

    def append(self, prompt: Prompt | Message) -> None:
        """Append a text, token ids, or chat messages. Nothing is computed yet.

        A text is tokenised together with text appended just before it, and with the rest of a token split by a stop
        string. Messages render the whole chat again, including generated answers; messages changed by the template are
        prefilled again. If the last message is the assistant's, the answer continues it.

        Raises:
            OvspecError: messages after a text other than a chat, or an invalid text or ids.
        """
        self._claim_decoders()
        if is_chat(prompt):
            self._append_messages([prompt] if isinstance(prompt, dict) else prompt)  # type: ignore[arg-type]
            return
        if not self._messages:
            refuse_template_variables(self.chat_template_kwargs)
        if isinstance(prompt, str):
            tokens = self._encode_continuation(prompt)
            self._open_text += prompt
            self._set_tokens(tokens)
            self._heals_by_default = self.runtime.prompt_encoder.tokenizer.vocabulary is not None
        else:
            self.sequence.commit(self.runtime.prompt_encoder.encode(prompt, at_start=not len(self.sequence)))
            self._open_text_start = len(self.sequence)
            self._open_text = ""
            self._heals_by_default = False  # the ids are final

    def mark(self) -> Mark:
        """Return a mark of the current text, for ``rewind``."""
        self._cancel_stream()
        chat_fields = tuple(self._messages), self._answer_start, self.chat_template_kwargs
        return Mark(
            self.sequence.tokens.copy(),
            self._open_text_start,
            self._open_text,
            self._healable_from,
            self._heals_by_default,
            *chat_fields,
        )

    def rewind(self, mark: Mark) -> None:
        """Restore the text of ``mark``, made by this or another session of the same model.

        Raises:
            OvspecError: ``mark`` is not a mark, or has unknown tokens.
        """
        if not isinstance(mark, Mark):
            raise OvspecError(f"`rewind` needs a mark returned by `mark()`, not {type(mark).__name__}.")
        self._claim_decoders()
        self.runtime.prompt_encoder.encode(mark.tokens, at_start=False)  # refuses another vocabulary's mark
        self._restore_mark(mark)

    def reset(self) -> None:
        """Delete the text. Its KV caches move to the prefix cache, if there is one, or their memory is freed."""
        decoders = self._claim_decoders()
        self._restore_mark(EMPTY_MARK)
        decoders.reset(0)
        decoders.reset(1)

    # ------------------------------------------------------------ generating

    @method_accepts_options(GenerateOptions)
    def stream(self, **options: OptionValue) -> TextStream:
        """Continue this session's text like ``LanguageModel.stream``; ``heal`` is on by default for appended text."""
        params = self.runtime.row_maker.make_complete_params(options)
        refuse_late_options(params)
        if params.heal is None:
            params = replace(params, heal=self._heals_by_default)
        decoders = self._claim_decoders()
        mark_before_stream = self.mark()
        cached_tokens = len(decoders.target.rows[0])
        try:
            row = self.runtime.row_maker.make_row(
                self.sequence, params, Origin(False, self._healable_from, self._context_length)
            )
            self.runtime.row_maker.check_row_memory(row, params, cached_tokens)
            drafter, lookahead = decoders.select_drafter_and_lookahead(params)
        except BaseException:
            self._restore_mark(mark_before_stream)
            raise
        is_running = True

        def end_stream_once() -> None:
            nonlocal is_running
            if is_running:
                is_running = False
                self._end_stream(row, mark_before_stream)

        def iterate_pieces() -> abc.Generator[Piece]:
            try:
                for round_pieces in run_rows(Scheduler(decoders.target, drafter, lookahead, [row])):
                    for _, piece in round_pieces:
                        if piece.finish_reason:
                            end_stream_once()
                        yield piece
            finally:
                end_stream_once()

        self._stream = TextStream(iterate_pieces(), row, end_stream_once)
        return self._stream

    @method_accepts_options(GenerateOptions)
    def generate(self, **options: OptionValue) -> Result:
        """Continue this session's text like ``LanguageModel.generate``; the generated text is appended."""
        return self.stream(**options).result()

    def select(self, options: abc.Sequence[str], terminator: str | None = None) -> Selection:
        """Append the most likely of ``options`` at this point, by total probability.

        Each option is tokenised together with the preceding text; a forward pass scores up to 32 options. A longer
        option is less likely than its own beginning; with a terminator after both, "catalog" can win over "cat".

        Args:
            options: different texts.
            terminator: text to score after each option; it is not appended.

        Raises:
            OvspecError: no options, equal options, an empty option without a terminator, or an empty session of a model
                without a BOS.
        """
        check_select_options(options, terminator)
        option_texts = [option + (terminator or "") for option in options]
        logprobs = [score.logprob for score in self._score_candidates(option_texts)]
        best_index = max(range(len(options)), key=logprobs.__getitem__)
        self.append(options[best_index])
        self._freeze_tokens()
        return Selection(options[best_index], best_index, logprobs)

    def score(self, text: str) -> Score:
        """Return the log-probability of ``text`` as a continuation of this session's text, without appending it.

        ``text`` is tokenised together with text appended just before it. A token across the boundary counts as a
        whole.

        Raises:
            OvspecError: ``text`` is empty, or the session is empty and the model has no BOS.
        """
        if not isinstance(text, str) or not text:
            raise OvspecError("`score` needs a non-empty string.")
        return self._score_candidates([text])[0]

    def fork(self) -> Session:
        """Return another session with the same text; both continue independently.

        Both share the blocks of a paged cache. If a cache can't be copied exactly (a stateful cache in u8), the fork
        prefills the text again.
        """
        decoders = self.runtime.models.fork_decoders(self._claim_decoders())
        forked_session = Session(self.runtime, decoders, self._context_length, self.chat_template_kwargs)
        forked_session._restore_mark(self.mark())
        self._shares_cache = forked_session._shares_cache = True
        return forked_session

    def save(self, path: str | Path) -> None:
        """Write the text and its KV caches to a file, for ``load`` in any process. The write is atomic.

        A cache without an exact copy (a stateful cache in u8) is left out, with a warning.

        Raises:
            OvspecError: the file can't be written.
        """
        save_session(Path(path), self.runtime, self._claim_decoders(), self.mark())

    def load(self, path: str | Path) -> None:
        """Replace this session's text and ``chat_template_kwargs`` with the saved session.

        Generation continues token for token. If the caches were written with other settings or another version of
        OpenVINO, the text is prefilled again, with a warning. If loading fails, this session keeps its text.

        Raises:
            OvspecError: the file doesn't exist, is damaged, or belongs to another model.
        """
        owner = next(SESSION_FILE_OWNERS)  # a file's caches aren't trusted: no other text may reuse them
        mark = load_session(Path(path), self.runtime, self._claim_decoders(), owner)
        self._restore_mark(mark)
        self.sequence.owner = owner
        self.chat_template_kwargs = mark.chat_template_kwargs

    def close(self) -> None:
        """End the session: it can't generate any more. Its KV caches move to the prefix cache, or are freed."""
        self._cancel_stream()
        decoders = self._decoders
        self._decoders = None
        if decoders and self._shares_cache:
            decoders.reset(0)
        elif decoders:
            self.runtime.decoder_pool.release(decoders)

    def _claim_decoders(self) -> DecoderSet:
        """Cancel an unfinished stream and return the decoders; raises OvspecError for a closed session."""
        self._cancel_stream()
        if not self._decoders:
            raise OvspecError("The session is closed; open a new session with session().")
        return self._decoders

    def _restore_mark(self, mark: Mark) -> None:
        self._set_tokens(mark.tokens)
        self._open_text_start = mark.open_from
        self._open_text = mark.open_text
        self._healable_from = mark.healable
        self._heals_by_default = mark.heals
        self._messages = list(mark.messages)
        self._answer_start = mark.answer_from

    def _set_tokens(self, tokens: np.ndarray) -> None:
        """Make ``tokens`` the session's text."""
        shared_length = measure_common_prefix(self.sequence, Sequence(tokens))
        self.sequence.rewind(shared_length)
        self.sequence.commit(tokens[shared_length:])

    def _encode_continuation(self, text: str) -> np.ndarray:
        """Return all tokens of the session's text followed by ``text``, (n,) int64."""
        new_tokens = self.runtime.prompt_encoder.encode(self._open_text + text, at_start=self._open_text_start == 0)
        return np.concatenate((self.sequence.tokens[: self._open_text_start], new_tokens))

    def _append_messages(self, messages: list[Message]) -> None:
        """Render the whole chat; if it begins with the text so far, keep the text's tokens.

        The model may have tokenised an answer differently from the tokenizer.
        """
        if len(self.sequence) and not self._messages:
            raise OvspecError("Chat messages can't be appended to plain text; start a new session.")
        check_value(self.chat_template_kwargs, GENERATE_OPTIONS["chat_template_kwargs"])
        chat = [*self.messages, *messages]
        tokenizer = self.runtime.prompt_encoder.tokenizer
        rendered_chat = self.runtime.prompt_encoder.chat_format.render_prompt(chat, variables=self.chat_template_kwargs)
        tokens = strip_eos(self.sequence.tokens, self.runtime.prompt_encoder.generation_config.eos_ids)
        spelled_text = tokenizer.decode_with_special(tokens)
        if spelled_text and rendered_chat.startswith(spelled_text):
            self._set_tokens(
                np.concatenate((tokens, tokenizer.encode_continuation(rendered_chat[len(spelled_text) :])))
            )
        else:  # the template spells out the special tokens itself
            self._set_tokens(tokenizer.encode(rendered_chat, special=False))
        self._messages = chat
        self._answer_start = len(self.sequence)
        self._freeze_tokens()

    def _freeze_tokens(self) -> None:
        """Fix the tokens so far: no more healing or tokenising of them."""
        self._open_text_start = self._healable_from = len(self.sequence)
        self._open_text = ""
        self._heals_by_default = False

    def _score_candidates(self, texts: list[str]) -> list[Score]:
        decoders = self._claim_decoders()
        text_tokens = self.sequence.tokens
        if not len(text_tokens):
            text_tokens = self.runtime.prompt_encoder.generation_config.empty_prompt_ids
        self.runtime.models.check_context_length(len(text_tokens) + 1, self._context_length)
        candidate_tokens = [self._encode_continuation(text) for text in texts]
        text_sequence = Sequence(text_tokens)
        shared_length = min(measure_common_prefix(text_sequence, Sequence(tokens)) for tokens in candidate_tokens)
        if not shared_length:  # every token of a short text would merge with the next text
            candidate_tokens = [
                np.concatenate((text_tokens, self.runtime.prompt_encoder.tokenizer.encode_continuation(text)))
                for text in texts
            ]
            shared_length = len(text_tokens)
        self.runtime.models.check_context_length(max(map(len, candidate_tokens)), self._context_length)
        return score_texts(decoders.target, candidate_tokens, shared_length)

    def _cancel_stream(self) -> None:
        stream = self._stream
        self._stream = None
        if stream:
            stream.cancel()

    def _end_stream(self, row: Row, mark_before_stream: Mark) -> None:
        """After a stream has ended, cut the session's text to the text shown to the user.

        A stop string may begin inside a token: the text before it is encoded now, and again with later text.
        """
        if not row.token_ids:
            self._restore_mark(mark_before_stream)  # healing may have removed tokens without generating them again
            return
        self._freeze_tokens()
        if row.finish_reason != "stop":
            return
        tokenizer = self.runtime.prompt_encoder.tokenizer
        generated_tokens = self.sequence.tokens[row.prompt_length :]
        healed_text = row.healing.removed_bytes.decode("utf-8", "replace") if row.healing else ""
        seen_text = healed_text + row.text
        kept_count = len(generated_tokens)
        while not seen_text.startswith(tokenizer.decode(generated_tokens[:kept_count])):
            kept_count -= 1
        rest_of_text = seen_text[len(tokenizer.decode(generated_tokens[:kept_count])) :]
        self.sequence.rewind(row.prompt_length + kept_count)
        self._freeze_tokens()
        self._open_text = rest_of_text
        self._heals_by_default = bool(rest_of_text) and tokenizer.vocabulary is not None
        self.sequence.commit(tokenizer.encode_continuation(rest_of_text))

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def strip_eos(tokens: np.ndarray, eos_ids: frozenset[int]) -> np.ndarray:
    """Return ``tokens`` (n,) without an EOS at their end."""
    return tokens[:-1] if len(tokens) and int(tokens[-1]) in eos_ids else tokens


def refuse_late_options(params: Params) -> None:
    """Raise OvspecError for options too late for a session."""
    if params.retries:
        raise OvspecError("`retries` can't be used in a session; leave `retries` out.")
    for option in CHAT_OPTIONS:
        if getattr(params, option) != getattr(DEFAULT_PARAMS, option):
            remedy = "call the model's `generate` with the messages"
            if option == "chat_template_kwargs":
                remedy = "set the session's `chat_template_kwargs` before you append messages"
            raise OvspecError(
                f"`{option}` can't be set when a session generates, because the session's messages are already "
                f"rendered; {remedy}."
            )
