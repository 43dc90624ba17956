from pathlib import Path

import click

from ovspec.base.errors import OvspecError
from ovspec.cli.loading import load_model
from ovspec.cli.options import add_options, draft_option, split_load_and_generate_options
from ovspec.cli.path_type import PATH_TYPE
from ovspec.params.loading import LOAD_OPTIONS
from ovspec.params.option import OptionValue
from ovspec.params.serving import SERVE_OPTIONS, ServeParams


@click.command()
@click.argument("folder", required=False, type=PATH_TYPE, metavar="[DIR]")
@add_options(SERVE_OPTIONS)
@draft_option
@add_options(LOAD_OPTIONS)
def serve(folder: Path | None, **all_options: OptionValue) -> None:
    """Serve the model in DIR over OpenAI's API (by default the embedded demo pair).

    Requests join a batch that is generated round by round, with drafts, grammars and samplers. With exact arithmetic
    a request's text is the one that 'ovspec generate' gives alone, whatever else is asked for at the same time. What a
    request leaves out of its sampling is as the model's generation config recommends; --temperature sets another one.

    Only programs on this machine are served, unless there is a key: put keys into a file, one a line, for
    --api-key-file, or one into OVSPEC_API_KEY. SIGTERM or Ctrl-C lets running requests end; a second one ends them.

    \b
    Examples:
      ovspec serve my-pair
      ovspec serve my-pair --draft lookup,draft --api-key-file keys.txt --host 0.0.0.0
    """
    passed_options = {option: value for option, value in all_options.items() if value is not None}
    params = ServeParams(**{option: value for option, value in passed_options.items() if option in SERVE_OPTIONS})
    load_options, _ = split_load_and_generate_options(
        {option: value for option, value in passed_options.items() if option not in SERVE_OPTIONS}
    )
    try:
        from ovspec.server.server import check_option_combinations, open_socket, read_api_keys
        from ovspec.server.server import serve as serve_model
    except ImportError as error:
        raise OvspecError(f"The server needs {error.name}; install it with: pip install 'ovspec[serve]'") from None
    api_keys = read_api_keys(params.api_key_file)
    check_option_combinations(params, api_keys)
    listening_socket = open_socket(params.host, params.port)  # before the model is loaded, which takes long
    lm = load_model(folder, draft=load_options.pop("draft", None), lookahead=params.lookahead, **load_options)
    model_names = [*filter(None, params.model_name)] or [lm.folder.resolve().name]
    serve_model(lm, model_names, api_keys, listening_socket, params)
