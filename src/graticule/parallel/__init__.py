"""Layouts: what is put in the place of a model's modules so that several ranks compute it.

`exchange` moves numbers between ranks, `local` starts ranks on this machine; the rest says what
is moved: `space` (stripes and halos), `routes` (windows), `tensor` (weights of attention and MLP)
and `data` (sharded or replicated weights, gradients, their norm).
"""
