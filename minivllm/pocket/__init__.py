"""pocket: a five-million-parameter model made by this project, its tasks and the code that trains it."""
