"""Fetching a model directory, and loading all of it. Private."""
