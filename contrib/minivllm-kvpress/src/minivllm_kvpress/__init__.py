"""A compressor over kvpress.  Nothing is imported here, because reading the spec must be cheap."""
