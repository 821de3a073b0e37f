"""Between tokens and text. Private."""
