"""The checker: relations that an implementation of an operator must hold, and the report of a run."""
