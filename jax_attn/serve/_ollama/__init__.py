"""Ollama's protocol: /api/chat, /api/generate and models as a translation to OpenAI's. Private."""
