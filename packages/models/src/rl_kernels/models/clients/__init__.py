"""What trainers need of the operators, one module a trainer."""
