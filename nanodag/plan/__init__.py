"""Memory, time, disk and price of a run before it starts, and what would not work. No torch."""
