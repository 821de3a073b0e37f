"""Operations over a plan: attention, its gradients, appending to pages, merging. Private."""
