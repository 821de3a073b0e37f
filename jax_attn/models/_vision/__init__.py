"""Pictures: vision towers, and the pixels that they read. Private."""
