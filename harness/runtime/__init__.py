"""Where torch lives: world, devices, models, data, engines."""
