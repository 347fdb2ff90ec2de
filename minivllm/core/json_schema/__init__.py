"""JSON schemas as data: their references, and objects closed to names that they do not declare, how deep."""
