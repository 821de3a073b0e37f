"""Anthropic's protocol: /v1/messages as a translation to chat completions. Private."""
