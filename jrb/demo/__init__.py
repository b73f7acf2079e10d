"""A training to look at: a double DQN with prioritized replay, all of it inside one jit."""
