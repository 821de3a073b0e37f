"""Routes, connections, limits on bytes and the HTTP process. Private."""
