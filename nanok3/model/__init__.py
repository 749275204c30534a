"""What K3 is: one mechanism a file, each with its equation, slow reference and fast form."""
