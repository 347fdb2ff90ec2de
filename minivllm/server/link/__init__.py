"""Both ends of the link to the engine: the client, the process and its loop, and the frames between them."""
