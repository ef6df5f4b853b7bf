"""Inputs and files of planning, which profile, search and train share."""
