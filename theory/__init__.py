"""The paper's claims, and more: proved symbolically, enumerated exactly, sampled, and able to fail.

``python -m theory`` verifies every claim at each of its levels; ``python -m theory mutants`` shows that each
check rejects wrong versions of its claim.
"""
