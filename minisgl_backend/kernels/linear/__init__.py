"""GEMMs: few rows in the Triton language, more by the cuBLASLt algorithm that was measured fastest."""
