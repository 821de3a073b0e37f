"""The life of a step: device arrays, sampling, drafts, outputs, several processes. Private."""
