"""Cases, checks and benchmark of linear_logp, for the checker and the tests; not imported at run time."""
