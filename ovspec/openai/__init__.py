"""The shapes of OpenAI's API, which the server and the batch file share, and the batch file; no HTTP here."""
