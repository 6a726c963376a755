"""The API of OpenAI's responses."""
