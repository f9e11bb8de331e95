"""A sharded module on one rank: its program as steps of a forward and a backward pass, and these compiled."""
