"""Several processes that train one model: who they are, and what they say to each other."""
