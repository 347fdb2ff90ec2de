"""pocket: a model of five million parameters that this project trained, its tasks, and the code that trains it."""
