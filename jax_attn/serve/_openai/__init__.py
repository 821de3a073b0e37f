"""Bodies and answers of the OpenAI protocol. Private."""
