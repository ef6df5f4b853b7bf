"""Processes of a launch: launcher variables, rendezvous, isolation, broadcast and gather."""
