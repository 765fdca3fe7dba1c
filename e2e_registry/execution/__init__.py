"""Running recipes: one of them in a session of its own, and many of them in a suite."""
