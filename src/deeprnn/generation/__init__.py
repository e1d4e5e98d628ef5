"""A trained run writes music or text."""
