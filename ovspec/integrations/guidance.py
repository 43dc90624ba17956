"""A model for the guidance library (https://github.com/guidance-ai/guidance), to run its programs on ovspec."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from llguidance import LLTokenizer

from ovspec.api.model import LanguageModel
from ovspec.base.errors import OvspecError
from ovspec.base.files import read_dataclass, read_json
from ovspec.integrations.branches import BranchPool, LogitsRequestCounts
from ovspec.integrations.roles import RoleTexts, find_role_texts
from ovspec.text.tokenizer_files import TOKENIZER_FILE, TokenizerFile, read_special_tokens

try:
    from guidance._schema import SamplingParams  # type: ignore
    from guidance.chat import CHAT_TEMPLATE_CACHE, ChatTemplate, UnsupportedRoleException  # type: ignore
    from guidance.models import Model  # type: ignore
    from guidance.models._engine import Engine, EngineInterpreter, LogitsOutput, Tokenizer  # type: ignore
except ModuleNotFoundError:
    raise OvspecError(
        "The guidance library is not installed; run pip install '.[guidance]' in a clone of ovspec."
    ) from None


class OpenVINO(Model):
    """A guidance model on a loaded ``LanguageModel``, with speculation by its drafters.

    Args:
        lm: from ``ovspec.load``. The guidance model has separate KV caches, so ``lm`` remains usable.
        echo: show the text in a notebook, with token probabilities; for these all logits are computed and sorted.
        chat_template: a ``guidance.chat.ChatTemplate`` class, or a template's source; by default the model's.
        sampling_params: guidance's ``top_p``, ``top_k``, ``min_p``, ``repetition_penalty``.
        options: guidance's permissions, all on by default: ``enable_backtrack`` (tokenise the end of a text again),
            ``enable_ff_tokens`` (append tokens forced by a grammar without asking the model), ``enable_monitoring``
            (measure the CPU load).
    """

    def __init__(
        self,
        lm: LanguageModel,
        echo: bool = True,
        chat_template: str | type[ChatTemplate] | None = None,
        *,
        sampling_params: SamplingParams | None = None,
        **options: bool,
    ) -> None:
        engine = OpenVINOEngine(lm, chat_template, enable_token_probabilities=echo, enable_top_k=echo, **options)
        params = SamplingParams() if sampling_params is None else sampling_params
        super().__init__(interpreter=EngineInterpreter(engine), sampling_params=params, echo=echo)

    @property
    def stats(self) -> LogitsRequestCounts:
        """Counts of the requests of all programs on this model, and of the work they took."""
        return self._interpreter.engine.branches.counts


class OpenVINOEngine(Engine):
    """The source of logits for guidance, for all branches of its programs; ``options`` are ``Engine``'s."""

    def __init__(
        self, lm: LanguageModel, chat_template: str | type[ChatTemplate] | None = None, **options: bool
    ) -> None:
        self.branches = BranchPool(lm)
        tokenizer = OpenVINOTokenizer(lm, chat_template)
        self._logits_width = tokenizer.size
        enabled_options = {"enable_backtrack": True, "enable_ff_tokens": True, "enable_monitoring": True}
        super().__init__(tokenizer, **(enabled_options | options))

    def get_logits(self, token_ids: list[int], include_all_uncached_tokens: bool = False) -> LogitsOutput:
        """Implement ``Engine.get_logits``; ``n_cached`` equals ``n_tokens`` if no inference was needed."""
        logits, cached_tokens = self.branches.request_logits(token_ids, include_all_uncached_tokens)
        missing_ids = max(0, self._logits_width - logits.shape[1])  # ids unknown to the model
        padded_logits = np.pad(logits[:, : self._logits_width], ((0, 0), (0, missing_ids)), constant_values=-np.inf)
        return {"logits": padded_logits, "n_tokens": len(token_ids), "n_cached": cached_tokens}


class OpenVINOTokenizer(Tokenizer):
    """llguidance's tokenizer on the model's own ``tokenizer.json``; raises OvspecError if it is unsuitable."""

    def __init__(self, lm: LanguageModel, chat_template: str | type[ChatTemplate] | None = None) -> None:
        tokenizer_json = read_json(lm.folder / TOKENIZER_FILE)
        added_tokens = read_dataclass(TokenizerFile, lm.folder / TOKENIZER_FILE).added_tokens
        added_ids = {token.content: token.id for token in added_tokens}
        special_tokens = read_special_tokens(lm.folder)
        bos_id, eos_id = (added_ids.get(special_tokens.get(role, "")) for role in ("bos_token", "eos_token"))
        if eos_id is None:
            eos_id = min(lm.generation_config.eos_ids, default=None)
        if eos_id is None:
            raise OvspecError(
                f"{lm.folder}: the library guidance needs a model with an end-of-sequence token; use another model."
            )
        try:
            unpadded_json = json.dumps({**tokenizer_json, "padding": None, "truncation": None})
            ll_tokenizer = LLTokenizer(unpadded_json, eos_token=eos_id)
        except ValueError as error:
            reason = str(error)[:300].rstrip(".")
            raise OvspecError(
                f"{lm.folder}: the library guidance can't use the model's tokenizer ({reason}); use another model."
            ) from None
        self.size = ll_tokenizer.vocab_size
        if chat_template is None:
            chat_template = find_model_template(lm)
        super().__init__(ll_tokenizer, chat_template, bos_id)


def find_model_template(lm: LanguageModel) -> str | type[ChatTemplate] | None:
    """Return a class for the model's chat template, its source if guidance knows it or no class is possible, or None.

    Without a template, guidance uses ChatML and reports it.
    """
    try:
        model_template = lm.runtime.prompt_encoder.chat_format.template
    except OvspecError:
        return None
    if model_template.source in CHAT_TEMPLATE_CACHE:
        return model_template.source
    role_texts = find_role_texts(model_template)
    return make_template_class(model_template.source, role_texts) if role_texts else model_template.source


def make_template_class(source: str, role_texts: RoleTexts) -> type[ChatTemplate]:
    class ModelTemplate(ChatTemplate):
        template_str = source

        def get_role_start(self, role_name: str, **_: Any) -> str:
            return self._role_texts(role_name)[0]

        def get_role_end(self, role_name: str | None = None) -> str:
            return self._role_texts(role_name)[1]

        def _role_texts(self, role: str | None) -> tuple[str, str]:
            if role not in role_texts:
                raise UnsupportedRoleException(role, self)
            return role_texts[role]

    return ModelTemplate
