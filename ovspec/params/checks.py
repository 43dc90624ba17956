"""Makes ``Params`` of the options of a call, and refuses options that exclude or need each other."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ovspec.base.errors import OvspecError
from ovspec.params.generation import GENERATE, GRAMMARS, OF_SCHEMAS, Params
from ovspec.params.sampling import SAMPLES_WITH, SAMPLING
from ovspec.params.tools import tool_use, tools_of
from ovspec.params.values import check, check_names

CHECKED_WHERE_USED = {*GRAMMARS, "constrain_from", "logits_processors"}


def make_params(options: Mapping[str, Any]) -> Params:
    """Return the params of a call from Python's keywords or the command line's.

    Raises TypeError for an unknown option and OvspecError for an invalid value.
    """
    sampling = options.get("sampling")
    if isinstance(sampling, Params) and len(options) == 1:
        return sampling  # as the command line hands it on
    check_names(options, GENERATE)
    # In Python, None stands for the default of other options.
    values: dict[str, Any] = {name: v for name, v in options.items() if v is not None or name in SAMPLING}
    for name, value in values.items():
        if name not in CHECKED_WHERE_USED:
            check(value, GENERATE[name])
    if values.pop("sampling", None):
        names = GENERATE.keys() - {"sampling"} if isinstance(sampling, Params) else SAMPLING
        values = {name: getattr(sampling, name) for name in names} | values
    return checked(Params(**values))


def checked(params: Params) -> Params:
    """Return ``params``, whose values are valid one by one; raises OvspecError for those that exclude each other."""
    if params.conflict:
        raise OvspecError(params.conflict)
    check_grammar(params)
    params = check_tools(params)
    if params.sampler and (params.temperature or params.truncates):
        others = ", ".join(f"`{name}`" for name in SAMPLES_WITH)
        raise OvspecError(f"The sampler draws the tokens; leave out {others}.")
    if params.sampler and params.accept == "rejection":
        raise OvspecError("Leave out `accept='rejection'`: it needs probabilities, which a sampler does not return.")
    if params.truncates and not params.temperature:
        names = " and ".join(f"`{name}`" for name in params.truncates)
        raise OvspecError(f"{names} {'needs' if len(params.truncates) == 1 else 'need'} a `temperature` above 0.")
    return params


def check_tools(params: Params) -> Params:
    """Return ``params`` with the tools as OpenAI's; raises OvspecError for what can't be called."""
    if "tools" in (params.chat_template_kwargs or {}) and params.tools:
        raise OvspecError("`tools` and `chat_template_kwargs` both have tools; give them once.")
    if not params.tools:
        if params.tool_choice is not None:
            tool_use((), params.tool_choice)
        return params
    if params.ignore_eos:
        raise OvspecError("`tools` can't be combined with `ignore_eos`: a call decides where the text ends.")
    params = replace(params, tools=tools_of(params.tools))
    tool_use(params.tools, params.tool_choice)
    return params


def check_grammar(params: Params) -> None:
    """Raise OvspecError for options of grammars that exclude or need each other."""
    given = [name for name in GRAMMARS if getattr(params, name) is not None]
    if len(given) > 1:
        both = " and ".join(f"`{name}`" for name in given)
        raise OvspecError(f"{both} can't be combined; give one grammar that covers both.")
    if given and params.ignore_eos:
        raise OvspecError(f"`{given[0]}` decides where the text ends, so `ignore_eos` can't be combined with it.")
    if not given and params.constrain_from is not None:
        raise OvspecError("`constrain_from` sets where a grammar begins; give a grammar too.")
    more = [name for name in OF_SCHEMAS if getattr(params, name) != GENERATE[name].default]
    if more and params.json_schema is None and (more[0] == "retries" or not params.tools):
        raise OvspecError(f"`{more[0]}` is for JSON schemas; give `json_schema` too.")
    if params.retries and params.json_schema_mode != "checked":
        raise OvspecError("`retries` needs `json_schema_mode` checked: in the mode strict no text breaks the schema.")
    if params.retries and not params.temperature:
        raise OvspecError("`retries` needs a `temperature` above 0: a greedy text would be the same again.")


def refuse_retries(params: Params) -> None:
    """Raise OvspecError if ``params`` ask for retries, which a stream can't have."""
    if params.retries:
        raise OvspecError("`retries` can't be combined with a stream, whose text is seen before it ends.")
