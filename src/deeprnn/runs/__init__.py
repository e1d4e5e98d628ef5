"""What a run leaves behind: its folder, its checkpoints and its entry in the ledger."""
