"""The presses of the stand-in."""
