"""The APIs of OpenAI's completions and chat completions."""
