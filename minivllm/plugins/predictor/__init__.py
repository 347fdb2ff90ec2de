"""Built-in predictors of the length of answers and the time of steps."""
