"""Check that a captured graph trains exactly as its model does."""
