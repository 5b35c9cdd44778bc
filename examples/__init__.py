"""Examples. A package, so that the one of the same name that Opacus installs does not hide it."""
