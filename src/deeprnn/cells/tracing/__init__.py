"""From a step in ordinary PyTorch to a cell's description."""
