"""Inputs and files of planning, shared by profile, search and train."""
