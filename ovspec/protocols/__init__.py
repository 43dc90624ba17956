"""The shapes of requests and replies in the APIs of OpenAI, Anthropic and llama.cpp, without HTTP."""
