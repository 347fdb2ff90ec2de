"""JSON schemas as data: resolve references, forbid undeclared properties, and measure nesting."""
