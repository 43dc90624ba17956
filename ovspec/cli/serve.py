import contextlib
import webbrowser
from collections.abc import Callable
from pathlib import Path

import click

from ovspec.base.errors import OvspecError
from ovspec.cli.loading import load_model
from ovspec.cli.options import add_options, draft_option, raise_usage_error_if, split_load_and_generate_options
from ovspec.cli.path_type import MODEL_TYPE
from ovspec.params.loading import LOAD_OPTIONS
from ovspec.params.option import OptionValue
from ovspec.params.serving import SERVE_OPTIONS, ServeParams


@click.command()
@click.argument("model", required=False, type=MODEL_TYPE, metavar="[MODEL]")
@add_options(SERVE_OPTIONS)
@draft_option
@add_options(LOAD_OPTIONS)
def serve(model: str | None, **all_options: OptionValue) -> None:
    """Serve MODEL over OpenAI's API (by default the embedded demo pair).

    Requests join a batch that is generated round by round, with drafts, grammars and samplers. With exact arithmetic
    a request's text is the one that 'ovspec generate' gives alone, whatever else is asked for at the same time. What a
    request leaves out of its sampling is as the model's generation config recommends; --temperature sets another one.
    The server's address, opened in a browser, is a chat.

    The server listens while MODEL is exported, and answers with status 503; /ready says how far that is.

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
    start_server(model, params, load_options)


def start_server(
    model: str | None,
    params: ServeParams,
    load_options: dict[str, OptionValue],
    on_start: Callable[[str], object] = lambda _: None,
) -> None:
    """Serve a model until a signal ends it; ``on_start`` is called with the server's address once it is up."""
    try:
        from ovspec.server.server import check_option_combinations, open_socket, read_api_keys
        from ovspec.server.server import serve as serve_model
        from ovspec.server.startup import answer_while_preparing
    except ImportError as error:
        raise OvspecError(f"The server needs {error.name}; install it with: pip install 'ovspec[serve]'") from None
    from ovspec.setup.exporting import find_exported_model, find_or_export_model

    api_keys = read_api_keys(params.api_key_file)
    check_option_combinations(params, api_keys)
    listening_socket = open_socket(params.host, params.port)  # before the model is loaded, which takes long
    draft = load_options.pop("draft", None)
    weight_format = load_options.pop("weight_format", None)
    with contextlib.ExitStack() as startup:
        if find_exported_model(model, draft, weight_format) is None:
            startup.enter_context(answer_while_preparing(listening_socket, api_keys, params.insecure))
        folder, draft = find_or_export_model(model, draft, weight_format)
        lm = load_model(folder, draft=draft, lookahead=params.lookahead, **load_options)
    model_names = [*filter(None, params.model_name)] or [name_model(model, lm.folder)]
    host, port = listening_socket.getsockname()[:2]
    serve_model(lm, model_names, api_keys, listening_socket, params, lambda: on_start(f"http://{host}:{port}/"))


def chat_in_browser(model: str | None, options: dict[str, OptionValue]) -> None:
    """Serve a model for this machine on a free port, and open its page; its options are set there."""
    passed_options = {name: value for name, value in options.items() if value is not None}
    load_options = {name: value for name, value in passed_options.items() if name in ("draft", *LOAD_OPTIONS)}
    for name in passed_options:
        flag = f"--{name.replace('_', '-')}"
        raise_usage_error_if(name not in load_options, f"With --web, options are set on the page; leave {flag} out.")
    start_server(model, ServeParams(port=0), load_options, webbrowser.open)


def name_model(model: str | None, folder: Path) -> str:
    """Return the name of the model that is served from ``folder``: that of its folder or file, or its hub id."""
    if model is None or Path(model) == folder:
        return folder.resolve().name
    return Path(model).resolve().name.removesuffix(".gguf") if Path(model).exists() else model
