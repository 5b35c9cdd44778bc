"""What is done with a release: filters, optimizers, ascents, averages. All of it is free.

Guarantee: everything here takes `Release` objects, weights and public numbers, so it is
post-processing: epsilon is that of the releases.
"""
