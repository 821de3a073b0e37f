"""The parts that depend on a model's chat template: messages, tool calls, reasoning. Private."""
