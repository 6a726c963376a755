"""From a conversation to a prompt, and from generated text to content, thoughts and calls."""
