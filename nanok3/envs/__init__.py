"""Where it acts: tasks with an initial state, tools, budgets and an independent verifier, and what runs them."""
