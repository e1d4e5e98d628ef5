"""The paper run again: the ledger read, tables and figures built from it, the runs planned and carried out."""
