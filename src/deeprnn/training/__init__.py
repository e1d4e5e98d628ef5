"""Training: the paper's recipe, populations in lockstep, runs that survive."""
