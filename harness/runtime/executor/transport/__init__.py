"""Communication of values between devices: messages, process groups, receives, all-reduces."""
