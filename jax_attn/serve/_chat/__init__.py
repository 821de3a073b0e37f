"""What depends on a model's chat template: messages, tool calls, reasoning. Private."""
