"""Messages in the words of the command line."""

import re

import click

# How a message that Python shows too names an option: `name`, or with a value `name=value`.
OPTION = re.compile(r"`(\w+)(?:=([^`]*))?`")


def in_flags(message: object, command: click.Command | None = None) -> str:
    """Return ``message`` with the options of ``command``, by default the one that runs, as flags.

    `name` and `name=True` become --name, and `name='value'` --name value.
    """
    context = click.get_current_context(silent=True)
    command = command or (context and context.command)
    options = [param for param in command.params if isinstance(param, click.Option)] if command else []
    flags = {option.name: max(option.opts, key=len) for option in options}

    def flag(found: re.Match[str]) -> str:
        name, value = found.groups()
        if name not in flags:
            return found[0]
        return flags[name] if value in (None, "True", "False") else f"{flags[name]} {value.strip(chr(39))}"

    return OPTION.sub(flag, str(message))
