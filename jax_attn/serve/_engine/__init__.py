"""The life of a step: device arrays, sampling, drafts, several processes. Private."""
