"""Many plans or runs: what is asked, what does it, and the one table of what came out."""
