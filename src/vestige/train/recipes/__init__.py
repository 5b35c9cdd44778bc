"""Ways of training that held up when others repeated them, each by one name."""
