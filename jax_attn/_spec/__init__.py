"""AttentionSpec, which selects a kernel and fixes shapes; formats, targets, tuning. Private."""
