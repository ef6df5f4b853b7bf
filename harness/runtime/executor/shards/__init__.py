"""Modules that compute one block of one operator, by kind of operator."""
