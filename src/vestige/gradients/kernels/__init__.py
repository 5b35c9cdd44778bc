"""Norms and clipped sums of weight gradients in the precision of the tensor cores.

A record's weight gradient is G = sum_t g_t a_t^T over its positions t, from the inputs a (n, t, d)
and output gradients g (n, t, p) that autograd has. Clipping needs |G| for every record and
sum_i f_i G_i, and nothing else.

`fused` has Triton kernels for CUDA that never store a G; `reference` is the same in torch, for any
device, and what tests hold the kernels against. `bounds` says how far rounding can move either of
them; docs/numerics.md derives it. Which uses of a parameter come here is decided where they are
made (gradients/uses.py, gradients/rules/convolution.py).

Guarantee: a norm never understates that of what is added, whatever finite numbers a and g hold. An
overstated norm only clips more. Each row's norm depends on that row alone, and nothing is read back
by the host.
"""
