"""AttentionPlan: making, reading, saving and drawing the schedule of a batch. Private."""
