"""Searches over recipe fields: trials of one shape train in lockstep, on this machine or on a cluster."""
