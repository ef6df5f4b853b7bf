"""Pieces of values between devices: messages, process groups, receives and sums."""
