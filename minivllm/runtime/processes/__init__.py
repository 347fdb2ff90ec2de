"""Processes beside this one: fresh, confined by limits on time and memory, and what each holds."""
