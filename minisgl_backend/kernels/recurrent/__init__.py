"""The gated delta rule (Yang et al., 2024) over states that are folded page by page; see `kv.state`.

For one value head, with its state S [k_dim, v_dim], a token's query q and key k (normed), value v, decay e^g and
strength beta:

    S <- e^g S;  u = beta (v - S' k);  S <- S + k u';  o = S' q

`reference` is the contract. Steps of decoding use the same in the form of a window: with S_b, the state at the border,
and G, the sum of g since then, S = e^G S_b + sum over the tail of e^(G - G_j) k_j u_j'.
"""
