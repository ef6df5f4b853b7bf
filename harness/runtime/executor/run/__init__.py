"""Actions of a schedule, and one step of them."""
