"""Private lots: secret streams of randomness, and the loaders that draw lots from them."""
