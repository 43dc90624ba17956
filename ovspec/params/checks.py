"""Makes ``Params`` from the options of a call, and refuses conflicting or incomplete options."""

from collections.abc import Mapping
from dataclasses import replace

from ovspec.base.errors import OvspecError
from ovspec.params.generation import GENERATE_OPTIONS, GRAMMAR_OPTIONS, SCHEMA_OPTIONS, Params
from ovspec.params.option import OptionValue
from ovspec.params.sampling import DISTRIBUTION_OPTIONS, SAMPLING_OPTIONS
from ovspec.params.tools import parse_tool_choice, parse_tools
from ovspec.params.values import check_option_names, check_value

OPTIONS_CHECKED_LATER = {*GRAMMAR_OPTIONS, "constrain_from", "logits_processors"}


def make_params(options: Mapping[str, OptionValue]) -> Params:
    """Return the params of a call from Python's keywords or the command line's.

    Raises TypeError for an unknown option and OvspecError for an invalid value.
    """
    sampling = options.get("sampling")
    if isinstance(sampling, Params) and len(options) == 1:
        return sampling  # already checked by the command line
    check_option_names(options, GENERATE_OPTIONS)
    # In Python, None stands for the default of other options.
    option_values: dict[str, OptionValue] = {
        name: value for name, value in options.items() if value is not None or name in SAMPLING_OPTIONS
    }
    for name, value in option_values.items():
        if name not in OPTIONS_CHECKED_LATER:
            check_value(value, GENERATE_OPTIONS[name])
    if option_values.pop("sampling", None):
        sampling_names = GENERATE_OPTIONS.keys() - {"sampling"} if isinstance(sampling, Params) else SAMPLING_OPTIONS
        option_values = {name: getattr(sampling, name) for name in sampling_names} | option_values
    return check_param_combinations(Params(**option_values))


def check_param_combinations(params: Params) -> Params:
    """Return ``params`` with individually valid values; raises OvspecError for conflicts between options."""
    if params.conflict_message:
        raise OvspecError(params.conflict_message)
    check_grammar_options(params)
    params = parse_tool_options(params)
    if params.sampler and (params.temperature or params.truncating_options):
        distribution_options = ", ".join(f"`{name}`" for name in DISTRIBUTION_OPTIONS)
        raise OvspecError(
            f"`sampler` can't be combined with {distribution_options}; leave out `sampler` or all others."
        )
    if params.sampler and params.accept == "rejection":
        raise OvspecError(
            "`accept='rejection'` needs probabilities, but a `sampler` returns none; leave out `accept` or `sampler`."
        )
    if params.truncating_options and not params.temperature:
        verb = "needs" if len(params.truncating_options) == 1 else "need"
        truncating_options = " and ".join(f"`{name}`" for name in params.truncating_options)
        raise OvspecError(f"{truncating_options} {verb} a `temperature` above 0.")
    return params


def parse_tool_options(params: Params) -> Params:
    """Return ``params`` with the tools in OpenAI's format; raises OvspecError for invalid tools or choices."""
    if "tools" in (params.chat_template_kwargs or {}) and params.tools:
        raise OvspecError(
            "`tools` and `chat_template_kwargs` both have tools; leave the tools out of `chat_template_kwargs`."
        )
    if not params.tools:
        if params.tool_choice is not None:
            parse_tool_choice((), params.tool_choice)
        return params
    if params.ignore_eos:
        raise OvspecError(
            "`tools` can't be combined with `ignore_eos`, because a tool call ends the text; leave one out."
        )
    params = replace(params, tools=parse_tools(params.tools))
    parse_tool_choice(params.tools, params.tool_choice)
    return params


def check_grammar_options(params: Params) -> None:
    """Raise OvspecError for conflicting or incomplete grammar options."""
    grammar_options = [name for name in GRAMMAR_OPTIONS if getattr(params, name) is not None]
    if len(grammar_options) > 1:
        quoted_options = " and ".join(f"`{name}`" for name in grammar_options)
        raise OvspecError(f"{quoted_options} can't be combined; give a single grammar for both.")
    if grammar_options and params.ignore_eos:
        raise OvspecError(
            f"`{grammar_options[0]}` can't be combined with `ignore_eos`, because the grammar ends the text; leave "
            "one out."
        )
    if not grammar_options and params.constrain_from is not None:
        raise OvspecError("`constrain_from` needs a grammar, such as `regex`; add a grammar.")
    schema_options = [name for name in SCHEMA_OPTIONS if getattr(params, name) != GENERATE_OPTIONS[name].default]
    if schema_options and params.json_schema is None and (schema_options[0] == "retries" or not params.tools):
        raise OvspecError(f"`{schema_options[0]}` works only with a JSON schema; add `json_schema`.")
    if params.retries and params.json_schema_mode != "checked":
        raise OvspecError(
            "`retries` needs `json_schema_mode='checked'`: in strict mode, every text matches the schema."
        )
    if params.retries and not params.temperature:
        raise OvspecError("`retries` needs a `temperature` above 0: greedy decoding would repeat the text.")


def refuse_retries_in_stream(params: Params) -> None:
    """Raise OvspecError if ``params`` include retries: streams don't support them."""
    if params.retries:
        raise OvspecError("`retries` can't be combined with streaming; leave one out.")
