"""Several engines behind one HTTP process: replicas, the router's use, their figures and their routes."""
