"""Many runs and what they say together: sweeps, statistics, comparison and optimisation."""
