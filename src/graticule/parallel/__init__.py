"""Layouts: what is put in the place of a model's modules so that several ranks compute it.

processes    `launch` (how they were started, how they meet), `watch` (they end together), `talk`
             (plain values), `together` (errors and sums of all), `local` (ranks on this machine)
numbers      `exchange`: the one way in which tensors go from rank to rank
stripes      `space` (what is substituted), `halo` (borrowed rows), `norms` (of the whole field)
windows      `layouts` (who holds which token, in arrays), `routes` (tokens on their way),
             `sequence` (tokens for heads)
weights      `tensor` (cut ones), `data` (sharded or replicated ones, gradients, their norm),
             `materialise` (memory and first values)
"""
