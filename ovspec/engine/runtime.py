"""The runtime of a loaded model: its prompt encoder, compiled models, pool of decoders and row maker."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from ovspec.base.errors import OvspecError
from ovspec.base.files import require_model_path
from ovspec.base.json_types import JsonObject
from ovspec.drafting.choice import DraftChoice
from ovspec.drafting.lookup import index_texts
from ovspec.engine.decoders import DecoderPool, ModelPair
from ovspec.engine.prompts import PromptEncoder
from ovspec.engine.row_maker import RowMaker
from ovspec.ir.compile import MODEL_FILE
from ovspec.ir.device import may_use_gpu
from ovspec.ir.gpu import free_models_at_exit
from ovspec.sampling.constraint_maker import ConstraintMaker
from ovspec.setup.engine_choice import CompiledModel
from ovspec.setup.identity import make_fingerprint, read_arithmetic_properties


class Runtime:
    """The ``prompt_encoder``, ``models``, ``decoder_pool`` and ``row_maker`` of a loaded model. Thread-safe.

    Args:
        folder: the exported folder of the target.
        target, draft: the compiled models.
        draft_choice: the drafters.
        lookahead: tokens proposed per round; None to choose automatically.
        corpus: texts for lookup's proposals.
        cache_bytes, cache_limit_bytes: see ``ModelPair``.
        tool_format, custom_template: see ``PromptEncoder``.
    """

    def __init__(
        self,
        folder: Path,
        target: CompiledModel,
        draft: CompiledModel | None = None,
        draft_choice: DraftChoice | None = None,
        lookahead: int | None = None,
        corpus: Iterable[str] = (),
        cache_bytes: float | None = None,
        cache_limit_bytes: float | None = None,
        tool_format: str | None = None,
        custom_template: str | None = None,
    ) -> None:
        self.folder = folder
        self.prompt_encoder = PromptEncoder(folder, target.ir.config, tool_format, custom_template)
        tokenizer = self.prompt_encoder.tokenizer
        corpora = [index_texts(tokenizer.encode(text.rstrip("\0"), False) for text in corpus)]
        self.models = ModelPair(
            target, draft, draft_choice, tokenizer.known_ids, corpora, cache_bytes, cache_limit_bytes
        )
        self.decoder_pool = DecoderPool(self.models)
        constraint_maker = ConstraintMaker(tokenizer)
        self.row_maker = RowMaker(self.prompt_encoder, self.models, constraint_maker, lookahead, lambda: self.identity)
        self._free_at_exit()

    def with_drafters(self, draft_choice: DraftChoice | None) -> Runtime:
        """Return a runtime of the same compiled models with other drafters; only the loaded draft model is possible."""
        copied_runtime = copy.copy(self)
        copied_runtime.models = self.models.with_drafters(draft_choice)
        copied_runtime.decoder_pool = DecoderPool(copied_runtime.models)
        copied_runtime.row_maker = replace(
            self.row_maker, models=copied_runtime.models, identity=lambda: copied_runtime.identity
        )
        copied_runtime._free_at_exit()
        return copied_runtime

    def _free_at_exit(self) -> None:
        if any(may_use_gpu(ir.device) for ir in self.models.compiled_irs()):
            free_models_at_exit(self)

    def close(self) -> None:
        """Free the compiled models for all their users; later forward passes raise InferenceError."""
        with contextlib.suppress(OvspecError, OSError):
            _ = self.identity  # records of texts need it later
        self.free()

    def free(self) -> None:
        self.models.close()
        self.decoder_pool.close()

    @functools.cached_property
    def identity(self) -> JsonObject:
        """The target's identity and settings, for records of texts."""
        return make_fingerprint(self.models.target)

    @functools.cached_property
    def target_weights_size(self) -> int:
        """The size of the target's weights on disk, in bytes."""
        return require_model_path((self.folder / MODEL_FILE).with_suffix(".bin")).stat().st_size

    @property
    def settings_label(self) -> str:
        """The target's settings and the drafters, in words."""
        target = self.models.target
        precision = read_arithmetic_properties(target).get("INFERENCE_PRECISION_HINT")
        settings_text = f"precision={precision!r}, device={target.ir.device!r}, engine={target.engine!r}"
        return f"{settings_text}, draft={str(self.models.draft_choice or 'none')!r}"

    def preload_files(self) -> None:
        """Read all small files now instead of at their first use, so the folder may be deleted."""
        for owner, attribute in (
            (self.prompt_encoder, "chat_format"),
            (self.prompt_encoder, "special_tokens_by_role"),
            (self, "identity"),
            (self, "target_weights_size"),
        ):
            with contextlib.suppress(OvspecError):  # raised again on first use
                getattr(owner, attribute)
