"""OpenAI's chats and completions."""
