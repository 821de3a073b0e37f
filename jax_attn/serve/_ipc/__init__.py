"""Messages between the HTTP process and the engine's. Private."""
