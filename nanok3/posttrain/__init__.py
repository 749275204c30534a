"""How it becomes an agent."""
