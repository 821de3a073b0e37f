"""Engines, servers and clients that tests of the server share; no tests."""
