"""What executes a plan: programs read off it, and the processes that run them."""
