"""Step time and memory of private training against ordinary training and Opacus."""
