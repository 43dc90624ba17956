"""The server: OpenAI's API over HTTP, for ``ovspec serve``."""
