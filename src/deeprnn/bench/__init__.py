"""Speed on this machine, beside peers."""
