"""LanguageModel: puts decoders, tokenizer and manifest together. Nothing below imports it."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict, Unpack, overload

import numpy as np

from ovspec.chat import Message, chat_template
from ovspec.decoder import COMPACT_AT, Decoder
from ovspec.device import DeviceOptions
from ovspec.drafting import Drafter
from ovspec.drafting.draft_model import DraftModel
from ovspec.engine import ENGINES, EngineChoice, LoadedIR
from ovspec.errors import OvspecError
from ovspec.generate import Piece, Result, Row, generate_rows
from ovspec.ir import check_ir_folder, read_json
from ovspec.manifest import DRAFT_FOLDER, read_manifest, restore_backup
from ovspec.memory import check_memory
from ovspec.pairing import check_same_vocabulary
from ovspec.perplexity import DEFAULT_CONTEXT, Perplexity, measure
from ovspec.probing import Probe
from ovspec.profile import load_with
from ovspec.sequence import Sequence
from ovspec.session import Session, TextStream
from ovspec.tokenizer import Tokenizer
from ovspec.tuning import tune_if_new

DEFAULT_LOOKAHEAD = 4
DEFAULT_MAX_TOKENS = 256

# What Hugging Face's greedy generate would apply from a generation config and we do not yet; neutral values.
NOT_APPLIED = {
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": None,
    "bad_words_ids": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "sequence_bias": None,
}

# A text, token ids, or chat messages for the model's chat template.
Prompt = str | list[int] | np.ndarray | list[Message]


class GenerateOptions(TypedDict, total=False):
    """What every generating call takes.

    max_tokens: tokens to generate at most; by default the generation config's ``max_new_tokens``
        or 256, and never past the model's context. Asking for more than fits is an error.
    stop: one string or several; the text ends in front of the first that appears.
    ignore_eos: go on after an end-of-sequence token.
    lookahead: tokens proposed each round, 0 for plain decoding; by default the model's.
    """

    max_tokens: int | None
    stop: str | list[str]
    ignore_eos: bool
    lookahead: int | None


@dataclass
class Decoders:
    """Of one session or batch."""

    target: Decoder
    drafter: Drafter | None

    def reset(self, rows: int) -> None:
        self.target.reset(rows)
        if self.drafter:
            self.drafter.reset(rows)


class LanguageModel:
    """A loaded model, with or without a draft; made by ``ovspec.load``.

    Threads may share it: calls and sessions that run at the same time have requests of their own, and each
    gives what it gives alone. A session or a stream belongs to one thread at a time.
    """

    def __init__(self, folder: Path, target: LoadedIR, draft: LoadedIR | None, lookahead: int) -> None:
        self.folder, self.lookahead = folder, lookahead
        self.tokenizer = Tokenizer(folder)
        self._target, self._draft = target, draft
        self._idle: list[Decoders] = []
        self._generation_config = read_json(folder / "generation_config.json")
        asked = [name for name, neutral in NOT_APPLIED.items() if self._generation_config.get(name, neutral) != neutral]
        if asked:
            warnings.warn(
                f"{folder}: its generation config asks for {', '.join(asked)}, which is not applied", stacklevel=3
            )

    # ------------------------------------------------------------ generating

    @overload
    def generate(self, prompt: list[str] | list[list[int]], **options: Unpack[GenerateOptions]) -> list[Result]: ...
    @overload
    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Result: ...
    def generate(self, prompt: Any, **options: Unpack[GenerateOptions]) -> Result | list[Result]:
        """Continue ``prompt``, or each of a list of prompts as one batch; see ``GenerateOptions``.

        Raises:
            OvspecError: an empty prompt, or one that doesn't fit the model's context.
        """
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list, np.ndarray)):
            return self._generate_batch(prompt, options)
        return self.stream(prompt, **options).result()

    def stream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> TextStream:
        """As ``generate``, piece by piece: ``for piece in lm.stream("def "): print(piece.text)``."""
        session = self.session()
        session.append(prompt)
        inner = session.stream(**options)

        def pieces() -> Generator[Piece]:
            with session:
                yield from inner

        return TextStream(pieces(), inner.row)

    def session(self) -> Session:
        """A text whose KV cache is kept between calls."""
        return Session(self, self._decoders())

    def _generate_batch(self, prompts: list[Any], options: GenerateOptions) -> list[Result]:
        rows = [self.row(Sequence(self.encode(prompt)), options, len(prompts)) for prompt in prompts]
        lookahead = self.lookahead_of(options)
        decoders = self._decoders()
        decoders.reset(len(rows))
        try:
            for _ in generate_rows(decoders.target, decoders.drafter if lookahead else None, rows, lookahead):
                pass
        finally:
            self.release(decoders)
        return [row.result() for row in rows]

    def perplexity(self, text: str, context: int | None = None) -> Perplexity:
        """How well the target foresees ``text``, in windows of ``context`` tokens (the model's, at most 1024).

        Raises:
            OvspecError: fewer than two tokens, or a window longer than the model's context.
        """
        most = self._target.ir.context_length
        if context and most and context > most:
            raise OvspecError(f"A window of {context} tokens is longer than the model's context of {most}.")
        context = context or min(DEFAULT_CONTEXT, most or DEFAULT_CONTEXT)
        decoders = self._decoders()
        try:
            return measure(decoders.target, self.tokenizer.encode(text), context)
        finally:
            self.release(decoders)

    def next_logits(self, prompt: Prompt) -> np.ndarray:
        """The target's logits (vocab,) float32 for the token after ``prompt``."""
        decoders = self._decoders()
        decoders.reset(1)
        logits = decoders.target.feed([self.encode(prompt)], [1])[0][0].copy()
        self.release(decoders)
        return logits

    # ------------------------------------------------------------ for sessions

    def encode(self, prompt: Prompt, begins: bool = True) -> np.ndarray:
        """(n,) int64. ``begins``: the prompt starts a text and gets the model's BOS where it has one."""
        if begins and not len(prompt):
            return self._beginning()
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt) if begins else self.tokenizer.encode_more(prompt)
        if len(prompt) and isinstance(prompt[0], Mapping):
            if not begins:
                raise OvspecError("Chat messages can only begin a session; append the next turn as text.")
            # The template spells out the special tokens itself.
            return self.tokenizer.encode(chat_template(self.folder).render(list(prompt)), special=False)  # type: ignore[arg-type]
        ids = np.asarray(prompt, dtype=np.int64)
        known = self.tokenizer.known
        unknown = known.first_unknown(ids)
        if unknown is not None:
            upto = f" (0 to {known.size - 1})" if known.size else ""
            raise OvspecError(f"Token id {unknown} is not in the vocabulary{upto}.")
        return ids

    def row(self, sequence: Sequence, options: GenerateOptions, rows: int = 1, held: int = 0) -> Row:
        """A row that continues ``sequence`` as ``options`` say; raises OvspecError where they can't be met.

        It is one of ``rows``, and the KV cache of its first ``held`` tokens is there already.
        """
        unknown = options.keys() - GenerateOptions.__annotations__.keys()
        if unknown:
            raise TypeError(
                f"unknown option {sorted(unknown)[0]!r}; there are {', '.join(GenerateOptions.__annotations__)}"
            )
        stop = options.get("stop", [])
        stop = [stop] if isinstance(stop, str) else list(stop)
        if not all(stop):
            raise OvspecError("A stop string is empty; leave it out.")
        eos = frozenset() if options.get("ignore_eos") else self.eos_ids
        max_tokens = self._max_tokens(max(len(sequence), 1), options.get("max_tokens"))
        if not len(sequence):
            sequence.commit(self._beginning())
        used = [self._target, self._draft] if self.lookahead_of(options) else [self._target]
        check_memory([loaded.ir for loaded in used if loaded], len(sequence) + max_tokens - held, rows)
        row = Row(sequence, self.tokenizer.detokenizer(), max_tokens, stop, eos)
        stats, target = row.stats, self._target
        stats.rollback, stats.device = str(target.rollback), target.ir.device
        stats.engine, stats.engine_reason, stats.profile = target.engine, target.reason, target.profile
        if self._draft and self.lookahead_of(options):
            stats.draft_device, stats.draft_engine = self._draft.ir.device, self._draft.engine
        return row

    def lookahead_of(self, options: GenerateOptions) -> int:
        """Tokens to propose each round; 0 without a drafter."""
        wanted = options.get("lookahead")
        if wanted is not None and wanted < 0:
            raise OvspecError(f"lookahead is {wanted}; it must be 0 or more.")
        if wanted and not self._draft:
            raise OvspecError("lookahead needs a draft; load the model with draft=True or a draft's folder.")
        return self.lookahead if wanted is None else wanted

    def release(self, decoders: Decoders) -> None:
        """Take decoders back for the next session."""
        self._idle.append(decoders)

    @property
    def eos_ids(self) -> frozenset[int]:
        """The ids that end a text, from the generation config or else the model's config."""
        for config in (self._generation_config, self._target.ir.config):
            eos = config.get("eos_token_id")
            if eos is not None:
                return frozenset(eos if isinstance(eos, list) else [eos])
        return frozenset()

    def _beginning(self) -> np.ndarray:
        """What an empty prompt stands for: the tokenizer's BOS or else the generation config's, (n,) int64."""
        special = self.tokenizer.encode("")
        if len(special):
            return special
        bos = self._generation_config.get("bos_token_id")
        if bos is None:
            raise OvspecError("The prompt is empty, and this model has no token to begin a text with.")
        return np.array([bos], dtype=np.int64)

    def _max_tokens(self, prompt: int, wanted: int | None) -> int:
        if wanted is not None and wanted < 1:
            raise OvspecError(f"max_tokens is {wanted}; it must be at least 1.")
        context = self._target.ir.context_length
        left = context - prompt if context else None
        if left is not None and left < (wanted or 1):
            raise OvspecError(
                f"The prompt has {prompt} tokens and {wanted or 1} more are asked for, but the model's context "
                f"is {context}; shorten the prompt or lower max_tokens."
            )
        default = self._generation_config.get("max_new_tokens") or DEFAULT_MAX_TOKENS
        return wanted or (min(default, left) if left is not None else default)

    def _decoders(self) -> Decoders:
        with contextlib.suppress(IndexError):  # one step, so that threads don't take the same one
            return self._idle.pop()
        known = self.tokenizer.known
        drafter = DraftModel(self._draft.decoder(known)) if self._draft else None
        return Decoders(self._target.decoder(known), drafter)


# ---------------------------------------------------------------- loading


def embedded_pair() -> Path:
    """The demo pair of a source checkout."""
    folder = Path(__file__).resolve().parent.parent / "models" / "demo"
    if not folder.is_dir():
        raise OvspecError("This installation has no embedded model; name a folder made by 'ovspec export'.")
    return folder


def load(
    model: str | Path | None = None,
    draft: bool | str | Path | None = None,
    *,
    device: str = "CPU",
    draft_device: str | None = None,
    precision: str | None = None,
    kv_precision: str | None = None,
    threads: int | None = None,
    properties: dict[str, str] | None = None,
    cache_dir: str | Path | None = None,
    engine: EngineChoice = "auto",
    lookahead: int = DEFAULT_LOOKAHEAD,
    compact_at: int = COMPACT_AT,
    tune: bool | None = None,
    export: bool = False,
    verify: bool = False,
) -> LanguageModel:
    """Load an exported model.

    Args:
        model: a folder made by ``ovspec export`` or plain optimum-cli; the embedded pair by default.
            With ``export=True`` also a Hugging Face checkpoint (folder or hub id).
        draft: True for the draft exported beside the target, or the folder of another one.
        device: CPU, GPU, GPU.N, AUTO or AUTO:X,Y.
        draft_device: the draft's own; by default the same.
        precision: arithmetic, f32, bf16 or f16; by default what the device prefers.
        kv_precision: type of the KV cache, f32, bf16, f16 or u8; by default that of the arithmetic on
            the CPU and the device's own choice elsewhere.
        threads: CPU threads; by default what OpenVINO takes.
        properties: OpenVINO properties, which win over all the above.
        cache_dir: where compiled models are kept; by default the user's cache folder.
        engine: what drives the model and its draft; "auto" takes the paged decoder where it agrees with the
            stateful one, which runs everywhere.
        lookahead: tokens the draft proposes each round.
        compact_at: dead slots at which the stateful decoder's KV cache is compacted.
        tune: take what is fastest on this machine, as ``ovspec tune`` has measured it, or as a few seconds of
            measuring now show; what you name above wins. By default yes, unless the environment variable
            OVSPEC_TUNE is 0.
        verify: compare the checksums of all files with those of the export, which reads all of them.
        export: export ``model`` (and a ``draft`` given by name) into the cache first, unless done before.

    Raises:
        OvspecError: with one sentence that says what to do.
    """
    if lookahead < 0:
        raise OvspecError(f"lookahead is {lookahead}; it must be 0 or more.")
    if engine not in ENGINES:
        raise OvspecError(f"engine is {engine!r}; it must be one of {', '.join(ENGINES)}.")
    if draft_device and not draft:
        raise OvspecError("draft_device needs a draft.")
    if export:
        if model is None:
            raise OvspecError("export=True needs the model to export: a checkpoint folder or a hub id.")
        if draft is True:
            raise OvspecError("export=True needs the draft's checkpoint by name, not draft=True.")
        from ovspec.exporting import export_to_cache

        folder = export_to_cache(str(model), str(draft) if draft else None)
        draft = bool(draft)
    else:
        folder = Path(model) if model is not None else embedded_pair()
    restore_backup(folder)
    check_ir_folder(folder)
    options = DeviceOptions(
        device, precision, kv_precision, threads, properties or {}, Path(cache_dir) if cache_dir else None
    )
    manifest = read_manifest(folder, verify)
    if verify and not manifest:
        raise OvspecError(f"{folder}: to verify it needs the manifest of 'ovspec export', which is not there.")
    tune = os.environ.get("OVSPEC_TUNE") != "0" if tune is None else tune
    target = _load_ir(folder, options, engine, manifest.target.probe if manifest else None, compact_at, tune)
    if not draft:
        return LanguageModel(folder, target, None, 0)
    if draft is True:
        draft_folder = folder / DRAFT_FOLDER
        if not draft_folder.is_dir():
            raise OvspecError(f"{folder}: it was exported without a draft; name one, or export with --draft.")
    else:
        draft_folder = Path(draft)
    check_ir_folder(draft_folder)
    if not (draft is True and manifest and manifest.draft):
        check_same_vocabulary(folder, draft_folder)
    draft_options = replace(options, device=draft_device or device)
    probe = manifest.draft.probe if draft is True and manifest and manifest.draft else None
    loaded = _load_ir(draft_folder, draft_options, engine, probe, compact_at, tune)
    return LanguageModel(folder, target, loaded, lookahead)


def _load_ir(
    folder: Path, options: DeviceOptions, engine: EngineChoice, probe: Probe | None, compact_at: int, tune: bool
) -> LoadedIR:
    profile = tune_if_new(folder, options, lambda text: print(text, file=sys.stderr, flush=True)) if tune else None
    return load_with(profile, folder, options, engine, probe, compact_at)
