"""The command ``ovspec``, also as ``python -m ovspec``."""

import signal

heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not in the background or after nohup
if heard:  # while Python starts, Ctrl-C ends it without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from ovspec import cli  # noqa: E402


def main() -> None:
    """Run the command line, see ``ovspec.cli.main``."""
    if heard:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        cli.main()
    finally:
        if heard:  # and while it ends
            signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    main()
