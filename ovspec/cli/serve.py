from pathlib import Path
from typing import Any

import click

from ovspec.base.errors import OvspecError
from ovspec.cli.loading import load_model
from ovspec.cli.options import add_options, draft_option, split_options
from ovspec.cli.path_type import PATH
from ovspec.params.loading import LOAD_OPTIONS
from ovspec.params.serving import SERVE_OPTIONS, ServeParams


@click.command()
@click.argument("folder", required=False, type=PATH, metavar="[DIR]")
@add_options(SERVE_OPTIONS)
@draft_option
@add_options(LOAD_OPTIONS)
def serve(folder: Path | None, **others: Any) -> None:
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
    options = ServeParams(
        **{name: value for name, value in others.items() if name in SERVE_OPTIONS and value is not None}
    )
    loading, _ = split_options({name: value for name, value in others.items() if name not in SERVE_OPTIONS})
    try:
        from ovspec.server.server import check_options, keys_of, open_socket
        from ovspec.server.server import serve as serve_model
    except ImportError as error:
        raise OvspecError(f"The server needs {error.name}; install it with: pip install 'ovspec[serve]'") from None
    keys = keys_of(options.api_key_file)
    check_options(options, keys)
    opened = open_socket(options.host, options.port)  # before the model is loaded, which takes long
    lm = load_model(folder, loading.pop("draft", None), lookahead=options.lookahead, **loading)
    serve_model(lm, [*filter(None, options.model_name)] or [lm.folder.resolve().name], keys, opened, options)
