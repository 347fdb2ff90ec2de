"""Further processes: their start, their limits of time and memory, and the channels to them."""
