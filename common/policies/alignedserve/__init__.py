"""AlignedServe: decode batches of similar prefix length from a pool of KV in host memory (docs/papers.md, A1-A10)."""
