"""Times and links that other tools measured, as our profile and cluster files."""
