"""Cases, checks and benchmark of fused_logp, for the checker and the tests; not imported at run time."""
