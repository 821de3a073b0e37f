"""Operations that run a plan: attention, its gradients, append_kv, merging. Private."""
