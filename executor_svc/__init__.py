"""The executor: owns the model and the paged KV cache; runs one ragged forward per plan, samples, streams tokens."""
