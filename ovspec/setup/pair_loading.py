"""Load the compiled models of a target and its draft, with the best settings for this machine."""

from __future__ import annotations

from pathlib import Path

from ovspec.base.progress import print_note
from ovspec.cache.decoder import Arithmetic
from ovspec.ir.device import DeviceOptions
from ovspec.ir.heads import is_head_folder
from ovspec.setup.engine_choice import CompiledModel, EngineChoice
from ovspec.setup.profile import Profile, load_model_with_profile
from ovspec.setup.proposers import load_compiled_draft, load_compiled_head
from ovspec.setup.tuning import load_or_tune_profile


def load_target_and_draft(
    folder: Path,
    options: DeviceOptions,
    engine: EngineChoice,
    arithmetic: Arithmetic | None,
    *,
    draft: Path | None,
    draft_options: DeviceOptions,
    tune: bool,
) -> tuple[CompiledModel, CompiledModel | None]:
    """Return the target in ``folder``, and the draft model or head in ``draft``, if any.

    ``tune``: use their profiles, and measure missing profiles; a head has no profile.
    """
    head = draft if draft and is_head_folder(draft) else None
    profile: Profile | None = None
    draft_profile: Profile | None = None
    if tune:  # before loading a model, because measuring takes memory
        profile = load_or_tune_profile(folder, options)
        if draft and not head:
            draft_profile = load_or_tune_profile(draft, draft_options)
    target = load_model_with_profile(profile, folder, options, engine, arithmetic, head)
    if target.lacks_requested_exactness:
        print_note(
            f"{folder}: {target.arithmetic_note}; a draft, a batch or a cached prompt may change a text at near-ties."
        )
    if head:
        return target, load_compiled_head(head, target, draft_options)
    if draft:
        return target, load_compiled_draft(draft, target, draft_options, engine, draft_profile)
    return target, None
