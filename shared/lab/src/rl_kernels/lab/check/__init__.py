"""The checker: relations that an implementation of an operator must pass, and the report of a run."""
