"""The shapes of OpenAI's API, which the server and the batch file share; nothing here knows HTTP or files."""
