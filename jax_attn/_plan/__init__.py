"""AttentionPlan, the schedule of a batch: making, reading, saving and drawing it. Private."""
